"""Puts (token, expert) pairs into blocks of one expert each, on the GPU, in one launch.

No size leaves the GPU: grids are made for the most blocks that any routing can need.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

PAIRS_AT_ONCE = 1024
NO_EXPERT = -1


@dataclass(frozen=True, slots=True)
class PairBlocks:
    """Pairs by expert; pair p is choice p % k of token p // k.

    Attributes:
        pairs: int32 [blocks * rows], numbers of pairs; the number of all pairs where a row of a
            block is not used.
        experts: int32 [blocks], the expert of each block, -1 where a block is not used.
        rows: of a block.
    """

    pairs: Tensor
    experts: Tensor
    rows: int

    @property
    def max_blocks(self) -> int:
        return self.experts.shape[0]


def most_blocks(num_pairs: int, num_experts: int, rows: int) -> int:
    """Blocks that suffice however the pairs fall: an expert with pairs wastes less than one."""
    return min(num_pairs, num_pairs // rows + num_experts)


@triton.jit
def _group_kernel(
    ids, pairs, experts, num_pairs, max_blocks,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    index, bin_ = tl.arange(0, AT_ONCE), tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for base in range(0, num_pairs, AT_ONCE):
        one = tl.load(ids + base + index, mask=base + index < num_pairs, other=-1)
        is_pair = (one >= 0) & (one < EXPERTS)
        counts += tl.histogram(tl.where(is_pair, one, 0), BINS, mask=is_pair)
    blocks = tl.where(bin_ < EXPERTS, (counts + ROWS - 1) // ROWS, 0)
    first = tl.sum(tl.where(bin_ < expert, blocks, 0), 0)
    mine = tl.sum(tl.where(bin_ == expert, blocks, 0), 0)
    count = tl.sum(tl.where(bin_ == expert, counts, 0), 0)
    start = first * ROWS
    # pairs in their order, so that sums do not depend on timing
    placed = 0
    for base in range(0, num_pairs, AT_ONCE):
        one = tl.load(ids + base + index, mask=base + index < num_pairs, other=-1)
        hit = one == expert
        rank = tl.cumsum(hit.to(tl.int32), 0)
        tl.store(pairs + start + placed + rank - 1, base + index, mask=hit)
        placed += tl.sum(hit.to(tl.int32), 0)
    for base in range(count, mine * ROWS, AT_ONCE):
        slot = base + index
        tl.store(pairs + start + slot, tl.zeros([AT_ONCE], tl.int32) + num_pairs,
                 mask=slot < mine * ROWS)  # fmt: skip
    for base in range(0, mine, AT_ONCE):
        block = base + index
        tl.store(experts + first + block, tl.zeros([AT_ONCE], tl.int32) + expert, mask=block < mine)
    if expert == EXPERTS - 1:
        for base in range(first + mine, max_blocks, AT_ONCE):
            block = base + index
            tl.store(experts + block, tl.zeros([AT_ONCE], tl.int32) - 1, mask=block < max_blocks)


def group_pairs(ids_Tk: Tensor, num_experts: int, rows: int) -> PairBlocks:
    """Blocks of `rows` pairs, ascending by expert and by pair; negative ids are in none.

    Args:
        ids_Tk: int32 [T, k], contiguous.
    """
    num_pairs, device = ids_Tk.numel(), ids_Tk.device
    max_blocks = most_blocks(num_pairs, num_experts, rows)
    pairs = torch.empty(max_blocks * rows, dtype=torch.int32, device=device)
    experts = torch.empty(max_blocks, dtype=torch.int32, device=device)
    if num_pairs:
        _group_kernel[(num_experts,)](
            ids_Tk, pairs, experts, num_pairs, max_blocks,
            EXPERTS=num_experts, BINS=max(16, triton.next_power_of_2(num_experts)), ROWS=rows,
            AT_ONCE=PAIRS_AT_ONCE, num_warps=4,
        )  # fmt: skip
    return PairBlocks(pairs, experts, rows)
