"""The two ways to regroup chosen blocks, in plain torch: tile unions, and block to rows.

They define what the list kernels build; the attention arms are correct for any such lists.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from m3stack.kernels.interface import PagedRows


@dataclass(frozen=True, slots=True)
class RowTile:
    """Neighbouring rows of one sequence.

    Attributes:
        first_row: row of the step.
        num_rows: at most the tile size.
        sequence: index of the owner.
        position: absolute position of the first row.
    """

    first_row: int
    num_rows: int
    sequence: int
    position: int


@dataclass(frozen=True, slots=True)
class Union:
    """Blocks that some row of a tile chose, ascending, and for each the rows that did, as bits."""

    blocks: tuple[int, ...]
    members: tuple[int, ...]


def cut_rows(rows: PagedRows, tile_rows: int) -> list[RowTile]:
    """Tiles of every sequence with keys, in row order; none crosses a sequence."""
    starts, lengths = rows.query_start_S1.tolist(), rows.seq_lens_S.tolist()
    tiles = []
    for index, length in enumerate(lengths):
        end = starts[index + 1] if length > 0 else starts[index]
        for first in range(starts[index], end, tile_rows):
            tiles.append(RowTile(first, min(tile_rows, end - first), index, length - end + first))
    return tiles


def tile_union(blocks_TK: Tensor, tile: RowTile) -> Union:
    """Union of one group's choices over a tile.

    Args:
        blocks_TK: int32 [T, K] of one group, negative where a row has no block.
    """
    chosen = [
        {block for block in row if block >= 0}
        for row in blocks_TK[tile.first_row : tile.first_row + tile.num_rows].tolist()
    ]
    blocks = sorted(set().union(*chosen))
    return Union(
        tuple(blocks),
        tuple(sum(1 << row for row, own in enumerate(chosen) if block in own) for block in blocks),
    )


def load_factor(blocks_GTK: Tensor, rows: PagedRows, tile_rows: int) -> float:
    """Blocks a tile loads over the mean blocks of one of its rows, over all tiles and groups.

    1 where all rows agree, `tile_rows` where none does.
    """
    tiles = cut_rows(rows, tile_rows)
    unions = [tile_union(blocks_TK, tile) for blocks_TK in blocks_GTK for tile in tiles]
    loaded = sum(len(union.blocks) for union in unions)
    return tile_rows * loaded / max(1, int((blocks_GTK >= 0).sum()))


@dataclass(frozen=True, slots=True)
class Inversion:
    """Rows by the block they chose, as compressed rows.

    Attributes:
        starts_N1: int64 [G * S * J + 1]; bucket (g, s, b) is number (g * S + s) * J + b.
        edges_E: int64 [E], row * K + slot, ascending inside a bucket.
    """

    starts_N1: Tensor
    edges_E: Tensor


def invert_blocks(blocks_GTK: Tensor, rows: PagedRows, max_blocks: int) -> Inversion:
    """Which rows chose a block of their sequence, with the slot it has in their list.

    Args:
        blocks_GTK: int32 [G, T, K], negative where a row has no block.
        rows: the step; rows of empty sequences must have no block.
        max_blocks: J, more than any block of the step.
    """
    groups, num_tokens, num_chosen = blocks_GTK.shape
    num_sequences = rows.seq_lens_S.shape[0]
    starts_S1 = rows.query_start_S1.long()
    sequence_T = torch.searchsorted(starts_S1, torch.arange(num_tokens), right=True) - 1
    bucket_GTK = (
        torch.arange(groups)[:, None, None] * num_sequences + sequence_T[None, :, None]
    ) * max_blocks + blocks_GTK.long()
    edge_TK = torch.arange(num_tokens * num_chosen).view(num_tokens, num_chosen)
    present = blocks_GTK >= 0
    bucket_E, edge_E = bucket_GTK[present], edge_TK.expand(groups, -1, -1)[present]
    order = bucket_E.argsort(stable=True)
    sizes = torch.bincount(bucket_E, minlength=groups * num_sequences * max_blocks)
    return Inversion(torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]), edge_E[order])
