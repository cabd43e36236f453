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
        k_scale_PG, v_scale_PG: fp32 [P, G], contiguous; powers of two, so that bf16 holds every
            value that an element stands for. None where all are 1.
    """

    k_PGBD: Tensor
    v_PGBD: Tensor
    k_scale_PG: Tensor | None
    v_scale_PG: Tensor | None


def quantise_pages(pool_PGBD: Tensor) -> tuple[Tensor, Tensor]:
    """Whole pages to e4m3 and their scales, the least powers of two at which all elements fit.

    Returns:
        float8_e4m3fn [P, G, B, D] and fp32 [P, G].
    """
    exact = pool_PGBD.float()
    least_PG = (exact.abs().amax((-1, -2)) / E4M3_MAX).clamp(min=SMALLEST_SCALE)
    mantissa_PG, exponent_PG = torch.frexp(least_PG)  # mantissas from a half up to one
    exponent_PG = exponent_PG - (mantissa_PG == 0.5).to(exponent_PG.dtype)
    scale_PG = torch.ldexp(torch.ones_like(least_PG), exponent_PG)
    return (exact / scale_PG[..., None, None]).to(torch.float8_e4m3fn), scale_PG
