"""Norm, clamped SwiGLU and the fused attention prologue in Triton; meanings in `reference.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from m3stack.kernels.interface import HeadNorms, LayerPages
from m3stack.kernels.msa.decode.index_copy import write_index_copy
from m3stack.kernels.msa.index_copy import IndexCopy

# query heads that one program of the prologue takes
QUERY_TILE = 16
SWIGLU_TILE = 1024


@triton.jit
def _gemma_norm_kernel(x, weight, out, row_stride, eps, width: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    inside = column < width
    value = tl.load(x + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / width + eps)
    gain = 1.0 + tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    result = value * scale * gain
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


def gemma_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x * rsqrt(mean(x^2) + eps) * (1 + w)` over the last dim, fp32 inside; see `GemmaNorm`."""
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        tile = triton.next_power_of_2(width)
        _gemma_norm_kernel[(rows.shape[0],)](
            rows,
            weight,
            out,
            rows.stride(0),
            eps,
            width,
            tile,
            num_warps=min(8, max(1, tile // 512)),
        )
    return out


@triton.jit
def _swiglu_kernel(gate, up, out, gate_stride, up_stride, width, alpha, limit, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < width
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    # comparisons that keep NaN, as clamp does
    g = tl.where(g > limit, limit, g)
    u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    result = (u + 1.0) * g * tl.sigmoid(alpha * g)
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


def swiglu_oai(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """Clamped SwiGLU, fp32 inside; see `SwigluOai`. Reads halves of one tensor in place."""
    width = gate.shape[-1]
    gate_rows, up_rows = gate.reshape(-1, width), up.reshape(-1, width)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        grid = (gate_rows.shape[0], triton.cdiv(width, SWIGLU_TILE))
        _swiglu_kernel[grid](
            gate_rows,
            up_rows,
            out,
            gate_rows.stride(0),
            up_rows.stride(0),
            width,
            alpha,
            limit,
            SWIGLU_TILE,
        )
    return out


@triton.jit
def _normed_and_rotated(
    source, row_stride, rows, weight, cos, sin, eps, ROTATED: tl.constexpr, DIM: tl.constexpr
):
    """Heads `rows` of one token: norm, round to the model dtype, rotate the first dims; fp32."""
    column = tl.arange(0, DIM)
    half: tl.constexpr = ROTATED // 2
    turned = column < ROTATED
    partner = tl.where(column < half, column + half, tl.where(turned, column - half, column))
    pair = tl.where(column < half, column, column - half)
    value = tl.load(source + rows[:, None] * row_stride + column[None, :]).to(tl.float32)
    other = tl.load(source + rows[:, None] * row_stride + partner[None, :]).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / DIM + eps)[:, None]
    gain = 1.0 + tl.load(weight + column).to(tl.float32)
    other_gain = 1.0 + tl.load(weight + partner).to(tl.float32)
    dtype = source.dtype.element_ty
    value = (value * scale * gain[None, :]).to(dtype).to(tl.float32)
    other = (other * scale * other_gain[None, :]).to(dtype).to(tl.float32)
    c = tl.load(cos + pair, mask=turned, other=1.0)
    s = tl.load(sin + pair, mask=turned, other=0.0)
    s = tl.where(column < half, -s, s)
    return value * c[None, :] + other * s[None, :]


@triton.jit
def _prologue_kernel(
    q, k, v, index_q, index_k,
    q_norm, k_norm, index_q_norm, index_k_norm,
    cos, sin, slots, index_slots,
    q_out, index_q_out, k_pages, v_pages, index_pages,
    q_token, q_head, k_token, k_head, v_token, v_head, iq_token, iq_head, ik_token,
    k_page, k_group, k_slot, v_page, v_group, v_slot, i_page, i_slot,
    eps,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, INDEX_GROUPS: tl.constexpr, DIM: tl.constexpr,
    ROTATED: tl.constexpr, PAGE: tl.constexpr, HAS_INDEX: tl.constexpr, TILE: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = tl.arange(0, DIM)
    cos += token * (ROTATED // 2)
    sin += token * (ROTATED // 2)
    if part * TILE < HEADS:
        # the last tile may overlap the one before it: both write the same values
        head = tl.minimum(part * TILE, HEADS - TILE) + tl.arange(0, TILE)
        turned_q = _normed_and_rotated(
            q + token * q_token, q_head, head, q_norm, cos, sin, eps, ROTATED, DIM
        )
        q_to = q_out + (token * HEADS + head[:, None]) * DIM + column[None, :]
        tl.store(q_to, turned_q.to(q_out.dtype.element_ty))
    else:
        group = tl.arange(0, GROUPS)
        slot = tl.load(slots + token)
        written = slot >= 0
        page = tl.where(written, slot // PAGE, 0)
        offset = tl.where(written, slot % PAGE, 0)
        turned_k = _normed_and_rotated(
            k + token * k_token, k_head, group, k_norm, cos, sin, eps, ROTATED, DIM
        )
        keep = written & (group[:, None] >= 0) & (column[None, :] >= 0)
        raw_v = tl.load(v + token * v_token + group[:, None] * v_head + column[None, :])
        if NARROW:
            # comparisons that keep NaN
            raw_v = raw_v.to(tl.float32)
            raw_v = tl.where(raw_v > 448.0, 448.0, tl.where(raw_v < -448.0, -448.0, raw_v))
            turned_k = tl.where(turned_k > 448.0, 448.0, turned_k)
            turned_k = tl.where(turned_k < -448.0, -448.0, turned_k)
        k_to = k_pages + page * k_page + offset * k_slot + group[:, None] * k_group
        tl.store(k_to + column[None, :], turned_k.to(k_pages.dtype.element_ty), mask=keep)
        v_to = v_pages + page * v_page + offset * v_slot + group[:, None] * v_group
        tl.store(v_to + column[None, :], raw_v.to(v_pages.dtype.element_ty), mask=keep)
        if HAS_INDEX:
            index_group = tl.arange(0, INDEX_GROUPS)
            iq_from = index_q + token * iq_token
            turned_iq = _normed_and_rotated(
                iq_from, iq_head, index_group, index_q_norm, cos, sin, eps, ROTATED, DIM
            )
            iq_row = token * INDEX_GROUPS + index_group[:, None]
            iq_to = index_q_out + iq_row * DIM + column[None, :]
            tl.store(iq_to, turned_iq.to(index_q_out.dtype.element_ty))
            one = tl.arange(0, 1)
            slot = tl.load(index_slots + token)
            written = slot >= 0
            page = tl.where(written, slot // PAGE, 0)
            offset = tl.where(written, slot % PAGE, 0)
            turned_ik = _normed_and_rotated(
                index_k + token * ik_token, 0, one, index_k_norm, cos, sin, eps, ROTATED, DIM
            )
            ik_to = index_pages + page * i_page + offset * i_slot + one[:, None] + column[None, :]
            keep_one = written & (one[:, None] >= 0) & (column[None, :] >= 0)
            tl.store(ik_to, turned_ik.to(index_pages.dtype.element_ty), mask=keep_one)


def attention_prologue(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    index_q_TGD: Tensor | None,
    index_k_TD: Tensor | None,
    norms: HeadNorms,
    cos: Tensor,
    sin: Tensor,
    slots_T: Tensor,
    pages: LayerPages,
    index_slots_T: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Per-head norms, rotary and cache writes in one launch; see `AttentionPrologue`.

    Inputs may be slices of one projection row: only the last dim must be dense. Head and group
    counts must be powers of two, or multiples of 16 for query heads.
    """
    num_tokens, heads, dim = q_THD.shape
    groups, page_tokens = pages.k_PGBD.shape[1], pages.k_PGBD.shape[2]
    has_index = index_q_TGD is not None
    q_out = torch.empty((num_tokens, heads, dim), dtype=q_THD.dtype, device=q_THD.device)
    if has_index:
        assert index_k_TD is not None
        assert pages.index_k_PBD is not None
        index_q_out = torch.empty(index_q_TGD.shape, dtype=q_THD.dtype, device=q_THD.device)
        index_q, index_k, index_pages = index_q_TGD, index_k_TD, pages.index_k_PBD
        index_norms = (norms.index_q, norms.index_k)
    else:
        index_q_out = None
        index_q, index_k, index_pages = k_TGD, k_TGD[:, 0], pages.k_PGBD[:, 0]
        index_norms = (norms.k, norms.k)
    if num_tokens == 0:
        return q_out, index_q_out
    index_slots = slots_T if index_slots_T is None else index_slots_T
    tile = min(QUERY_TILE, triton.next_power_of_2(heads + 1) // 2)
    grid = (num_tokens, triton.cdiv(heads, tile) + 1)
    _prologue_kernel[grid](
        q_THD, k_TGD, v_TGD, index_q, index_k,
        norms.q, norms.k, *index_norms,
        cos.contiguous(), sin.contiguous(), slots_T, index_slots,
        q_out, q_out if index_q_out is None else index_q_out,
        pages.k_PGBD, pages.v_PGBD, index_pages,
        *q_THD.stride()[:2], *k_TGD.stride()[:2], *v_TGD.stride()[:2],
        *index_q.stride()[:2], index_k.stride(0),
        *pages.k_PGBD.stride()[:3], *pages.v_PGBD.stride()[:3], *index_pages.stride()[:2],
        norms.eps,
        HEADS=heads, GROUPS=groups, INDEX_GROUPS=index_q.shape[1], DIM=dim,
        ROTATED=2 * cos.shape[-1], PAGE=page_tokens, HAS_INDEX=has_index, TILE=tile,
        NARROW=pages.k_PGBD.dtype == torch.float8_e4m3fn,
        num_warps=4,
    )  # fmt: skip
    if has_index and pages.index_copy_PX is not None:
        copy = IndexCopy.over(pages.index_copy_PX, page_tokens)
        write_index_copy(index_pages, index_slots, copy)
    return q_out, index_q_out
