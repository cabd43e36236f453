"""Block choice and attention at decode in Triton: the portable arm, the baseline of the bench."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from m3stack.kernels.interface import LayerPages, PagedRows

# the narrowest product Triton runs on the matrix units
MIN_COLUMNS = 16
PAGES_PER_PROGRAM = 2
MAX_RANKED_AT_ONCE = 8192
# programs that fill a GPU of about 130 processors
TARGET_PROGRAMS = 264
MAX_SPLITS = 16


@triton.jit
def _row_of(query_start, seq_lens, sequence):
    first = tl.load(query_start + sequence)
    return first, tl.load(query_start + sequence + 1) - first, tl.load(seq_lens + sequence)


@triton.jit
def _score_kernel(
    q, pages, query_start, seq_lens, table, keys,
    page_stride, table_stride, row_stride,
    GROUPS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, COLUMNS: tl.constexpr,
    PAGES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    first, num_rows, seq_len = _row_of(query_start, seq_lens, sequence)
    dim, slot, column = tl.arange(0, DIM), tl.arange(0, PAGE), tl.arange(0, COLUMNS)
    line = first.to(tl.int64) * GROUPS + column
    used = column < num_rows * GROUPS
    query = tl.load(q + line[:, None] * DIM + dim[None, :], mask=used[:, None], other=0.0)
    if WIDEN:
        query = query.to(tl.float32)
    position = seq_len - num_rows + column // GROUPS
    for step in range(PAGES):
        block = tl.program_id(1) * PAGES + step
        if block * PAGE < seq_len:
            page = tl.load(table + sequence.to(tl.int64) * table_stride + block).to(tl.int64)
            key = tl.load(pages + page * page_stride + slot[:, None] * DIM + dim[None, :])
            if WIDEN:
                key = key.to(tl.float32)
            dots = tl.dot(key, tl.trans(query), input_precision="ieee")
            seen = (block * PAGE + slot)[:, None] <= position[None, :]
            bad = tl.max(((dots != dots) & seen).to(tl.int32), 0)
            best = tl.max(tl.where(seen, dots, float("-inf")), 0)
            # NaN counts as -inf, -0 as +0; the bits then order as integers
            best = tl.where(bad > 0, float("-inf"), tl.where(best == 0.0, 0.0, best))
            bits = best.to(tl.int32, bitcast=True)
            bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
            tl.store(keys + line * row_stride + block, bits, mask=used)


@triton.jit
def _select_kernel(
    keys, query_start, seq_lens, blocks,
    row_stride, num_seqs, num_rows, num_chosen, num_local,
    GROUPS: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, CHOSEN: tl.constexpr,
    SEQUENCES: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, SEQUENCES)
    start = tl.load(query_start + index, mask=index < num_seqs, other=0)
    stop = tl.load(query_start + index + 1, mask=index < num_seqs, other=0)
    seq_len = tl.load(seq_lens + index, mask=index < num_seqs, other=0)
    mine = (start <= row) & (row < stop) & (seq_len > 0)
    position = tl.max(tl.where(mine, seq_len - (stop - row), -1), 0)
    own = tl.where(position < 0, -1, position // PAGE)
    local = tl.minimum(num_local, own + 1)
    ranked = own + 1 - local
    need = tl.minimum(num_chosen - local, ranked)
    place = tl.arange(0, CHOSEN)
    picked = tl.full([CHOSEN], 0x7FFFFFFF, tl.int32)
    line = keys + (row.to(tl.int64) * GROUPS + group) * row_stride
    # each round takes the largest key below the last one; equal keys order by lower block
    bound = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
    for rank in range(need):
        best = tl.full([], -0x7FFFFFFFFFFFFFFF, tl.int64)
        for base in range(0, ranked, TILE):
            block = base + tl.arange(0, TILE)
            key = tl.load(line + block, mask=block < ranked, other=0).to(tl.int64)
            order = (key << 32) + (0x7FFFFFFF - block).to(tl.int64)
            order = tl.where((block < ranked) & (order < bound), order, -0x7FFFFFFFFFFFFFFF)
            best = tl.maximum(best, tl.max(order, 0))
        bound = best
        block_of_best = (0x7FFFFFFF - (best & 0xFFFFFFFF)).to(tl.int32)
        picked = tl.where(place == rank, block_of_best, picked)
    is_local = (place >= need) & (place < need + local)
    picked = tl.where(is_local, own - local + 1 + place - need, picked)
    smaller = (picked[None, :] < picked[:, None]).to(tl.int32)
    rank = tl.where(place < need + local, tl.sum(smaller, 1), place)
    value = tl.where(place < need + local, picked, -1)
    to = blocks + (group.to(tl.int64) * num_rows + row) * num_chosen + rank
    tl.store(to, value, mask=place < num_chosen)


@triton.jit
def _attend_kernel(
    q, k, v, query_start, seq_lens, table, blocks, out, partial, shares,
    k_page, k_group, k_token, v_page, v_group, v_token, table_stride,
    scale_log2, num_seqs, num_rows, num_chosen,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, HEAD_TILE: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, SPLITS: tl.constexpr, SEQUENCES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    row, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    index = tl.arange(0, SEQUENCES)
    start = tl.load(query_start + index, mask=index < num_seqs, other=0)
    stop = tl.load(query_start + index + 1, mask=index < num_seqs, other=0)
    seq_len = tl.load(seq_lens + index, mask=index < num_seqs, other=0)
    mine = (start <= row) & (row < stop) & (seq_len > 0)
    position = tl.max(tl.where(mine, seq_len - (stop - row), -1), 0)
    sequence = tl.max(tl.where(mine, index, 0), 0).to(tl.int64)
    head, dim, slot = tl.arange(0, HEAD_TILE), tl.arange(0, DIM), tl.arange(0, PAGE)
    line = row.to(tl.int64) * GROUPS + group
    real = head < HEADS
    at = (line * HEADS + head[:, None]) * DIM + dim[None, :]
    query = tl.load(q + at, mask=real[:, None], other=0.0)
    if WIDEN:
        query = query.to(tl.float32)
    most = tl.full([HEAD_TILE], float("-inf"), tl.float32)
    total = tl.zeros([HEAD_TILE], tl.float32)
    mixed = tl.zeros([HEAD_TILE, DIM], tl.float32)
    listed = blocks + (group.to(tl.int64) * num_rows + row) * num_chosen
    for place in range(split, num_chosen, SPLITS):
        block = tl.load(listed + place)
        if (block >= 0) & (block * PAGE <= position):
            page = tl.load(table + sequence * table_stride + block).to(tl.int64)
            seen = block * PAGE + slot <= position
            k_at = k + page * k_page + group * k_group + slot[:, None] * k_token + dim[None, :]
            v_at = v + page * v_page + group * v_group + slot[:, None] * v_token + dim[None, :]
            key = tl.load(k_at, mask=seen[:, None], other=0.0)
            value = tl.load(v_at, mask=seen[:, None], other=0.0)
            # also of e4m3 pages
            key, value = key.to(query.dtype), value.to(query.dtype)
            logits = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
            logits = tl.where(seen[None, :], logits, float("-inf"))
            top = tl.maximum(most, tl.max(logits, 1))
            fade = tl.exp2(most - top)
            weight = tl.exp2(logits - top[:, None])
            total = total * fade + tl.sum(weight, 1)
            mixed = mixed * fade[:, None]
            mixed += tl.dot(weight.to(value.dtype), value, input_precision="ieee")
            most = top
    if SPLITS == 1:
        mean = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + at, mean.to(out.dtype.element_ty), mask=real[:, None])
    else:
        part = line * SPLITS + split
        tl.store(
            partial + (part * HEADS + head[:, None]) * DIM + dim[None, :], mixed, mask=real[:, None]
        )
        tl.store(shares + (part * HEADS + head) * 2, most, mask=real)
        tl.store(shares + (part * HEADS + head) * 2 + 1, total, mask=real)


@triton.jit
def _merge_kernel(
    partial, shares, out, HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr
):
    line, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, DIM)
    part = (line * SPLITS + split) * HEADS + head
    most, total = tl.load(shares + part * 2), tl.load(shares + part * 2 + 1)
    top = tl.max(most, 0)
    weight = tl.exp2(most - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight * total, 0)
    mixed = tl.load(partial + part[:, None] * DIM + dim[None, :])
    mean = tl.sum(mixed * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + (line * HEADS + head) * DIM + dim, mean.to(out.dtype.element_ty))


class TritonDecode:
    """The two decode operations on any GPU that Triton compiles for."""

    def __init__(self, *, widen: bool = False, pages_per_program: int = PAGES_PER_PROGRAM) -> None:
        """Keeps how products are made and how scoring is divided.

        Args:
            widen: products in fp32, as Triton's interpreter needs for bf16 operands.
            pages_per_program: of a request that a scoring program takes.
        """
        self._widen = widen
        self._pages_per_program = pages_per_program

    def choose_blocks(
        self,
        index_q_TGD: Tensor,
        index_k_PBD: Tensor,
        rows: PagedRows,
        num_blocks: int,
        num_local_blocks: int,
    ) -> Tensor:
        """See `interface.ChooseBlocks`; index q contiguous, index pages dense."""
        num_tokens, groups, dim = index_q_TGD.shape
        page_tokens, num_seqs = index_k_PBD.shape[1], rows.seq_lens_S.shape[0]
        width = max(1, triton.cdiv(rows.max_seq_len, page_tokens))
        device = index_q_TGD.device
        keys = torch.empty((num_tokens * groups, width), dtype=torch.int32, device=device)
        blocks_GTK = torch.empty((groups, num_tokens, num_blocks), dtype=torch.int32, device=device)
        if num_tokens == 0:
            return blocks_GTK
        columns = max(MIN_COLUMNS, triton.next_power_of_2(rows.max_query_len * groups))
        _score_kernel[(num_seqs, triton.cdiv(width, self._pages_per_program))](
            index_q_TGD, index_k_PBD,
            rows.query_start_S1, rows.seq_lens_S, rows.page_table_SJ, keys,
            index_k_PBD.stride(0), rows.page_table_SJ.stride(0), keys.stride(0),
            GROUPS=groups, DIM=dim, PAGE=page_tokens, COLUMNS=columns,
            PAGES=self._pages_per_program, WIDEN=self._widen, num_warps=4, num_stages=3,
        )  # fmt: skip
        tile = min(MAX_RANKED_AT_ONCE, max(16, triton.next_power_of_2(width)))
        _select_kernel[(num_tokens, groups)](
            keys, rows.query_start_S1, rows.seq_lens_S, blocks_GTK,
            keys.stride(0), num_seqs, num_tokens, num_blocks, num_local_blocks,
            GROUPS=groups, PAGE=page_tokens, TILE=tile,
            CHOSEN=triton.next_power_of_2(num_blocks),
            SEQUENCES=triton.next_power_of_2(num_seqs), num_warps=8 if tile >= 2048 else 4,
        )  # fmt: skip
        return blocks_GTK

    def block_attention(
        self,
        q_THD: Tensor,
        pages: LayerPages,
        blocks_GTK: Tensor,
        rows: PagedRows,
        scale: float,
    ) -> Tensor:
        """See `interface.BlockAttention`; q contiguous, head dim of the pages dense."""
        num_tokens, heads, dim = q_THD.shape
        groups, page_tokens = pages.k_PGBD.shape[1:3]
        num_chosen, num_seqs = blocks_GTK.shape[-1], rows.seq_lens_S.shape[0]
        out_THD = torch.empty_like(q_THD)
        lines, per_group = num_tokens * groups, heads // groups
        if lines == 0:
            return out_THD
        splits = 1
        while splits < min(MAX_SPLITS, num_chosen) and lines * splits * 2 <= TARGET_PROGRAMS:
            splits *= 2
        partial = shares = out_THD
        if splits > 1:
            partial = q_THD.new_empty((lines, splits, per_group, dim), dtype=torch.float32)
            shares = q_THD.new_empty((lines, splits, per_group, 2), dtype=torch.float32)
        _attend_kernel[(num_tokens, groups, splits)](
            q_THD, pages.k_PGBD, pages.v_PGBD,
            rows.query_start_S1, rows.seq_lens_S, rows.page_table_SJ, blocks_GTK,
            out_THD, partial, shares,
            *pages.k_PGBD.stride()[:3], *pages.v_PGBD.stride()[:3], rows.page_table_SJ.stride(0),
            scale * 1.4426950408889634, num_seqs, num_tokens, num_chosen,
            GROUPS=groups, HEADS=per_group, DIM=dim, PAGE=page_tokens, SPLITS=splits,
            HEAD_TILE=max(MIN_COLUMNS, triton.next_power_of_2(per_group)),
            SEQUENCES=triton.next_power_of_2(num_seqs), WIDEN=self._widen,
            num_warps=4, num_stages=2,
        )  # fmt: skip
        if splits > 1:
            merge_parts(partial, shares, out_THD)
        return out_THD


def merge_parts(partial: Tensor, shares: Tensor, out_THD: Tensor) -> None:
    """Adds the weighted parts of every (row, group) line into `out_THD`.

    Args:
        partial: fp32 [T * G, splits, heads of a group, D], not normalised.
        shares: fp32 [T * G, splits, heads of a group, 2]: largest logit in base 2, and the sum.
        out_THD: [T, H, D], written.
    """
    lines, splits, heads, dim = partial.shape
    _merge_kernel[(lines, heads)](
        partial,
        shares,
        out_THD,
        HEADS=heads,
        DIM=dim,
        SPLITS=splits,
        num_warps=max(1, splits // 16),
    )
