"""MXFP8 weights to bf16 in one pass, as engines without a kernel for them do before a product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from m3stack.kernels.interface import Mxfp8Weight

GROUP, VALUES = 32, 4096


@triton.jit
def _decode_kernel(elements, scales, out, num_values, GROUP: tl.constexpr, VALUES: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    inside = at < num_values
    value = tl.load(elements + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scales + at // GROUP, mask=inside, other=127).to(tl.int32)
    # a power of two, by its exponent bits; 2^-127 alone has none, and counts as zero
    factor = (scale << 23).to(tl.float32, bitcast=True)
    tl.store(out + at, (value * factor).to(tl.bfloat16), mask=inside)


def decode(weight: Mxfp8Weight) -> Tensor:
    """The weight in bf16, which holds its values exactly."""
    out = torch.empty(weight.elements.shape, dtype=torch.bfloat16, device=weight.elements.device)
    count = out.numel()
    _decode_kernel[(triton.cdiv(count, VALUES),)](
        weight.elements, weight.scales, out, count, GROUP=GROUP, VALUES=VALUES
    )
    return out
