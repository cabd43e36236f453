"""Norm, rotary and weighted SwiGLU with their gradients, each one Triton kernel a direction.

A model this small spends a step launching operations; these replace some forty a layer. Tests
compare them with the plain ones of `operations.py`, through Triton's interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx

from m3stack.train.pointwise import Pointwise


def fused_pointwise() -> Pointwise:
    """The operations that training calls on a GPU."""
    return Pointwise(norm=norm, turn=turn, weighted_swiglu=weighted_swiglu)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Gemma norm over the last dim of [T, M]; in the dtype of autocast where that is on."""
    out = _NormAndTurn.apply(x[:, None], weight, eps, None, None)
    assert isinstance(out, Tensor)
    return out[:, 0]


def turn(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Gemma norm over every head of [T, H, D], then rotary of its first dims."""
    out = _NormAndTurn.apply(x, weight, eps, cos, sin)
    assert isinstance(out, Tensor)
    return out


def weighted_swiglu(hidden_TEf: Tensor, weights_TE: Tensor, alpha: float, limit: float) -> Tensor:
    """Clamped SwiGLU of [T, E, 2F], times a weight an expert: [T, E, F]."""
    out = _WeightedSwiglu.apply(hidden_TEf, weights_TE, alpha, limit)
    assert isinstance(out, Tensor)
    return out


class _NormAndTurn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x_THD: Tensor,
        weight: Tensor,
        eps: float,
        cos: Tensor | None,
        sin: Tensor | None,
    ) -> Tensor:
        if x_THD.stride(-1) != 1 or x_THD.stride(1) != x_THD.shape[2]:
            x_THD = x_THD.contiguous()
        tokens, heads, dim = x_THD.shape
        kind = x_THD.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_THD.dtype
        out = torch.empty((tokens, heads, dim), dtype=dtype, device=x_THD.device)
        half = 0 if cos is None else cos.shape[-1]
        grid, sizes = _tiling(tokens * heads, dim)
        _norm_forward[grid](
            x_THD, weight, cos if half else weight, sin if half else weight, out,
            tokens * heads, x_THD.stride(0), eps, HEADS=heads, DIM=dim, HALF=half, **sizes,
        )  # fmt: skip
        ctx.save_for_backward(x_THD, weight, cos, sin)
        ctx.eps = eps  # pyright: ignore[reportAttributeAccessIssue]
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_THD, weight, cos, sin = ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue]
        gradient = gradients[0].contiguous()
        tokens, heads, dim = x_THD.shape
        half = 0 if cos is None else cos.shape[-1]
        grid, sizes = _tiling(tokens * heads, dim)
        x_grad = torch.empty((tokens, heads, dim), dtype=x_THD.dtype, device=x_THD.device)
        parts = torch.empty((grid[0], dim), dtype=torch.float32, device=x_THD.device)
        _norm_backward[grid](
            x_THD, weight, cos if half else weight, sin if half else weight, gradient, x_grad,
            parts, tokens * heads, x_THD.stride(0),
            ctx.eps,  # pyright: ignore[reportAttributeAccessIssue]
            HEADS=heads, DIM=dim, HALF=half, **sizes,
        )  # fmt: skip
        return x_grad, parts.sum(0).to(weight.dtype), None, None, None


class _WeightedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden_TEf: Tensor, weights_TE: Tensor, alpha: float, limit: float
    ) -> Tensor:
        hidden_TEf, weights_TE = hidden_TEf.contiguous(), weights_TE.contiguous()
        inner, rows = hidden_TEf.shape[-1] // 2, weights_TE.numel()
        out = hidden_TEf.new_empty((*weights_TE.shape, inner))
        grid, sizes = _tiling(rows, inner)
        _swiglu_forward[grid](
            hidden_TEf, weights_TE, out, rows, alpha, limit, DIM=inner, **sizes
        )  # fmt: skip
        ctx.save_for_backward(hidden_TEf, weights_TE)
        ctx.clamp = (alpha, limit)  # pyright: ignore[reportAttributeAccessIssue]
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TEf, weights_TE = ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue]
        gradient = gradients[0].contiguous()
        inner, rows = hidden_TEf.shape[-1] // 2, weights_TE.numel()
        hidden_grad, weights_grad = torch.empty_like(hidden_TEf), torch.empty_like(weights_TE)
        grid, sizes = _tiling(rows, inner)
        _swiglu_backward[grid](
            hidden_TEf, weights_TE, gradient, hidden_grad, weights_grad, rows,
            *ctx.clamp,  # pyright: ignore[reportAttributeAccessIssue]
            DIM=inner, **sizes,
        )  # fmt: skip
        return hidden_grad, weights_grad, None, None


def _tiling(rows: int, dim: int) -> tuple[tuple[int], dict[str, int]]:
    width = triton.next_power_of_2(dim)
    per_program = max(1, 4096 // width)
    return (triton.cdiv(rows, per_program),), {"ROWS": per_program, "WIDTH": width}


@triton.jit
def _load_turn(cos, sin, rows, columns, HEADS: tl.constexpr, HALF: tl.constexpr):
    """Each element's partner column, and cosine and signed sine that mix the two."""
    is_first = columns < HALF
    turns = columns < 2 * HALF
    partner = tl.where(turns, tl.where(is_first, columns + HALF, columns - HALF), columns)
    angle = tl.where(is_first, columns, columns - HALF)
    at = (rows // HEADS)[:, None] * HALF + angle[None, :]
    shown = (rows >= 0)[:, None] & turns[None, :]
    c = tl.load(cos + at, shown, 1.0)
    s = tl.load(sin + at, shown, 0.0)
    return partner, c, tl.where(is_first[None, :], -s, s)


@triton.jit
def _norm_forward(
    x, weight, cos, sin, out, num_rows, token_stride, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    live = (rows < num_rows)[:, None] & (columns < DIM)[None, :]
    begin = (rows // HEADS) * token_stride + (rows % HEADS) * DIM
    v = tl.load(x + begin[:, None] + columns[None, :], live, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, 1) / DIM + eps)
    w = tl.load(weight + columns, columns < DIM, 0.0).to(tl.float32)
    y = v * scale[:, None] * (1.0 + w)[None, :]
    if HALF > 0:
        safe = tl.where(rows < num_rows, rows, 0)
        partner, c, s = _load_turn(cos, sin, safe, columns, HEADS, HALF)
        other = tl.load(x + begin[:, None] + partner[None, :], live, 0.0).to(tl.float32)
        w = tl.load(weight + partner, columns < DIM, 0.0).to(tl.float32)
        y = y * c + other * scale[:, None] * (1.0 + w)[None, :] * s
    tl.store(out + rows[:, None] * DIM + columns[None, :], y.to(out.dtype.element_ty), live)


@triton.jit
def _norm_backward(
    x, weight, cos, sin, gradient, x_grad, parts, num_rows, token_stride, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    live = (rows < num_rows)[:, None] & (columns < DIM)[None, :]
    begin = (rows // HEADS) * token_stride + (rows % HEADS) * DIM
    v = tl.load(x + begin[:, None] + columns[None, :], live, 0.0).to(tl.float32)
    at = rows[:, None] * DIM
    g = tl.load(gradient + at + columns[None, :], live, 0.0).to(tl.float32)
    if HALF > 0:
        safe = tl.where(rows < num_rows, rows, 0)
        partner, c, s = _load_turn(cos, sin, safe, columns, HEADS, HALF)
        other = tl.load(gradient + at + partner[None, :], live, 0.0).to(tl.float32)
        # the transposed turn: the other way round
        g = g * c - other * s
    scale = tl.rsqrt(tl.sum(v * v, 1) / DIM + eps)
    unit = v * scale[:, None]
    tl.store(
        parts + tl.program_id(0).to(tl.int64) * DIM + columns, tl.sum(g * unit, 0), columns < DIM
    )
    w = tl.load(weight + columns, columns < DIM, 0.0).to(tl.float32)
    g = g * (1.0 + w)[None, :]
    dx = (g - unit * (tl.sum(g * unit, 1) / DIM)[:, None]) * scale[:, None]
    tl.store(x_grad + at + columns[None, :], dx.to(x_grad.dtype.element_ty), live)


@triton.jit
def _swiglu_forward(
    hidden, weights, out, num_rows, alpha, limit,
    DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    live = (rows < num_rows)[:, None] & (columns < DIM)[None, :]
    at = rows[:, None] * (2 * DIM) + columns[None, :]
    gate = tl.minimum(tl.load(hidden + at, live, 0.0).to(tl.float32), limit)
    up = tl.load(hidden + at + DIM, live, 0.0).to(tl.float32)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    weight = tl.load(weights + rows, rows < num_rows, 0.0).to(tl.float32)
    y = (up + 1.0) * gate * tl.sigmoid(alpha * gate) * weight[:, None]
    tl.store(out + rows[:, None] * DIM + columns[None, :], y.to(out.dtype.element_ty), live)


@triton.jit
def _swiglu_backward(
    hidden, weights, gradient, hidden_grad, weights_grad, num_rows, alpha, limit,
    DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    live = (rows < num_rows)[:, None] & (columns < DIM)[None, :]
    at = rows[:, None] * (2 * DIM) + columns[None, :]
    raw_gate = tl.load(hidden + at, live, 0.0).to(tl.float32)
    raw_up = tl.load(hidden + at + DIM, live, 0.0).to(tl.float32)
    gate = tl.minimum(raw_gate, limit)
    up = tl.minimum(tl.maximum(raw_up, -limit), limit)
    weight = tl.load(weights + rows, rows < num_rows, 0.0).to(tl.float32)
    g = tl.load(gradient + rows[:, None] * DIM + columns[None, :], live, 0.0).to(tl.float32)
    sigmoid = tl.sigmoid(alpha * gate)
    acted = gate * sigmoid
    tl.store(weights_grad + rows, tl.sum(g * acted * (up + 1.0), 1), rows < num_rows)
    g = g * weight[:, None]
    slope = sigmoid * (1.0 + alpha * gate * (1.0 - sigmoid))
    gate_grad = tl.where(raw_gate < limit, g * (up + 1.0) * slope, 0.0)
    up_grad = tl.where((raw_up > -limit) & (raw_up < limit), g * acted, 0.0)
    kind = hidden_grad.dtype.element_ty
    tl.store(hidden_grad + at, gate_grad.to(kind), live)
    tl.store(hidden_grad + at + DIM, up_grad.to(kind), live)
