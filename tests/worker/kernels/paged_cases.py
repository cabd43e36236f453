"""Random paged steps with everything that a step may hold, and plain views of what is in them."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from m3stack.kernels.interface import LayerPages, PagedRows

HEADS, GROUPS, DIM, BLOCK = 6, 2, 8, 4
NO_ADDRESS = 1 << 30


@dataclass(frozen=True, slots=True)
class PagedCase:
    """One step over a shuffled cache with NaN in every unwritten slot.

    `row_sequence[t]` and `row_position[t]` say where row t stands; -1 for rows of no sequence.
    """

    rows: PagedRows
    pages: LayerPages
    num_tokens: int
    row_sequence: list[int]
    row_position: list[int]

    def keys(self, pool_PxBD: Tensor, sequence: int, length: int) -> Tensor:
        """The first `length` entries [length, ..., D] of a sequence, in order of position."""
        table = self.rows.page_table_SJ[sequence, : -(-length // BLOCK)].long()
        paged = pool_PxBD[table]
        if paged.dim() == 4:
            paged = paged.transpose(1, 2)
        return paged.flatten(0, 1)[:length]


def paged_case(seed: int, *, decode_only: bool = False) -> PagedCase:
    """A step of up to six sequences: decode rows, chunks, idle and padded ones."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    counts, lengths = [], []
    for _ in range(draw.randint(1, 6)):
        count = 1 if decode_only else draw.choice([0, 1, 1, draw.randint(2, 20)])
        length = count + draw.choice([0, draw.randint(0, 7), draw.randint(0, 80)])
        if count == 1 and draw.random() < 0.2:
            length = 0
        counts.append(count)
        lengths.append(length)
    width = max(1, max(-(-length // BLOCK) for length in lengths))
    table = torch.full((len(counts), width), NO_ADDRESS, dtype=torch.int32)
    free = list(range(len(counts) * width + 2))
    draw.shuffle(free)
    pages = LayerPages(
        k_PGBD=torch.full((len(free), GROUPS, BLOCK, DIM), float("nan")),
        v_PGBD=torch.full((len(free), GROUPS, BLOCK, DIM), float("nan")),
        index_k_PBD=torch.full((len(free), BLOCK, DIM), float("nan")),
    )
    for sequence, length in enumerate(lengths):
        for block in range(-(-length // BLOCK)):
            page, used = free.pop(), min(BLOCK, length - block * BLOCK)
            table[sequence, block] = page
            pages.k_PGBD[page, :, :used] = torch.randn(GROUPS, used, DIM)
            pages.v_PGBD[page, :, :used] = torch.randn(GROUPS, used, DIM)
            # small integers: ties between blocks are common
            pages.index_k_PBD[page, :used] = torch.randint(-2, 3, (used, DIM)).float()
    extra = draw.choice([0, 0, 3])
    row_sequence, row_position = [], []
    for sequence, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        row_sequence += [sequence if length else -1] * count
        row_position += [length - count + i if length else -1 for i in range(count)]
    return PagedCase(
        rows=PagedRows(
            query_start_S1=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
            seq_lens_S=torch.tensor(lengths, dtype=torch.int32),
            page_table_SJ=table,
            max_query_len=max(counts),
            # an upper bound is allowed
            max_seq_len=max(lengths) + draw.choice([0, 0, BLOCK + 1]),
        ),
        pages=pages,
        num_tokens=sum(counts) + extra,
        row_sequence=row_sequence + [-1] * extra,
        row_position=row_position + [-1] * extra,
    )
