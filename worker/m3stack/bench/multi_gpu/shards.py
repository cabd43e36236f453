"""One rank's part of a model of a few sparse layers, with weights drawn where they are needed."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import torch
from torch import Tensor

from m3stack.cache.pool import KvPool, PageShape
from m3stack.kernels.interface import Kernels
from m3stack.layers import Place
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.layout import checkpoint_layout
from m3stack.models.minimax_m3.model import M3Model
from m3stack.models.minimax_m3.ranks import Rank
from m3stack.models.minimax_m3.slices import rank_slices
from m3stack.parallel import Mesh

TEXT = "language_model."


def truncated(config: M3Config, num_layers: int) -> M3Config:
    """The same widths, `num_layers` sparse layers of experts, and next to no vision tower."""
    return replace(
        config,
        num_layers=num_layers,
        sparse_layers=(True,) * num_layers,
        moe_layers=(True,) * num_layers,
        vision=replace(config.vision, num_layers=1),
        quantization=None,
    )


def divided_model(
    config: M3Config, rank: Rank, *, kernels: Kernels, mesh: Mesh, place: Place
) -> M3Model:
    """A rank's part of the one random model that all divisions share.

    Every tensor is drawn whole on the device, from its name, and cut there; vision stays zero.
    """
    model = M3Model(config, kernels=kernels, place=place, mesh=mesh, rank=rank)
    targets = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for target in targets.values():
        target.zero_()
    layout = checkpoint_layout(config)
    for name, item in rank_slices(config, rank).items():
        if not name.startswith(TEXT):
            continue
        values = _drawn(name, layout[name].shape, place.device)
        target = targets[item.parameter]
        if item.expert is not None:
            target = target[item.expert]
        values = values.view(values.shape[0], -1)
        values = values.narrow(0, item.rows.first, item.rows.count)
        values = values.narrow(1, item.columns.first, item.columns.count)
        target.narrow(0, item.first_row, item.rows.count).copy_(
            values.view(item.rows.count, *target.shape[1:])
        )
    return model


def _drawn(name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Normal values that keep activations near one; norms near the identity."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6])
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
    if len(shape) == 1:
        return values * 0.02
    return values if "embed_tokens" in name else values / math.sqrt(shape[1])


def page_shape(config: M3Config, rank: Rank, dtype: torch.dtype) -> PageShape:
    """What a page of a rank holds."""
    return PageShape(
        sparse_layers=config.sparse_layers,
        num_kv_heads=config.per_rank(rank.tp_size).num_kv_heads,
        head_dim=config.head_dim,
        index_dim=config.index_dim,
        page_tokens=config.block_tokens,
        dtype=dtype,
        index_rank=rank.tp_rank if rank.index_in_parts else 0,
        index_ranks=rank.tp_size if rank.index_in_parts else 1,
    )


def random_pool(shape: PageShape, num_pages: int, device: torch.device) -> KvPool:
    """A pool whose pages hold normal values."""
    pool = KvPool(shape, num_pages, device)
    generator = torch.Generator(device).manual_seed(1)
    for layer in pool.layers:
        layer.k_PGBD.normal_(generator=generator)
        layer.v_PGBD.normal_(generator=generator)
        if layer.index_k_PBD is not None:
            # of keys held in parts the last row belongs to no page, and stays as it is
            rows = num_pages if shape.index_ranks == 1 else layer.index_k_PBD.shape[0] - 1
            layer.index_k_PBD[:rows].normal_(generator=generator)
    return pool
