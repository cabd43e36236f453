"""Where the rows of a step stand and how they are cut into tiles, on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from m3stack.kernels.interface import PagedRows


def row_positions(rows: PagedRows, num_tokens: int) -> Tensor:
    """Absolute position int64 [T] of every row, -1 for rows of no key; no host sync."""
    starts_S1, lens_S = rows.query_start_S1.long(), rows.seq_lens_S.long()
    row_T = torch.arange(num_tokens, device=lens_S.device)
    owner_T = torch.searchsorted(starts_S1, row_T, right=True) - 1
    inside_T = owner_T < lens_S.shape[0]
    owner_T = owner_T.clamp(max=lens_S.shape[0] - 1)
    position_T = lens_S[owner_T] - starts_S1[owner_T + 1] + row_T
    return position_T.masked_fill(~inside_T | (lens_S[owner_T] <= 0), -1)


def cut_tiles(rows: PagedRows, num_tokens: int, tile_rows: int, groups: int) -> Tensor:
    """Tiles of flat (row, group) pairs that never cross sequences, int64 [N, 4]; no host sync.

    N is an upper bound; a tile past the end, or of an empty sequence, has no rows. Columns: first
    flat row, rows, position of the first row times `groups` plus the offset, sequence.
    """
    starts_S1, lens_S = rows.query_start_S1.long() * groups, rows.seq_lens_S.long()
    num_sequences = lens_S.shape[0]
    bound = -(-num_tokens * groups // tile_rows) + num_sequences
    counts_S = (starts_S1.diff() + tile_rows - 1) // tile_rows
    ends_S = counts_S.cumsum(0)
    tile_N = torch.arange(bound, device=lens_S.device)
    owner_N = torch.searchsorted(ends_S, tile_N, right=True)
    inside_N = owner_N < num_sequences
    owner_N = owner_N.clamp(max=num_sequences - 1)
    offset_N = (tile_N - ends_S[owner_N] + counts_S[owner_N]) * tile_rows
    total_N = starts_S1[owner_N + 1] - starts_S1[owner_N]
    inside_N &= lens_S[owner_N] > 0
    held_N = torch.where(inside_N, (total_N - offset_N).clamp(max=tile_rows), 0)
    position_N = torch.where(inside_N, lens_S[owner_N] * groups - total_N + offset_N, -1)
    first_N = torch.where(inside_N, starts_S1[owner_N] + offset_N, 0)
    return torch.stack([first_N, held_N, position_N, owner_N], 1)


def require_powers(**sizes: int) -> None:
    """Raises ValueError for a size that is not a power of two of at least 16."""
    for name, size in sizes.items():
        if size < 16 or size & (size - 1):
            raise ValueError(f"{name} size must be a power of two of at least 16, not {size}")


def require_dense_rows(*pools: Tensor) -> None:
    """Pools are read in place, whatever their order of pages, groups and tokens."""
    for pool in pools:
        if pool.stride(-1) != 1:
            raise ValueError(f"the head dim of a pool must be contiguous, strides {pool.stride()}")
