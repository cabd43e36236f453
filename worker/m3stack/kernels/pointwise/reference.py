"""Norm, rotary embedding, clamped SwiGLU and cache writes in plain torch.

Source: transformers 5.24 `minimax_m3_vl`; contracts in `interface.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from m3stack.kernels.interface import HeadNorms, LayerPages
from m3stack.kernels.msa.decode.fp8_pages import E4M3_MAX
from m3stack.kernels.msa.index_copy import IndexCopy, write_index_copy


def gemma_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x * rsqrt(mean(x^2) + eps) * (1 + w)` over the last dim, fp32 inside; see `GemmaNorm`."""
    wide = _wide(x)
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * (1.0 + weight.to(wide.dtype))).to(x.dtype)


def swiglu_oai(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """Clamped SwiGLU, fp32 inside; see `SwigluOai`."""
    g = _wide(gate).clamp(max=limit)
    u = _wide(up).clamp(min=-limit, max=limit)
    return ((u + 1.0) * g * torch.sigmoid(alpha * g)).to(gate.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs (i, i + R/2) of the first R dims of every head, fp32 inside.

    Args:
        x: [T, heads, D].
        cos, sin: [T, R/2].
    """
    half = cos.shape[-1]
    wide = _wide(x)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = (first * cos - second * sin, second * cos + first * sin, rest)
    return torch.cat(turned, dim=-1).to(x.dtype)


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
    """Per-head norms and rotary, then K, V and index-K into the cache; see `AttentionPrologue`."""
    block = pages.k_PGBD.shape[2]
    key_slots, (k_TGD, v_TGD, key_cos, key_sin) = _written(slots_T, k_TGD, v_TGD, cos, sin)
    page_T, offset_T = key_slots // block, key_slots % block
    k_TGD = rotate(gemma_norm(k_TGD, norms.k, norms.eps), key_cos, key_sin)
    pages.k_PGBD[page_T, :, offset_T] = _kept(k_TGD, pages.k_PGBD.dtype)
    pages.v_PGBD[page_T, :, offset_T] = _kept(v_TGD, pages.v_PGBD.dtype)
    q_THD = rotate(gemma_norm(q_THD, norms.q, norms.eps), cos, sin)
    if index_q_TGD is None or index_k_TD is None:
        return q_THD, None
    assert norms.index_q is not None
    assert norms.index_k is not None
    assert pages.index_k_PBD is not None
    key_slots = slots_T if index_slots_T is None else index_slots_T
    key_slots, (index_k_TD, key_cos, key_sin) = _written(key_slots, index_k_TD, cos, sin)
    index_k_TD = gemma_norm(index_k_TD, norms.index_k, norms.eps)
    index_k_TD = rotate(index_k_TD[:, None], key_cos, key_sin)[:, 0]
    page_T, offset_T = key_slots // block, key_slots % block
    pages.index_k_PBD[page_T, offset_T] = index_k_TD.to(pages.index_k_PBD.dtype)
    if pages.index_copy_PX is not None:
        copy = IndexCopy.over(pages.index_copy_PX, block)
        write_index_copy(pages.index_k_PBD, key_slots, copy)
    return q_THD, rotate(gemma_norm(index_q_TGD, norms.index_q, norms.eps), cos, sin)


def _written(slots_T: Tensor, *rows: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Slots and rows of those that are written at all."""
    is_written_T = slots_T >= 0
    if bool(is_written_T.all()):
        return slots_T, rows
    return slots_T[is_written_T], tuple(row[is_written_T] for row in rows)


def _kept(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Values as a cache of this dtype keeps them: e4m3 saturates, NaN stays."""
    if dtype == torch.float8_e4m3fn:
        x = x.clamp(-E4M3_MAX, E4M3_MAX)
    return x.to(dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
