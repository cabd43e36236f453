"""Attention over chosen blocks with its gradients, and the blocks' scores, as Triton kernels.

A tile of query rows walks over the blocks and skips those that none of its rows chose, so nothing
is gathered. Tests compare both with the plain ones of `sparse.py`, through Triton's interpreter.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx

from m3stack.train.pointwise import SparseKernels

TILE_ROWS = 64
"""Query rows of a tile: tokens times the heads of a group, or times groups."""

TILE_KEYS = 64
"""Keys of a tile whose gradient is found at once; more would not fit into registers."""


def fused_sparse() -> SparseKernels:
    """The operations that training calls on a GPU."""
    return SparseKernels(block_attention=block_attention, block_scores=block_scores)


def block_attention(
    q_RLHD: Tensor, k_RGLD: Tensor, v_RGLD: Tensor, blocks_RGLK: Tensor, scale: float, block: int
) -> Tensor:
    """Exact softmax attention of every row over its chosen blocks, [R, L, H, D].

    Block and head dim are powers of two, and the heads of a group at most `TILE_ROWS`.
    """
    out = _BlockAttention.apply(q_RLHD, k_RGLD, v_RGLD, blocks_RGLK, scale, block)
    assert isinstance(out, Tensor)
    return out


def block_scores(index_q_RLGD: Tensor, index_k_RLD: Tensor, block: int) -> Tensor:
    """Greatest product of every row with the keys of each block before its own, fp32 [R, G, L, J].

    Minus infinity for its own block and those behind.
    """
    rows, length, groups, dim = index_q_RLGD.shape
    scores = index_q_RLGD.new_empty((rows, groups, length, length // block), dtype=torch.float32)
    tokens = min(block, TILE_ROWS // groups)
    _scores[(length // tokens, rows)](
        index_q_RLGD.contiguous(), index_k_RLD.contiguous(), scores, length,
        GROUPS=groups, DIM=dim, BLOCK=block, TOKENS=tokens,
    )  # fmt: skip
    return scores


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q_RLHD: Tensor,
        k_RGLD: Tensor,
        v_RGLD: Tensor,
        blocks_RGLK: Tensor,
        scale: float,
        block: int,
    ) -> Tensor:
        q, k, v = (x.contiguous() for x in (q_RLHD, k_RGLD, v_RGLD))
        picked = blocks_RGLK.to(torch.int32).contiguous()
        out, sums = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        grid, sizes = _tiling(q, k, picked, block)
        _forward[grid](q, k, v, picked, out, sums, scale / math.log(2), q.shape[1], **sizes)
        ctx.save_for_backward(q, k, v, picked, out, sums)
        ctx.sizes = (scale, block)  # pyright: ignore[reportAttributeAccessIssue]
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, picked, out, sums = ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue]
        scale, block = ctx.sizes  # pyright: ignore[reportAttributeAccessIssue]
        gradient = gradients[0].contiguous()
        delta = (gradient.float() * out.float()).sum(-1)
        q_grad, k_grad, v_grad = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        grid, sizes = _tiling(q, k, picked, block)
        given = (q, k, v, picked, gradient, sums, delta)
        length = q.shape[1]
        _query_gradient[grid](*given, q_grad, scale, scale / math.log(2), length, **sizes)
        keys = min(block, TILE_KEYS)
        _key_gradient[(length // keys, grid[1])](
            *given, k_grad, v_grad, scale, scale / math.log(2), length, KEYS=keys, **sizes
        )
        return q_grad, k_grad, v_grad, None, None, None


def _tiling(q: Tensor, k: Tensor, picked: Tensor, block: int) -> tuple[tuple[int, int], dict]:
    rows, length, heads, dim = q.shape
    groups = k.shape[1]
    tokens = min(block, TILE_ROWS // (heads // groups))
    sizes = {
        "GROUPS": groups,
        "SHARE": heads // groups,
        "DIM": dim,
        "BLOCK": block,
        "TOKENS": tokens,
        "CHOSEN": picked.shape[-1],
        "WIDTH": triton.next_power_of_2(picked.shape[-1]),
    }
    return (length // tokens, rows * groups), sizes


@triton.jit
def _rows_of(
    tile, sequence, group, length,
    GROUPS: tl.constexpr, SHARE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Position of each row of a tile, its place among heads [R, L, H] and among rows [R, G, L]."""
    row = tl.arange(0, TOKENS * SHARE)
    position = tile * TOKENS + row // SHARE
    head = (sequence * length + position) * (GROUPS * SHARE) + group * SHARE + row % SHARE
    return position, head, (sequence * GROUPS + group) * length + position


@triton.jit
def _load_picked(picked, at, CHOSEN: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    return tl.load(picked + at[:, None] * CHOSEN + column[None, :], (column < CHOSEN)[None, :], -1)


@triton.jit
def _dots(query, key, position, keys, sees, scale_log2):
    """Base 2 scores of rows and keys, -1e30 where a row does not see a key; where it does."""
    dots = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
    is_seen = (keys[None, :] <= position[:, None]) & (sees > 0)[:, None]
    return tl.where(is_seen, dots, -1e30), is_seen


@triton.jit
def _slope(dots, total, out_grad, value, offset, scale):
    """Weights of rows and keys, and the gradient of their scaled products."""
    share = tl.exp2(dots - total[:, None])
    spread = tl.dot(out_grad, tl.trans(value), input_precision="ieee")
    return share, share * (spread - offset[:, None]) * scale


@triton.jit
def _forward(
    q, k, v, picked, out, sums, scale_log2, length,
    GROUPS: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, CHOSEN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    tile, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    sequence, group = pair // GROUPS, pair % GROUPS
    position, head, at = _rows_of(tile, sequence, group, length, GROUPS, SHARE, TOKENS)
    dims, keys = tl.arange(0, DIM), tl.arange(0, BLOCK)
    places = head[:, None] * DIM + dims[None, :]
    query = tl.load(q + places)
    chosen = _load_picked(picked, at, CHOSEN, WIDTH)
    best = tl.full((TOKENS * SHARE,), -1e30, tl.float32)
    total = tl.zeros((TOKENS * SHARE,), tl.float32)
    mixed = tl.zeros((TOKENS * SHARE, DIM), tl.float32)
    for number in range(0, tile * TOKENS // BLOCK + 1):
        sees = tl.max((chosen == number).to(tl.int32), 1)
        if tl.max(sees, 0) > 0:
            slots = (pair * length + number * BLOCK + keys)[:, None] * DIM + dims[None, :]
            key, value = tl.load(k + slots), tl.load(v + slots)
            dots, is_seen = _dots(query, key, position, number * BLOCK + keys, sees, scale_log2)
            new = tl.maximum(best, tl.max(dots, 1))
            share = tl.where(is_seen, tl.exp2(dots - new[:, None]), 0.0)
            kept = tl.exp2(best - new)
            total = total * kept + tl.sum(share, 1)
            mixed = mixed * kept[:, None]
            mixed += tl.dot(share.to(value.dtype), value, input_precision="ieee")
            best = new
    tl.store(out + places, (mixed / total[:, None]).to(out.dtype.element_ty))
    tl.store(sums + head, best + tl.log2(total))


@triton.jit
def _query_gradient(
    q, k, v, picked, gradient, sums, delta, q_grad, scale, scale_log2, length,
    GROUPS: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, CHOSEN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    tile, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    sequence, group = pair // GROUPS, pair % GROUPS
    position, head, at = _rows_of(tile, sequence, group, length, GROUPS, SHARE, TOKENS)
    dims, keys = tl.arange(0, DIM), tl.arange(0, BLOCK)
    places = head[:, None] * DIM + dims[None, :]
    query, out_grad = tl.load(q + places), tl.load(gradient + places)
    total, offset = tl.load(sums + head), tl.load(delta + head)
    chosen = _load_picked(picked, at, CHOSEN, WIDTH)
    result = tl.zeros((TOKENS * SHARE, DIM), tl.float32)
    for number in range(0, tile * TOKENS // BLOCK + 1):
        sees = tl.max((chosen == number).to(tl.int32), 1)
        if tl.max(sees, 0) > 0:
            slots = (pair * length + number * BLOCK + keys)[:, None] * DIM + dims[None, :]
            key, value = tl.load(k + slots), tl.load(v + slots)
            dots, _ = _dots(query, key, position, number * BLOCK + keys, sees, scale_log2)
            _, slope = _slope(dots, total, out_grad, value, offset, scale)
            result += tl.dot(slope.to(key.dtype), key, input_precision="ieee")
    tl.store(q_grad + places, result.to(q_grad.dtype.element_ty))


@triton.jit
def _key_gradient(
    q, k, v, picked, gradient, sums, delta, k_grad, v_grad, scale, scale_log2, length,
    GROUPS: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, CHOSEN: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    first, pair = tl.program_id(0) * KEYS, tl.program_id(1).to(tl.int64)
    number = first // BLOCK
    sequence, group = pair // GROUPS, pair % GROUPS
    dims, keys = tl.arange(0, DIM), first + tl.arange(0, KEYS)
    slots = (pair * length + keys)[:, None] * DIM + dims[None, :]
    key, value = tl.load(k + slots), tl.load(v + slots)
    key_sum = tl.zeros((KEYS, DIM), tl.float32)
    value_sum = tl.zeros((KEYS, DIM), tl.float32)
    for tile in range(first // TOKENS, length // TOKENS):
        position, head, at = _rows_of(tile, sequence, group, length, GROUPS, SHARE, TOKENS)
        chosen = _load_picked(picked, at, CHOSEN, WIDTH)
        sees = tl.max((chosen == number).to(tl.int32), 1)
        if tl.max(sees, 0) > 0:
            places = head[:, None] * DIM + dims[None, :]
            query, out_grad = tl.load(q + places), tl.load(gradient + places)
            total, offset = tl.load(sums + head), tl.load(delta + head)
            dots, _ = _dots(query, key, position, keys, sees, scale_log2)
            share, slope = _slope(dots, total, out_grad, value, offset, scale)
            value_sum += tl.dot(
                tl.trans(share.to(out_grad.dtype)), out_grad, input_precision="ieee"
            )
            key_sum += tl.dot(tl.trans(slope.to(query.dtype)), query, input_precision="ieee")
    tl.store(k_grad + slots, key_sum.to(k_grad.dtype.element_ty))
    tl.store(v_grad + slots, value_sum.to(v_grad.dtype.element_ty))


@triton.jit
def _scores(
    index_q, index_k, scores, length,
    GROUPS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    tile, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, dims, keys = tl.arange(0, TOKENS * GROUPS), tl.arange(0, DIM), tl.arange(0, BLOCK)
    first = (sequence * length + tile * TOKENS) * GROUPS
    query = tl.load(index_q + (first + row)[:, None] * DIM + dims[None, :])
    blocks = length // BLOCK
    position = tile * TOKENS + row // GROUPS
    into = scores + ((sequence * GROUPS + row % GROUPS) * length + position) * blocks
    own = tile * TOKENS // BLOCK
    for number in range(0, own):
        slots = (sequence * length + number * BLOCK + keys)[:, None] * DIM + dims[None, :]
        dots = tl.dot(query, tl.trans(tl.load(index_k + slots)), input_precision="ieee")
        tl.store(into + number, tl.max(dots, 1))
    for number in range(own, blocks):
        tl.store(into + number, tl.full((TOKENS * GROUPS,), float("-inf"), tl.float32))
