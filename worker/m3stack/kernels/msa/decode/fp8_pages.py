"""K and V pages in e4m3 with one scale a page and group: what is stored and how it is made."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

E4M3_MAX = 448.0
# the scale of a page of zeros: any positive value gives zeros back
SMALLEST_SCALE = 2.0**-100


@dataclass(frozen=True, slots=True)
class Fp8Pages:
    """One layer's K and V in e4m3; an element stands for `element * scale` of its page and group.

    Attributes:
        k_PGBD, v_PGBD: float8_e4m3fn [P, G, B, D].
        k_scale_PG, v_scale_PG: positive fp32 [P, G], contiguous.
    """

    k_PGBD: Tensor
    v_PGBD: Tensor
    k_scale_PG: Tensor
    v_scale_PG: Tensor


def quantise_pages(pool_PGBD: Tensor) -> tuple[Tensor, Tensor]:
    """Whole pages to e4m3 and their scales, the largest element on the largest e4m3 value.

    Returns:
        float8_e4m3fn [P, G, B, D] and fp32 [P, G].
    """
    exact = pool_PGBD.float()
    scale_PG = (exact.abs().amax((-1, -2)) / E4M3_MAX).clamp(min=SMALLEST_SCALE)
    return (exact / scale_PG[..., None, None]).to(torch.float8_e4m3fn), scale_PG
