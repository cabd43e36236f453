"""`Quantization`: which linears of a checkpoint are stored in fewer bits, read strictly.

Source: `quantization_config` of the released MXFP8 repository; that of ModelOpt's mixed export of
MiniMax-M3 (MXFP8 with NVFP4 routed experts).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from m3stack.errors import StartupError
from m3stack.models.strict_json import Section

MXFP8_GROUP, NVFP4_GROUP = 32, 16

_NAME = "config.json: quantization_config"
_SUPPORTED = "BF16 (no quantization_config), MXFP8 (mxfp8), MXFP8 with NVFP4 experts (modelopt)"


class WeightFormat(Enum):
    """How the matrix of a linear is stored; values are the names people use."""

    PLAIN = "bf16"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"


@dataclass(frozen=True, slots=True)
class Quantization:
    """What `quantization_config` says.

    Attributes:
        method: its `quant_method`: `mxfp8` or `modelopt`.
        ignored_layers: modules stored plain: names, or patterns with `*`, of a module or a parent,
            from any of its components on.
        formats: format by module where the file lists each one; empty where all text linears but
            the ignored ones are MXFP8.
    """

    method: str
    ignored_layers: tuple[str, ...] = ()
    formats: Mapping[str, WeightFormat] = field(default_factory=dict)

    def format_of(self, module: str) -> WeightFormat:
        """How the matrix of a text linear is stored; `module` is its name without `.weight`."""
        if self.formats:
            return self.formats.get(module, WeightFormat.PLAIN)
        if any(_names(pattern, module) for pattern in self.ignored_layers):
            return WeightFormat.PLAIN
        return WeightFormat.MXFP8


def read_quantization(data: Mapping[str, Any]) -> Quantization:
    """Reads a `quantization_config` object.

    Raises:
        StartupError: the method is not supported, a key is missing or unknown, or a value cannot
            be honoured.
    """
    method = data.get("quant_method")
    if not isinstance(method, str):
        raise StartupError("config.json: quantization_config has no quant_method")
    readers = {"mxfp8": _read_mxfp8, "modelopt": _read_modelopt}
    if method not in readers:
        fp4 = " (that is how MXFP4 repositories name theirs)" if method in _FP4_METHODS else ""
        raise StartupError(
            f"config.json: weights quantised by {method!r}{fp4} are not supported; use a "
            f"repository in one of: {_SUPPORTED}"
        )
    return readers[method](data)


_FP4_METHODS = ("quark", "mxfp4")


def released_quantization_config(gates: list[str]) -> dict[str, Any]:
    """The object that the released MXFP8 repository has.

    Args:
        gates: module names of all routers.
    """
    ignored = ["lm_head", "model.embed_tokens", "vision_tower", "multi_modal_projector"]
    return {
        "quant_method": "mxfp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [1, MXFP8_GROUP],
        "ignored_layers": [*ignored, "patch_merge_mlp", *sorted(gates)],
    }


def _read_mxfp8(data: Mapping[str, Any]) -> Quantization:
    section = Section(
        _NAME,
        data,
        required=("quant_method", "weight_block_size"),
        optional=("activation_scheme", "ignored_layers", "fmt", "scale_fmt"),
    )
    section.pin(
        {
            "weight_block_size": [1, MXFP8_GROUP],
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
        }
    )
    ignored = _strings(section, data, "ignored_layers")
    return Quantization(section.one_of("quant_method", ("mxfp8",)), ignored)


def _read_modelopt(data: Mapping[str, Any]) -> Quantization:
    section = Section(
        _NAME,
        data,
        required=("quant_method", "quant_algo", "quantized_layers"),
        optional=("kv_cache_quant_algo", "exclude_modules", "producer"),
    )
    section.pin({"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None})
    formats: dict[str, WeightFormat] = {}
    for module, how in section.inner("quantized_layers").items():
        if how == {"quant_algo": "MXFP8"}:
            formats[module] = WeightFormat.MXFP8
        elif how == {"quant_algo": "NVFP4", "group_size": NVFP4_GROUP}:
            formats[module] = WeightFormat.NVFP4
        else:
            raise StartupError(
                f"{_NAME}.quantized_layers.{module} is {how!r}, expected MXFP8, or NVFP4 in "
                f"groups of {NVFP4_GROUP}"
            )
    if not formats:
        raise StartupError(f"{_NAME}.quantized_layers is empty")
    return Quantization("modelopt", _strings(section, data, "exclude_modules"), formats)


def _strings(section: Section, data: Mapping[str, Any], key: str) -> tuple[str, ...]:
    values = data.get(key, [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise section.refusal(key, "a list of module names")
    return tuple(values)


def _names(pattern: str, module: str) -> bool:
    """Whether a name or pattern stands for a module, one of its parents, or a tail of either."""
    if "*" in pattern:
        return fnmatchcase(f".{module}.", f"*.{pattern}.*")
    # the cheap test first: there are 62 names for 22,422 modules
    return pattern in module and f".{pattern}." in f".{module}."
