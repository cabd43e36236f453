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
from m3stack.kernels.paged_rows import row_positions

Attend = Callable[[Tensor, LayerPages, Tensor, PagedRows, float], Tensor]


@triton.jit
def _widen_kernel(
    k, v, k_scale, v_scale, k_to, v_to, table, number,
    k_page, k_group, k_token, v_page, v_group, v_token, table_stride, blocks,
    GROUPS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    entry, group = tl.program_id(0), tl.program_id(1)
    place = tl.load(number + entry)
    if place >= 0:
        sequence = (entry // blocks).to(tl.int64)
        page = tl.load(table + sequence * table_stride + entry % blocks).to(tl.int64)
        slot, dim = tl.arange(0, PAGE), tl.arange(0, DIM)
        to = (place.to(tl.int64) * GROUPS + group) * PAGE * DIM
        to += slot[:, None] * DIM + dim[None, :]
        k_at = k + page * k_page + group * k_group + slot[:, None] * k_token + dim[None, :]
        v_at = v + page * v_page + group * v_group + slot[:, None] * v_token + dim[None, :]
        key, value = tl.load(k_at).to(tl.float32), tl.load(v_at).to(tl.float32)
        if SCALED:
            key *= tl.load(k_scale + page * GROUPS + group)
            value *= tl.load(v_scale + page * GROUPS + group)
        tl.store(k_to + to, key.to(k_to.dtype.element_ty))
        tl.store(v_to + to, value.to(v_to.dtype.element_ty))


def widen_chosen(
    pages: Fp8Pages, blocks_GTK: Tensor, rows: PagedRows, dtype: torch.dtype
) -> tuple[LayerPages, PagedRows]:
    """The chosen pages in `dtype`, and the rows with a page table that leads to them.

    Room is taken for every page that the step's sequences may have: 128 KiB a page of 4 groups
    in bf16, for K and for V. Pages that no row chose are left unwritten.
    """
    num_seqs = rows.seq_lens_S.shape[0]
    _, groups, page_tokens, dim = pages.k_PGBD.shape
    device, num_tokens = blocks_GTK.device, blocks_GTK.shape[1]
    blocks = max(1, -(-rows.max_seq_len // page_tokens))
    row_T = torch.arange(num_tokens, dtype=torch.int32, device=device)
    sequence_T = torch.searchsorted(rows.query_start_S1[1:].contiguous(), row_T, right=True)
    position_T = row_positions(rows, num_tokens, device)
    entry_GTK = sequence_T[:, None] * blocks + blocks_GTK
    # what a row cannot see has no page; one entry too many takes it
    is_seen_GTK = (blocks_GTK >= 0) & (blocks_GTK * page_tokens <= position_T[:, None])
    entry_GTK = torch.where(is_seen_GTK, entry_GTK, num_seqs * blocks)
    used = torch.zeros(num_seqs * blocks + 1, dtype=torch.bool, device=device)
    used[entry_GTK.flatten()] = True
    used = used[:-1]
    number = torch.where(used, used.cumsum(0, dtype=torch.int32) - 1, -1)
    size = (num_seqs * blocks, groups, page_tokens, dim)
    wide = LayerPages(
        torch.empty(size, dtype=dtype, device=device),
        torch.empty(size, dtype=dtype, device=device),
        None,
    )
    scales = (pages.k_scale_PG, pages.v_scale_PG)
    is_scaled = scales[0] is not None
    _widen_kernel[(num_seqs * blocks, groups)](
        pages.k_PGBD, pages.v_PGBD, *(scales if is_scaled else (number, number)),
        wide.k_PGBD, wide.v_PGBD,
        rows.page_table_SJ, number,
        *pages.k_PGBD.stride()[:3], *pages.v_PGBD.stride()[:3],
        rows.page_table_SJ.stride(0), blocks,
        GROUPS=groups, PAGE=page_tokens, DIM=dim, SCALED=is_scaled, num_warps=8,
    )  # fmt: skip
    table_SJ = number.clamp(min=0).view(num_seqs, blocks)
    return wide, PagedRows(
        rows.query_start_S1, rows.seq_lens_S, table_SJ, rows.max_query_len, rows.max_seq_len
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
