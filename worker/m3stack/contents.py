"""What a loaded worker can hand to others, and take from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from m3stack.cache.pool import KvPool
from m3stack.cache.tiered import TieredPool
from m3stack.config import WorkerConfig
from m3stack.engine.encoder import Encoder, FollowerBook
from m3stack.engine.leader import Order
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.ranks import Rank, head_span
from m3stack.parallel import ALONE, Mesh
from m3stack.transfer.layout import feature_layout, page_form, page_layout, weights_id
from m3stack.transfer.port import FollowerPort, LeaderPort, Port, RankPort


@dataclass(frozen=True, slots=True)
class Contents:
    """Pages and features, and their forms in words.

    Attributes:
        port: belongs to the engine thread.
        keeps_pages: whether requests find pages that were computed before (`prefix_cache`).
    """

    port: Port
    page_layout: str
    feature_layout: str
    keeps_pages: bool = True


@dataclass(frozen=True, slots=True)
class RankParts:
    """What holds the contents of one rank."""

    pool: KvPool
    encoder: Encoder
    rank: Rank
    device: torch.device


def contents_of(
    config: WorkerConfig,
    model: M3Config,
    own: RankParts,
    *,
    mesh: Mesh = ALONE,
    send: Callable[[Order], None] | None = None,
) -> Contents | None:
    """The contents of a worker; None if its pages stand where they cannot be had (`hot_pages`).

    Args:
        own: of this, the leading rank.
        mesh: all ranks.
        send: gives an order to the other ranks, if there are any.
    """
    if isinstance(own.pool, TieredPool):
        return None
    shape = own.pool.shape
    port: Port = _rank_port(model, own)
    if send is not None:
        tell = send
        port = LeaderPort(_rank_port(model, own), mesh, lambda order: tell(Order(order)))
    weights = "random" if config.random_weights else weights_id(Path(config.model_path))
    return Contents(
        port=port,
        page_layout=page_layout(shape, model, weights),
        feature_layout=feature_layout(model, shape.dtype, weights),
        keeps_pages=config.prefix_cache,
    )


def follower_port(model: M3Config, own: RankParts, mesh: Mesh, book: FollowerBook) -> FollowerPort:
    """What a rank that follows does with orders about contents."""
    return FollowerPort(_rank_port(model, own), mesh, book)


def _rank_port(model: M3Config, own: RankParts) -> RankPort:
    rank = own.rank
    heads = head_span("KV heads", model.num_kv_heads, 1, rank)
    # with more ranks than heads, neighbours hold the same
    copies = max(1, rank.tp_size // model.num_kv_heads)
    return RankPort(
        own.pool,
        page_form(own.pool.shape, model.num_kv_heads),
        range(heads.first, heads.first + heads.count),
        features=own.encoder,
        width=model.hidden_size,
        device=own.device,
        gives_heads=rank.tp_rank % copies == 0,
        gives_index=rank.index_in_parts or rank.tp_rank == 0,
    )
