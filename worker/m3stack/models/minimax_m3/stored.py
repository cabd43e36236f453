"""The tensors that a checkpoint's files hold: those of the layout, as its quantisation splits them.

Source: tensor lists of the released BF16 (23,416 tensors) and MXFP8 (45,838) repositories;
ModelOpt's export of MiniMax-M3 for NVFP4 experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from m3stack.errors import StartupError
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.layout import Placement, Shape, checkpoint_layout
from m3stack.models.minimax_m3.quantization import MXFP8_GROUP, NVFP4_GROUP, WeightFormat

PLAIN_DTYPES = ("BF16", "F16", "F32")


class Part(Enum):
    """What a stored tensor is to its weight."""

    VALUES = auto()
    ELEMENTS = auto()
    SCALES = auto()
    GLOBAL_SCALE = auto()
    INPUT_SCALE = auto()
    """Of calibrated activations, which no back end of the house quantises: read by nobody."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a file.

    Attributes:
        weight: name of the plain tensor it belongs to.
        part: what it is to that.
        shape: in the file.
        dtypes: safetensors names that it may have; the released one first.
        columns_per_entry: columns of the plain tensor that one entry of a row stands for.
        is_optional: exporters leave it out at times.
    """

    weight: str
    part: Part
    shape: Shape
    dtypes: tuple[str, ...]
    columns_per_entry: int = 1
    is_optional: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def weight_formats(config: M3Config) -> dict[str, WeightFormat]:
    """How each plain tensor of `checkpoint_layout` is stored.

    Raises:
        StartupError: a width that no whole groups fit, or a listed module that does not exist.
    """
    layout, quantization = checkpoint_layout(config), config.quantization
    if quantization is None:
        return dict.fromkeys(layout, WeightFormat.PLAIN)
    formats = {}
    for name, placement in layout.items():
        stored = WeightFormat.PLAIN
        if placement.is_quantisable:
            stored = quantization.format_of(name.removesuffix(".weight"))
        group = _GROUPS[stored]
        if placement.shape[-1] % group:
            raise StartupError(
                f"{name}: {placement.shape[-1]} columns are no multiple of {group}, the "
                f"{stored.value} group that config.json calls for"
            )
        formats[name] = stored
    linears = {name.removesuffix(".weight") for name, item in layout.items() if item.is_quantisable}
    unknown = sorted(set(quantization.formats) - linears)
    if unknown:
        raise StartupError(
            f"config.json: quantization_config.quantized_layers names {unknown[0]}, which is no "
            "linear of the text model"
        )
    return formats


def stored_tensors(config: M3Config) -> dict[str, Stored]:
    """Every tensor of a checkpoint with this config, quantisation included, in a fixed order.

    Raises:
        StartupError: as `weight_formats`.
    """
    formats = weight_formats(config)
    tensors = {}
    for name, placement in checkpoint_layout(config).items():
        tensors.update(_parts(name, placement, formats[name]))
    return tensors


_GROUPS = {WeightFormat.PLAIN: 1, WeightFormat.MXFP8: MXFP8_GROUP, WeightFormat.NVFP4: NVFP4_GROUP}


def _parts(name: str, placement: Placement, how: WeightFormat) -> Iterator[tuple[str, Stored]]:
    if how is WeightFormat.PLAIN:
        dtypes = ("F32", "BF16", "F16") if placement.keeps_fp32 else PLAIN_DTYPES
        yield name, Stored(name, Part.VALUES, placement.shape, dtypes)
        return
    rows, columns = placement.shape
    if how is WeightFormat.MXFP8:
        yield name, Stored(name, Part.ELEMENTS, (rows, columns), ("F8_E4M3",))
        # the bytes are E8M0 exponents, whichever of the two names the file gives them
        scales = Stored(
            name, Part.SCALES, (rows, columns // MXFP8_GROUP), ("U8", "F8_E8M0"), MXFP8_GROUP
        )
        yield name + "_scale_inv", scales
        return
    yield name, Stored(name, Part.ELEMENTS, (rows, columns // 2), ("U8",), 2)
    scales = Stored(name, Part.SCALES, (rows, columns // NVFP4_GROUP), ("F8_E4M3",), NVFP4_GROUP)
    yield name + "_scale", scales
    yield name + "_scale_2", Stored(name, Part.GLOBAL_SCALE, (), ("F32",))
    input_scale = name.removesuffix("weight") + "input_scale"
    yield input_scale, Stored(name, Part.INPUT_SCALE, (), ("F32",), is_optional=True)
