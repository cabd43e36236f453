"""Writes the int8 copy of index keys that were just written; see `msa/index_copy.py`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from m3stack.kernels.msa.index_copy import (
    MAX_NORM,
    MIN_BOUND,
    NORM_SHARE,
    NORM_SLACK,
    IndexCopy,
)


@triton.jit
def _round_up_to_bf16(positive):
    bits = positive.to(tl.int32, bitcast=True)
    return ((bits + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _copy_kernel(
    index_k, slots, copy, meta, page_stride, token_stride, copy_page, meta_page,
    PAGE: tl.constexpr, DIM: tl.constexpr, SHARE: tl.constexpr, SLACK: tl.constexpr,
    MOST: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    slot = tl.load(slots + tl.program_id(0))
    if slot >= 0:
        dim = tl.arange(0, DIM)
        page, token = slot // PAGE, slot % PAGE
        place = page * page_stride + token * token_stride
        key = tl.load(index_k + place + dim).to(tl.float32)
        norm = tl.sqrt(tl.sum(key * key, 0))
        bounded = norm <= MOST  # false for NaN
        key = tl.where(bounded, key, 0.0)
        scale = _round_up_to_bf16(tl.max(tl.abs(key), 0) / 127.0)
        scale = tl.maximum(scale, 7.888609052210118e-31)  # 2^-100
        # any rounding will do: the residual is that of the integers that are stored
        rounded = tl.floor(key / scale + 0.5)
        rounded = tl.minimum(tl.maximum(rounded, -127.0), 127.0)
        left = key - rounded * scale
        bound = tl.maximum((tl.sqrt(tl.sum(left * left, 0)) + SHARE * norm) * SLACK, LEAST)
        bound_bits = _round_up_to_bf16(bound).to(tl.int32, bitcast=True)
        bound_bits = tl.where(bounded, bound_bits, 0x7FC00000)
        scale_bits = tl.where(bounded, scale.to(tl.int32, bitcast=True) >> 16, 0)
        tl.store(copy + page * copy_page + token * DIM + dim, rounded.to(tl.int8))
        tl.store(meta + page * meta_page + token, scale_bits | bound_bits)


def write_index_copy(index_k_PBD: Tensor, slots_T: Tensor, copy: IndexCopy) -> None:
    """Copies the keys in these slots of the pool; negative slots are left out.

    Args:
        index_k_PBD: bf16 [P, B, D], the keys already written; D dense.
        slots_T: int64 [T], `page * B + offset`.
        copy: written in place; a page's keys dense, and its metas.
    """
    if slots_T.shape[0]:
        _, page_tokens, dim = index_k_PBD.shape
        _copy_kernel[(slots_T.shape[0],)](
            index_k_PBD, slots_T, copy.keys_PBD, copy.meta_PB, *index_k_PBD.stride()[:2],
            copy.keys_PBD.stride(0), copy.meta_PB.stride(0),
            PAGE=page_tokens, DIM=dim, SHARE=NORM_SHARE, SLACK=NORM_SLACK, MOST=MAX_NORM,
            LEAST=MIN_BOUND, num_warps=1,
        )  # fmt: skip
