"""Dense causal attention over pages in Triton; lengths stay on the device, as graphs need it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from m3stack.kernels.interface import LayerPages, PagedRows
from m3stack.kernels.msa.decode.with_triton import MIN_COLUMNS, merge_parts

# rows of the matrix product: query rows times heads of a group
MAX_PRODUCT_ROWS = 64
TARGET_PROGRAMS = 264
MAX_SPLITS = 64


@triton.jit
def _paged_kernel(
    q, k, v, query_start, seq_lens, table, out, partial, shares,
    k_page, k_group, k_token, v_page, v_group, v_token, table_stride,
    scale_log2, row_tiles,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, HEAD_TILE: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    sequence = (tl.program_id(0) // row_tiles).to(tl.int64)
    tile = tl.program_id(0) % row_tiles
    group, split = tl.program_id(1), tl.program_id(2)
    first = tl.load(query_start + sequence)
    num_rows = tl.load(query_start + sequence + 1) - first
    seq_len = tl.load(seq_lens + sequence)
    index, dim, slot = tl.arange(0, ROWS * HEAD_TILE), tl.arange(0, DIM), tl.arange(0, PAGE)
    row, head = tile * ROWS + index // HEAD_TILE, index % HEAD_TILE
    held = (row < num_rows) & (head < HEADS)
    position = seq_len - num_rows + row
    line = (first.to(tl.int64) + row) * GROUPS + group
    at = (line * HEADS + head)[:, None] * DIM + dim[None, :]
    query = tl.load(q + at, mask=held[:, None], other=0.0)
    if WIDEN:
        query = query.to(tl.float32)
    most = tl.full([ROWS * HEAD_TILE], float("-inf"), tl.float32)
    total = tl.zeros([ROWS * HEAD_TILE], tl.float32)
    mixed = tl.zeros([ROWS * HEAD_TILE, DIM], tl.float32)
    last = seq_len - num_rows + tl.minimum((tile + 1) * ROWS, num_rows) - 1
    num_pages = tl.where((tile * ROWS < num_rows) & (seq_len > 0), last // PAGE + 1, 0)
    for block in range(split, num_pages, SPLITS):
        page = tl.load(table + sequence * table_stride + block).to(tl.int64)
        key_position = block * PAGE + slot
        written = key_position < seq_len
        k_at = k + page * k_page + group * k_group + slot[:, None] * k_token + dim[None, :]
        v_at = v + page * v_page + group * v_group + slot[:, None] * v_token + dim[None, :]
        key = tl.load(k_at, mask=written[:, None], other=0.0)
        value = tl.load(v_at, mask=written[:, None], other=0.0)
        if WIDEN:
            key, value = key.to(tl.float32), value.to(tl.float32)
        logits = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
        logits = tl.where(key_position[None, :] <= position[:, None], logits, float("-inf"))
        top = tl.maximum(most, tl.max(logits, 1))
        base = tl.where(top == float("-inf"), 0.0, top)
        fade = tl.exp2(most - base)
        weight = tl.exp2(logits - base[:, None])
        total = total * fade + tl.sum(weight, 1)
        mixed = mixed * fade[:, None]
        mixed += tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        most = top
    if SPLITS == 1:
        mean = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + at, mean.to(out.dtype.element_ty), mask=held[:, None])
    else:
        part = (line * SPLITS + split) * HEADS + head
        tl.store(partial + part[:, None] * DIM + dim[None, :], mixed, mask=held[:, None])
        tl.store(shares + part * 2, most, mask=held)
        tl.store(shares + part * 2 + 1, total, mask=held)


def paged_attention(
    q_THD: Tensor, pages: LayerPages, rows: PagedRows, scale: float, *, widen: bool = False
) -> Tensor:
    """See `interface.PagedAttention`; q contiguous, head dim of the pages dense.

    Args:
        q_THD: [T, H, D], D and the page a power of two of at least 16.
        pages: K and V.
        rows: positions and page tables.
        scale: softmax scale.
        widen: products in fp32, as Triton's interpreter needs for bf16 operands.
    """
    num_tokens, heads, dim = q_THD.shape
    groups, page_tokens = pages.k_PGBD.shape[1:3]
    per_group, num_seqs = heads // groups, rows.seq_lens_S.shape[0]
    out_THD = torch.empty_like(q_THD)
    if num_tokens == 0:
        return out_THD
    head_tile = triton.next_power_of_2(per_group)
    tile = min(triton.next_power_of_2(rows.max_query_len), max(1, MAX_PRODUCT_ROWS // head_tile))
    tile = max(tile, triton.cdiv(MIN_COLUMNS, head_tile))
    row_tiles = triton.cdiv(rows.max_query_len, tile)
    programs = num_seqs * row_tiles * groups
    splits, most_pages = 1, triton.cdiv(rows.max_seq_len, page_tokens)
    while splits < min(MAX_SPLITS, most_pages) and programs * splits * 2 <= TARGET_PROGRAMS:
        splits *= 2
    partial = shares = out_THD
    if splits > 1:
        lines = num_tokens * groups
        partial = q_THD.new_empty((lines, splits, per_group, dim), dtype=torch.float32)
        shares = q_THD.new_empty((lines, splits, per_group, 2), dtype=torch.float32)
    _paged_kernel[(num_seqs * row_tiles, groups, splits)](
        q_THD, pages.k_PGBD, pages.v_PGBD,
        rows.query_start_S1, rows.seq_lens_S, rows.page_table_SJ, out_THD, partial, shares,
        *pages.k_PGBD.stride()[:3], *pages.v_PGBD.stride()[:3], rows.page_table_SJ.stride(0),
        scale * 1.4426950408889634, row_tiles,
        GROUPS=groups, HEADS=per_group, HEAD_TILE=head_tile, ROWS=tile, DIM=dim,
        PAGE=page_tokens, SPLITS=splits, WIDEN=widen,
        num_warps=8 if tile * head_tile >= MAX_PRODUCT_ROWS else 4, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        merge_parts(partial, shares, out_THD)
    return out_THD
