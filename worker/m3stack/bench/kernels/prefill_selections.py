"""Synthetic block selections for the prefill attention: how far neighbouring rows agree.

Published M3 selections add about two new blocks a row; identical and disjoint rows are the ends
between which real ones lie.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from m3stack.kernels.interface import NO_BLOCK, PagedRows
from m3stack.kernels.msa.prefill.row_tiles import row_positions

MEASURED_LIKE, IDENTICAL, DISJOINT = 2, 0, 15


def rolling_selection(
    rows: PagedRows, num_tokens: int, groups: int, new_blocks: int, *, seed: int, chosen: int = 16
) -> Tensor:
    """Selections in which each row replaces `new_blocks` of its predecessor's ranked blocks.

    A row's ranked blocks come from those before the first row of its sequence, in a random order
    of its own for each group, without repeats inside a list; the row's own block is the last.
    Where a sequence has too few blocks before its first row, rows choose all they can see.

    Returns:
        int32 [G, T, K], ascending, -1 at the tail.
    """
    ranked = chosen - 1
    device = rows.seq_lens_S.device
    blocks_GTK = torch.full((groups, num_tokens, chosen), NO_BLOCK, dtype=torch.int32)
    own_T = row_positions(rows, num_tokens).cpu() // 128
    starts = rows.query_start_S1.tolist()
    generator = torch.Generator().manual_seed(seed)
    for first, last in pairwise(starts):
        if last == first or own_T[first] < 0:
            continue
        before = int(own_T[first])
        row_N1 = torch.arange(last - first)[:, None]
        slot_R = torch.arange(ranked)
        for group in range(groups):
            if before < chosen:
                picked_NR = slot_R.expand(last - first, -1)
                picked_NR = picked_NR.masked_fill(picked_NR >= own_T[first:last, None], -1)
            else:
                order = torch.randperm(before, generator=generator)
                # draws fill the slots in turn, so a slot holds its latest draw
                newest_N1 = new_blocks * row_N1 + ranked
                picked_NR = order[(newest_N1 - (newest_N1 - slot_R) % ranked) % before]
            lists_NK = torch.cat([picked_NR, own_T[first:last, None]], 1)
            lists_NK = lists_NK.masked_fill(lists_NK < 0, 1 << 40).sort(-1).values
            blocks_GTK[group, first:last] = lists_NK.masked_fill(lists_NK == 1 << 40, -1).int()
    return blocks_GTK.to(device)
