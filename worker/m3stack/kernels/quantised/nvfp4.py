"""NVFP4 as ModelOpt stores it: pairs of e2m1 nibbles, an e4m3 scale for 16 values, an fp32 scale.

Source: ModelOpt's export of MiniMax-M3 (`weight`, `weight_scale`, `weight_scale_2`); e2m1 is that
of OCP Microscaling Formats (MX) 1.0, 5.3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP_VALUES = 16

# of nibble 0..15; bit 3 is the sign
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))


def decode(packed: Tensor, scales: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values `e2m1 * scale * global_scale`: one fp32 rounding, then one to `dtype`.

    Args:
        packed: uint8 [..., n * 8]; the low nibble holds the even index.
        scales: e4m3 [..., n].
        global_scale: fp32 scalar.

    Returns:
        [..., n * 16].
    """
    table = torch.tensor(E2M1_VALUES, device=packed.device)
    nibbles = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)
    elements = table[nibbles.int()].unflatten(-1, (-1, GROUP_VALUES))
    # at most six significant bits: exact
    grouped = elements * scales.to(torch.float32)[..., None]
    return (grouped * global_scale).flatten(-2).to(dtype)
