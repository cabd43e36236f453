"""Prefill attention over e4m3 pages: chosen pages are widened once, then the bf16 arms run.

A page's scale is a power of two (`decode/fp8_pages.py`), so bf16 holds every widened value exactly
and attention over the copy is attention over the e4m3 pages. Many rows choose the same pages, so
widening them costs a few percent of a chunk. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from m3stack.kernels.interface import LayerPages, PagedRows
from m3stack.kernels.msa.decode.fp8_pages import Fp8Pages

Attend = Callable[[Tensor, LayerPages, Tensor, PagedRows, float], Tensor]


# pages of a step's sequences up to which a copy is made (1 GiB for 4 groups); one sequence may
# always have its copy
MOST_WIDENED_PAGES = 4096
# what one program of the marking kernel looks at
MARKED_ROWS, MARKED_SEQUENCES = 32, 64


@triton.jit
def _mark_kernel(
    chosen, query_start, seq_lens, used, num_rows, num_seqs, blocks,
    GROUPS: tl.constexpr, CHOSEN: tl.constexpr, WIDTH: tl.constexpr, SEQS: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    is_row = row < num_rows
    # the sequence of a row is the number of those that end at or before it
    sequence = tl.zeros([ROWS], tl.int32)
    for base in range(0, num_seqs, SEQS):
        other = base + tl.arange(0, SEQS)
        end = tl.load(query_start + 1 + other, other < num_seqs, other=num_rows + 1)
        sequence += tl.sum((end[None, :] <= row[:, None]).to(tl.int32), 1)
    is_row = is_row & (sequence < num_seqs)
    length = tl.load(seq_lens + sequence, is_row, other=0)
    end = tl.load(query_start + 1 + sequence, is_row, other=0)
    position = tl.where(length > 0, length - end + row, -1)
    slot = tl.arange(0, WIDTH)
    at = (group.to(tl.int64) * num_rows + row[:, None]) * CHOSEN + slot[None, :]
    block = tl.load(chosen + at, is_row[:, None] & (slot < CHOSEN)[None, :], other=-1)
    # what a row cannot see has no page
    is_seen = (block >= 0) & (block * PAGE <= position[:, None])
    entry = (sequence[:, None] * blocks + block) * GROUPS + group
    tl.store(used + entry, 1, is_seen)


@triton.jit
def _widen_kernel(
    k, v, k_scale, v_scale, k_to, v_to, table, used,
    k_page, k_group, k_token, v_page, v_group, v_token, table_stride, blocks,
    GROUPS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    entry, group = tl.program_id(0), tl.program_id(1)
    if tl.load(used + entry * GROUPS + group) != 0:
        sequence = (entry // blocks).to(tl.int64)
        page = tl.load(table + sequence * table_stride + entry % blocks).to(tl.int64)
        slot, dim = tl.arange(0, PAGE), tl.arange(0, DIM)
        to = (entry.to(tl.int64) * GROUPS + group) * PAGE * DIM
        to += slot[:, None] * DIM + dim[None, :]
        k_at = k + page * k_page + group * k_group + slot[:, None] * k_token + dim[None, :]
        v_at = v + page * v_page + group * v_group + slot[:, None] * v_token + dim[None, :]
        key, value = tl.load(k_at).to(tl.float32), tl.load(v_at).to(tl.float32)
        if SCALED:
            key *= tl.load(k_scale + page * GROUPS + group)
            value *= tl.load(v_scale + page * GROUPS + group)
        tl.store(k_to + to, key.to(k_to.dtype.element_ty))
        tl.store(v_to + to, value.to(v_to.dtype.element_ty))


def widened_pages(rows: PagedRows, page_tokens: int) -> int:
    """Pages that `widen_chosen` takes room for: as many a sequence as the longest has."""
    return rows.seq_lens_S.shape[0] * max(1, -(-rows.max_seq_len // page_tokens))


def pays_to_widen(rows: PagedRows, page_tokens: int) -> bool:
    """Whether a copy of the step's pages stays within what is left free for it.

    Many sequences beside a long one would ask for more memory than the GPU has: the host knows the
    greatest length only. Their rows read the pages in place.
    """
    is_alone = rows.seq_lens_S.shape[0] == 1
    return is_alone or widened_pages(rows, page_tokens) <= MOST_WIDENED_PAGES


def widen_chosen(
    pages: Fp8Pages, blocks_GTK: Tensor, rows: PagedRows, dtype: torch.dtype
) -> tuple[LayerPages, PagedRows]:
    """The chosen pages in `dtype`, and the rows with a page table that leads to them.

    Room is taken for every page that the step's sequences may have: 128 KiB a page of 4 groups
    in bf16, for K and for V. A group of a page that no row chose is left unwritten.
    """
    num_seqs = rows.seq_lens_S.shape[0]
    _, groups, page_tokens, dim = pages.k_PGBD.shape
    device, (_, num_tokens, chosen) = blocks_GTK.device, blocks_GTK.shape
    blocks = widened_pages(rows, page_tokens) // num_seqs
    used = torch.zeros(num_seqs * blocks * groups, dtype=torch.int8, device=device)
    _mark_kernel[(triton.cdiv(num_tokens, MARKED_ROWS), groups)](
        blocks_GTK, rows.query_start_S1, rows.seq_lens_S, used, num_tokens, num_seqs, blocks,
        GROUPS=groups, CHOSEN=chosen, WIDTH=triton.next_power_of_2(chosen), SEQS=MARKED_SEQUENCES,
        PAGE=page_tokens, ROWS=MARKED_ROWS, num_warps=4,
    )  # fmt: skip
    size = (num_seqs * blocks, groups, page_tokens, dim)
    wide = LayerPages(
        torch.empty(size, dtype=dtype, device=device),
        torch.empty(size, dtype=dtype, device=device),
        None,
    )
    scales = (pages.k_scale_PG, pages.v_scale_PG)
    is_scaled = scales[0] is not None
    _widen_kernel[(num_seqs * blocks, groups)](
        pages.k_PGBD, pages.v_PGBD, *(scales if is_scaled else (used, used)),
        wide.k_PGBD, wide.v_PGBD,
        rows.page_table_SJ, used,
        *pages.k_PGBD.stride()[:3], *pages.v_PGBD.stride()[:3],
        rows.page_table_SJ.stride(0), blocks,
        GROUPS=groups, PAGE=page_tokens, DIM=dim, SCALED=is_scaled, num_warps=8,
    )  # fmt: skip
    table_SJ = torch.arange(num_seqs * blocks, dtype=torch.int32, device=device)
    return wide, PagedRows(
        rows.query_start_S1,
        rows.seq_lens_S,
        table_SJ.view(num_seqs, blocks),
        rows.max_query_len,
        rows.max_seq_len,
    )


def block_attention_fp8(
    attend: Attend,
    q_THD: Tensor,
    pages: Fp8Pages,
    blocks_GTK: Tensor,
    rows: PagedRows,
    scale: float,
) -> Tensor:
    """See `interface.BlockAttention`, over e4m3 pages.

    Args:
        attend: the same over pages in the dtype of q.
    """
    wide, wide_rows = widen_chosen(pages, blocks_GTK, rows, q_THD.dtype)
    return attend(q_THD, wide, blocks_GTK, wide_rows, scale)
