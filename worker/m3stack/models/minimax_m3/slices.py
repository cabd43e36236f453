"""Where one rank's part of every checkpoint tensor goes: source rows and columns, target rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.layout import Placement, Shape, checkpoint_layout
from m3stack.models.minimax_m3.quantization import MXFP8_GROUP, WeightFormat
from m3stack.models.minimax_m3.ranks import Rank, Span, Split, even_span, expert_span, head_span
from m3stack.models.minimax_m3.stored import weight_formats


@dataclass(frozen=True, slots=True)
class Slice:
    """A rank's part of one plain tensor.

    Attributes:
        rows, columns: of the tensor; a vector has one column, and dims past the first are one.
        parameter: of the rank that it fills.
        expert: first index into a parameter that stacks the rank's own experts, else None.
        first_row: where it begins in the rank's (expert's) parameter.
        keeps_fp32: whatever the model's dtype.
        is_vector: its parameter has one dim less.
        is_quantisable: matrix of a text linear.
        stored: how the checkpoint stores it.
    """

    rows: Span
    columns: Span
    parameter: str
    expert: int | None
    first_row: int
    keeps_fp32: bool
    is_vector: bool
    is_quantisable: bool
    stored: WeightFormat


def rank_slices(config: M3Config, rank: Rank) -> dict[str, Slice]:
    """The parts a rank holds, by checkpoint name; tensors it holds nothing of are not there.

    Raises:
        StartupError: a size does not divide over the ranks.
    """
    formats = weight_formats(config)
    slices: dict[str, Slice] = {}
    # (parameter, expert) -> rows already given out; the layout lists fused parts in their order
    filled: dict[tuple[str, int | None], int] = {}
    experts = expert_span(config.num_experts, rank)
    for name, placement in checkpoint_layout(config).items():
        expert = None
        if placement.expert is not None:
            expert = placement.expert - experts.first
            if not 0 <= expert < experts.count:
                continue
        rows, columns = _spans(name, placement, formats[name], rank)
        target = (placement.parameter, expert)
        first_row = filled.get(target, 0)
        filled[target] = first_row + rows.count
        slices[name] = Slice(
            rows=rows,
            columns=columns,
            parameter=placement.parameter,
            expert=expert,
            first_row=first_row,
            keeps_fp32=placement.keeps_fp32,
            is_vector=len(placement.shape) == 1,
            is_quantisable=placement.is_quantisable,
            stored=formats[name],
        )
    return slices


def parameter_shapes(slices: Mapping[str, Slice]) -> dict[str, Shape]:
    """Shapes of the parameters that the slices fill; a vector's ends in 1."""
    shapes: dict[str, Shape] = {}
    for item in slices.values():
        rows = item.first_row + item.rows.count
        shape = (rows, item.columns.count)
        if item.expert is not None:
            shape = (item.expert + 1, *shape)
        known = shapes.get(item.parameter, shape)
        shapes[item.parameter] = tuple(max(pair) for pair in zip(known, shape, strict=True))
    return shapes


def _spans(name: str, placement: Placement, stored: WeightFormat, rank: Rank) -> tuple[Span, Span]:
    num_rows = placement.shape[0]
    all_rows, all_columns = Span(0, num_rows), Span(0, placement.numel // num_rows)
    part, parts = rank.tp_rank, rank.tp_size
    if placement.expert is not None:
        part, parts = rank.width_rank, rank.width_ranks
    is_whole = placement.split is Split.INDEX_HEADS and rank.index_in_parts
    if parts == 1 or is_whole:
        return all_rows, all_columns
    if placement.split is Split.ROWS:
        unit = placement.head_rows or 1
        return even_span(name, num_rows, part, parts, unit=unit), all_columns
    if placement.split in (Split.KV_HEADS, Split.INDEX_HEADS):
        heads = num_rows // placement.head_rows
        return head_span(name, heads, placement.head_rows, rank), all_columns
    if placement.split is Split.COLUMNS:
        # a group of a quantised row must stay whole, and so must a head
        group = 1 if stored is WeightFormat.PLAIN else MXFP8_GROUP
        unit = math.lcm(max(placement.head_rows, 1), group)
        return all_rows, even_span(name, all_columns.count, part, parts, unit=unit)
    return all_rows, all_columns
