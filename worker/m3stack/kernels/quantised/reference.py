"""Linears over MXFP8 weights in plain torch: the meaning that faster ones are compared with."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from m3stack.kernels.interface import Mxfp8Weight
from m3stack.kernels.quantised import mxfp8


def linear_mxfp8(x: Tensor, weight: Mxfp8Weight) -> Tensor:
    """`x W^T` with the decoded weight; see `interface.LinearMxfp8`."""
    return functional.linear(x.float(), mxfp8.decode(weight, torch.float32)).to(x.dtype)


def linear_mxfp8_both(x: Tensor, weight: Mxfp8Weight) -> Tensor:
    """The same with `x` in dynamic MXFP8 too, as the released config declares activations.

    No back end of the house computes this; it says what rounding activations would cost.
    """
    return functional.linear(mxfp8.round_trip(x), mxfp8.decode(weight, torch.float32)).to(x.dtype)
