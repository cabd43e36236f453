"""Operations of a step that have a plain and a faster form, and the plain ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from m3stack.kernels.pointwise.reference import gemma_norm, rotate, swiglu_oai


@dataclass(frozen=True, slots=True)
class Pointwise:
    """Operations that read and write each value a few times.

    Attributes:
        norm: Gemma norm of [T, M].
        turn: (x [T, H, D], weight, eps, cos, sin): norm of every head, then rotary.
        weighted_swiglu: (hidden [T, E, 2F], weights [T, E], alpha, limit) -> [T, E, F].
    """

    norm: Callable[[Tensor, Tensor, float], Tensor]
    turn: Callable[[Tensor, Tensor, float, Tensor, Tensor], Tensor]
    weighted_swiglu: Callable[[Tensor, Tensor, float, float], Tensor]


@dataclass(frozen=True, slots=True)
class SparseKernels:
    """Faster forms of what a sparse layer does.

    Attributes:
        block_attention: as `sparse.block_attention`.
        block_scores: as `sparse.block_scores`.
    """

    block_attention: Callable[[Tensor, Tensor, Tensor, Tensor, float, int], Tensor]
    block_scores: Callable[[Tensor, Tensor, int], Tensor]


def plain_pointwise() -> Pointwise:
    """By the reference kernels and autograd."""
    return Pointwise(gemma_norm, _norm_and_rotate, _weighted_swiglu)


def _norm_and_rotate(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate(gemma_norm(x, weight, eps), cos, sin)


def _weighted_swiglu(hidden_TEf: Tensor, weights_TE: Tensor, alpha: float, limit: float) -> Tensor:
    gate, up = hidden_TEf.chunk(2, dim=-1)
    acted = swiglu_oai(gate, up, alpha, limit)
    return (acted * weights_TE[..., None].to(acted.dtype)).to(hidden_TEf.dtype)
