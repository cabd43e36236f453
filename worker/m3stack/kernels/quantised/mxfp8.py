"""MXFP8: e4m3 elements in groups of 32 that share an E8M0 scale; what encoding and decoding mean.

A value is `element * 2^(scale - 127)`. The scale of a group is the smallest under which no element
rounds beyond 448, the largest: the least `2^k` with `max|x| <= 464 * 2^k`, 464 being halfway to
what would come next. So nothing saturates, values that were MXFP8 once are so again without loss,
whatever scale they had, and what was encoded here is encoded again to the same bytes.
Source: OCP Microscaling Formats (MX) 1.0, 5.2 (E8M0, groups of 32) and 5.3.1 (e4m3); its sample
conversion lets scales hold the largest exponent only, and cuts (464, 512) * 2^k down to 448 * 2^k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from m3stack.kernels.interface import Mxfp8Weight

GROUP_VALUES = 32
SCALE_BIAS = 127
NAN_SCALE = 255
# of weights that kernels decode in registers: their factor is a bf16 of 2^120 times the scale
MOST_KEPT_SCALE = 134

# 464 = 0.90625 * 2^9, in the form that frexp gives; it rounds to 448, the even neighbour
_LARGEST_FRACTION, _LARGEST_EXPONENT = 0.90625, 9


def encode(x: Tensor) -> Mxfp8Weight:
    """The MXFP8 form of `x`, groups along the last dim.

    Elements are rounded to nearest, ties to even. A group of zeros has scale 0 (2^-127) and keeps
    the signs of its zeros. A group that holds a NaN or an infinity is all NaN, scale included.

    Args:
        x: bf16, fp16 or fp32 [..., n * 32].

    Returns:
        elements e4m3 of the same shape, scales uint8 [..., n].
    """
    assert x.dtype in (torch.bfloat16, torch.float16, torch.float32), x.dtype
    assert x.shape[-1] % GROUP_VALUES == 0, x.shape
    groups = x.float().unflatten(-1, (-1, GROUP_VALUES))
    largest = groups.abs().amax(-1)
    fraction, exponent = torch.frexp(largest)
    k = exponent - _LARGEST_EXPONENT + (fraction > _LARGEST_FRACTION)
    # the largest fp32 asks for 2^120, so only the lower end needs a bound
    scales = (k + SCALE_BIAS).clamp_min(0)
    scales = scales.masked_fill(largest == 0, 0).masked_fill(~largest.isfinite(), NAN_SCALE)
    scales = scales.to(torch.uint8)
    # the reciprocal of a power of two is exact
    scaled = groups * (1.0 / scale_values(scales))[..., None]
    return Mxfp8Weight(scaled.to(torch.float8_e4m3fn).flatten(-2), scales)


def decode(weight: Mxfp8Weight, dtype: torch.dtype) -> Tensor:
    """The values, computed in fp32 and rounded once to `dtype`.

    Exact in fp32 below 2^128, and for scales of 3 to 246 in bf16 too.

    Returns:
        [..., n * 32].
    """
    groups = weight.elements.to(torch.float32).unflatten(-1, (-1, GROUP_VALUES))
    return (groups * scale_values(weight.scales)[..., None]).flatten(-2).to(dtype)


def scale_values(scales: Tensor) -> Tensor:
    """fp32 value of E8M0 bytes: `2^(byte - 127)`; 255 is NaN."""
    # the byte is an fp32 exponent already, but for 0, which fp32 writes as a subnormal
    bits = (scales.int() << 23).masked_fill(scales == 0, 1 << 22)
    return bits.view(torch.float32).masked_fill(scales == NAN_SCALE, float("nan"))


def round_trip(x: Tensor) -> Tensor:
    """`x` as a consumer of its dynamic MXFP8 form sees it, fp32; groups along the last dim."""
    return decode(encode(x), torch.float32)
