"""A model whose weights are drawn where it lives: for measuring real sizes without their files."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from m3stack.kernels.interface import Kernels
from m3stack.layers import Place
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.model import M3Model
from m3stack.models.minimax_m3.ranks import WHOLE, Rank
from m3stack.parallel import ALONE, Mesh

NORM_SPREAD = 0.02


def random_model(
    config: M3Config,
    *,
    kernels: Kernels,
    place: Place,
    mesh: Mesh = ALONE,
    rank: Rank = WHOLE,
) -> M3Model:
    """A model, or a rank's part of one, that keeps activations near one and answers in noise.

    Parameters that every rank holds are the same on all of them. No host memory is needed.
    """
    model = M3Model(config, kernels=kernels, place=place, mesh=mesh, rank=rank)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, values in parameters.items():
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6])
        generator = torch.Generator(place.device).manual_seed(seed)
        if values.dtype == torch.float8_e4m3fn:
            _draw_elements(values, generator)
        elif values.dtype == torch.uint8:
            # of values near 1, an element of e4m3 is about 2^5
            width = values.shape[-1] * 32
            values.fill_(127 - 5 - round(torch.tensor(float(width)).log2().item() / 2))
        elif values.dim() == 1:
            _draw_vector(name, values, generator)
        else:
            scale = 1.0 if name == "embedding" else values.shape[-1] ** -0.5
            for matrix in values if values.dim() == 3 else (values,):
                matrix.normal_(generator=generator).mul_(scale)
    return model


def _draw_elements(values: Tensor, generator: torch.Generator) -> None:
    """Elements near 2^5 in size, of both signs; never NaN."""
    for matrix in values if values.dim() == 3 else (values,):
        bits = torch.empty(matrix.shape, dtype=torch.float16, device=matrix.device)
        matrix.copy_(bits.normal_(generator=generator).mul_(32.0).clamp_(-448.0, 448.0))


def _draw_vector(name: str, values: Tensor, generator: torch.Generator) -> None:
    """Layer norms of the vision tower multiply by about 1, Gemma norms by 1 + w."""
    values.normal_(generator=generator).mul_(NORM_SPREAD)
    if name.startswith(("vision.", "projector.")) and name.endswith("norm.weight"):
        values.add_(1.0)
