"""What a conversion writes: the target's tensors, its shards, its config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from m3stack.errors import StartupError
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.layout import checkpoint_layout
from m3stack.models.minimax_m3.quantization import (
    MXFP8_GROUP,
    WeightFormat,
    read_quantization,
    released_quantization_config,
)
from m3stack.models.minimax_m3.stored import Part, weight_formats
from m3stack.models.minimax_m3.weights import Checkpoint, open_checkpoint
from m3stack.models.strict_json import read_object
from m3stack.weight_files.directory import SINGLE_FILE
from m3stack.weight_files.header import num_bytes

SHARD_BYTES = 14_500_000_000
"""About the released repositories' own: 31 shards of the MXFP8 one."""

SCALES_SUFFIX = "_scale_inv"


class Target(Enum):
    """What linears of the text model become."""

    MXFP8 = "mxfp8"
    BF16 = "bf16"


class Step(Enum):
    """What happens to one weight."""

    COPY = "copy"
    ENCODE = "encode"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Item:
    """One plain tensor's way into the target.

    Attributes:
        weight: its name.
        step: what happens to it.
        stored: how the source has it.
        outputs: tensors of the target: name -> (safetensors dtype, shape).
    """

    weight: str
    step: Step
    stored: WeightFormat
    outputs: Mapping[str, tuple[str, tuple[int, ...]]]

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes(*entry) for entry in self.outputs.values())


@dataclass(frozen=True, slots=True)
class Plan:
    """One conversion.

    Attributes:
        source: checked files.
        target: of the linears.
        config: the target's config.json.
        shards: file name -> what goes into it, in order.
    """

    source: Checkpoint
    target: Target
    config: Mapping[str, Any]
    shards: Mapping[str, tuple[Item, ...]]

    @property
    def weight_map(self) -> dict[str, str]:
        """Tensor -> file, as in an index."""
        return {
            name: file
            for file, items in self.shards.items()
            for item in items
            for name in item.outputs
        }


def plan_conversion(source: Path, target: Target, *, shard_bytes: int = SHARD_BYTES) -> Plan:
    """Checks the source and says what to write.

    Raises:
        StartupError: the source is not a good checkpoint, or not one to convert to this target.
    """
    data = read_object(source / "config.json")
    config = M3Config.from_object(data)
    _check_direction(source, config, target)
    checkpoint = open_checkpoint(source, config)
    layout = checkpoint_layout(config)
    gates = [
        name.removesuffix(".weight")
        for name in layout
        if name.endswith("block_sparse_moe.gate.weight")
    ]
    new_data = {key: value for key, value in data.items() if key != "quantization_config"}
    new_config = replace(config, quantization=None)
    if target is Target.MXFP8:
        new_data["quantization_config"] = released_quantization_config(gates)
        new_config = replace(
            config, quantization=read_quantization(new_data["quantization_config"])
        )
    old, new = weight_formats(config), weight_formats(new_config)
    items = [_item(checkpoint, name, old[name], new[name]) for name in layout]
    return Plan(checkpoint, target, new_data, _shards(items, shard_bytes))


def _check_direction(source: Path, config: M3Config, target: Target) -> None:
    method = config.quantization.method if config.quantization else None
    if target is Target.BF16 and method is None:
        raise StartupError(f"{source} is not quantised: there is nothing to convert to bf16")
    if target is Target.MXFP8 and method is not None:
        again = (
            "is in MXFP8 already"
            if method == "mxfp8"
            else "has NVFP4 experts, which MXFP8 would only enlarge; convert the BF16 repository"
        )
        raise StartupError(f"{source} {again}")


def _item(checkpoint: Checkpoint, name: str, old: WeightFormat, new: WeightFormat) -> Item:
    if old is new:
        # only plain tensors stay what they are
        _, _, entry = checkpoint.entry(name, Part.VALUES)
        return Item(name, Step.COPY, old, {name: (entry.dtype, entry.shape)})
    part = Part.VALUES if old is WeightFormat.PLAIN else Part.ELEMENTS
    rows, columns = checkpoint.parts[name][part][2].shape
    if new is WeightFormat.MXFP8:
        outputs = {
            name: ("F8_E4M3", (rows, columns)),
            name + SCALES_SUFFIX: ("U8", (rows, columns // MXFP8_GROUP)),
        }
        return Item(name, Step.ENCODE, old, outputs)
    columns *= checkpoint.parts[name][part][2].columns_per_entry
    return Item(name, Step.DECODE, old, {name: ("BF16", (rows, columns))})


def _shards(items: list[Item], shard_bytes: int) -> dict[str, tuple[Item, ...]]:
    groups = list(_groups(items, shard_bytes))
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {
        f"model-{index:05}-of-{len(groups):05}.safetensors": group
        for index, group in enumerate(groups, start=1)
    }


def _groups(items: list[Item], shard_bytes: int) -> Iterator[tuple[Item, ...]]:
    group: list[Item] = []
    size = 0
    for item in items:
        if group and size + item.num_bytes > shard_bytes:
            yield tuple(group)
            group, size = [], 0
        group.append(item)
        size += item.num_bytes
    yield tuple(group)
