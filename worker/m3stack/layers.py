"""Parameters and linears that a model is built of: allocated where they will live, never random."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from m3stack.kernels.interface import Kernels, Mxfp8Weight, Weight
from m3stack.kernels.quantised import mxfp8


@dataclass(frozen=True, slots=True)
class Place:
    """Where parameters live and the dtype the model computes in.

    Attributes:
        keeps_mxfp8: matrices of the text linears are held in MXFP8 instead of `dtype`.
    """

    device: torch.device
    dtype: torch.dtype
    keeps_mxfp8: bool = False

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """An uninitialised parameter that takes no gradient until training asks for one."""
        values = torch.empty(shape, device=self.device, dtype=dtype or self.dtype)
        return nn.Parameter(values, requires_grad=False)

    def text_weight(self, *shape: int) -> tuple[nn.Parameter, nn.Parameter | None]:
        """A text linear's matrix [..., out, in] and, where it is held in MXFP8, its scales."""
        if not self.keeps_mxfp8:
            return self.parameter(*shape), None
        groups = (*shape[:-1], shape[-1] // mxfp8.GROUP_VALUES)
        elements = self.parameter(*shape, dtype=torch.float8_e4m3fn)
        return elements, self.parameter(*groups, dtype=torch.uint8)


def weight_of(matrix: Tensor, scales: Tensor | None) -> Weight:
    """What kernels take for the two parameters of `Place.text_weight`."""
    return matrix if scales is None else Mxfp8Weight(matrix, scales)


class TextLinear(nn.Module):
    """`x W^T` of the text model; weight [out, in], plain or in MXFP8."""

    def __init__(self, kernels: Kernels, place: Place, inputs: int, outputs: int) -> None:
        super().__init__()
        self._linear_mxfp8 = kernels.linear_mxfp8
        self.weight, self.weight_scale = place.text_weight(outputs, inputs)

    def forward(self, x: Tensor) -> Tensor:
        if self.weight_scale is None:
            return functional.linear(x, self.weight)
        return self._linear_mxfp8(x, Mxfp8Weight(self.weight, self.weight_scale))


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
