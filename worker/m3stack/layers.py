"""Parameters and linears that a model is built of: allocated where they will live, never random."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Place:
    """Where parameters live and the dtype the model computes in."""

    device: torch.device
    dtype: torch.dtype

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """An uninitialised parameter that takes no gradient until training asks for one."""
        values = torch.empty(shape, device=self.device, dtype=dtype or self.dtype)
        return nn.Parameter(values, requires_grad=False)


class Linear(nn.Module):
    """`x W^T (+ b)`; weight [out, in], bias [out]."""

    def __init__(self, place: Place, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = place.parameter(outputs, inputs)
        self.bias = place.parameter(outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class LayerNorm(nn.Module):
    """Layer norm with weight and bias, each [width]."""

    def __init__(self, place: Place, width: int, eps: float) -> None:
        super().__init__()
        self.weight = place.parameter(width)
        self.bias = place.parameter(width)
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, self._eps)
