"""The fused operations give what the plain ones give, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from m3stack.train.fused import fused_pointwise
from m3stack.train.pointwise import plain_pointwise

FUSED, PLAIN = fused_pointwise(), plain_pointwise()


def leaf(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * scale).requires_grad_()


def assert_alike(mine: Tensor, theirs: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    weights = torch.randn(mine.shape)
    for left, right in zip(
        torch.autograd.grad((mine * weights).sum(), inputs),
        torch.autograd.grad((theirs * weights).sum(), inputs),
        strict=True,
    ):
        # sums over all rows, in another order
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 37])
def test_norm(tokens: int) -> None:
    x, weight = leaf(tokens, 192), leaf(192, scale=0.3)
    assert_alike(FUSED.norm(x, weight, 1e-6), PLAIN.norm(x, weight, 1e-6), [x, weight])


@pytest.mark.parametrize("heads", [1, 4])
def test_turn_of_a_slice_of_the_fused_product(heads: int) -> None:
    tokens, dim, half = 301, 32, 8
    fused_product, weight = leaf(tokens, 3 * heads * dim), leaf(dim, scale=0.3)
    angles = torch.rand(tokens, half) * 6
    x = fused_product[:, heads * dim : 2 * heads * dim].view(tokens, heads, dim)
    arguments = (x, weight, 1e-6, angles.cos(), angles.sin())
    assert_alike(FUSED.turn(*arguments), PLAIN.turn(*arguments), [fused_product, weight])


def test_weighted_swiglu_with_values_beyond_the_clamps() -> None:
    hidden, weights = leaf(23, 5, 64, scale=6.0), leaf(23, 5)
    assert (hidden.abs() > 7).any()
    arguments = (hidden, weights, 1.702, 7.0)
    assert_alike(
        FUSED.weighted_swiglu(*arguments), PLAIN.weighted_swiglu(*arguments), [hidden, weights]
    )
