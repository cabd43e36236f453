"""Inputs for MSA checks and timings: random pages in random order, poisoned where none may read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from m3stack.kernels.interface import LayerPages, PagedRows

BLOCK_TOKENS = 128
HEAD_DIM = 128
# a table entry past the end of a sequence: an address that faults if it is ever used
NO_PAGE = 1 << 30


@dataclass(frozen=True, slots=True)
class MsaBatch:
    """One step's inputs of an MSA layer: q [T,H,D], index q [T,G,D], pages and rows."""

    q_THD: Tensor
    index_q_TGD: Tensor
    pages: LayerPages
    rows: PagedRows

    @property
    def groups(self) -> int:
        return self.index_q_TGD.shape[1]


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What a batch looks like.

    Attributes:
        seq_lens: keys of each sequence; 0 for a padded row.
        num_rows: query rows of each sequence; one each where None.
        groups: KV groups, each with one index head.
        heads_per_group: query heads of a group.
        shared_pages: leading pages that all sequences have in common.
        spare_pages: pages of the pool that belong to nobody.
        max_seq_len: upper bound told to the kernels; the longest sequence where None.
    """

    seq_lens: Sequence[int]
    num_rows: Sequence[int] | None = None
    groups: int = 4
    heads_per_group: int = 16
    shared_pages: int = 0
    spare_pages: int = 3
    max_seq_len: int | None = None


def make_rows(shape: BatchShape, device: torch.device | str, seed: int) -> tuple[PagedRows, int]:
    """Rows with pages in random order, and the number of pages of the pool."""
    num_rows = list(shape.num_rows or [1] * len(shape.seq_lens))
    starts = torch.tensor([0, *num_rows]).cumsum(0).to(torch.int32)
    own = [max(0, -(-length // BLOCK_TOKENS) - shape.shared_pages) for length in shape.seq_lens]
    num_pages = shape.shared_pages + sum(own) + shape.spare_pages
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))
    order = order.to(torch.int32)
    max_seq_len = shape.max_seq_len or max(1, *shape.seq_lens)
    table = torch.full((len(own), max(1, -(-max_seq_len // BLOCK_TOKENS))), NO_PAGE)
    table = table.to(torch.int32)
    used = shape.shared_pages
    for index, (length, count) in enumerate(zip(shape.seq_lens, own, strict=True)):
        total = -(-length // BLOCK_TOKENS)
        shared = min(total, shape.shared_pages)
        table[index, :shared] = order[:shared]
        table[index, shared:total] = order[used : used + count]
        used += count
    rows = PagedRows(
        query_start_S1=starts.to(device),
        seq_lens_S=torch.tensor(list(shape.seq_lens), dtype=torch.int32, device=device),
        page_table_SJ=table.to(device),
        max_query_len=max(1, *num_rows),
        max_seq_len=max_seq_len,
    )
    return rows, num_pages


def make_batch(
    shape: BatchShape,
    *,
    device: torch.device | str,
    seed: int = 0,
    rows_seed: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    poison: bool = True,
) -> MsaBatch:
    """Random normal inputs; unwritten slots and spare pages are NaN where `poison` is set.

    Batches of one shape and one `rows_seed` have equal rows, as the layers of a model have.
    """
    rows, num_pages = make_rows(shape, device, seed if rows_seed is None else rows_seed)
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    num_tokens = int(rows.query_start_S1[-1])
    pool = (num_pages, shape.groups, BLOCK_TOKENS, HEAD_DIM)
    pages = LayerPages(
        k_PGBD=normal(*pool),
        v_PGBD=normal(*pool),
        index_k_PBD=normal(num_pages, BLOCK_TOKENS, HEAD_DIM),
    )
    if poison:
        poison_unwritten(pages, rows)
    return MsaBatch(
        q_THD=normal(num_tokens, shape.groups * shape.heads_per_group, HEAD_DIM),
        index_q_TGD=normal(num_tokens, shape.groups, HEAD_DIM),
        pages=pages,
        rows=rows,
    )


def written_slots(rows: PagedRows, num_pages: int) -> Tensor:
    """bool [P, B]: slots that hold a key of some sequence."""
    written_PB = torch.zeros(num_pages, BLOCK_TOKENS, dtype=torch.bool)
    for length, table in zip(rows.seq_lens_S.tolist(), rows.page_table_SJ.cpu(), strict=True):
        full, rest = divmod(length, BLOCK_TOKENS)
        written_PB[table[:full].long()] = True
        if rest:
            written_PB[table[full], :rest] = True
    return written_PB


def poison_unwritten(pages: LayerPages, rows: PagedRows) -> None:
    """Fills every slot without a key with NaN, in place."""
    unwritten_PB = ~written_slots(rows, pages.k_PGBD.shape[0])
    page, slot = unwritten_PB.nonzero(as_tuple=True)
    page, slot = page.to(pages.k_PGBD.device), slot.to(pages.k_PGBD.device)
    pages.k_PGBD[page, :, slot] = float("nan")
    pages.v_PGBD[page, :, slot] = float("nan")
    if pages.index_k_PBD is not None:
        pages.index_k_PBD[page, slot] = float("nan")
