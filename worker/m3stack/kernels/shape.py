"""What the choice of back ends must know of a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KernelShape:
    """Sizes of the layers of one rank.

    Attributes:
        dtype: of activations and of the cache.
        heads, groups: query heads and KV groups of this rank.
        head_dim, rotary_dim: D, and how many of its dims are rotated.
        page_tokens: B.
        num_blocks, num_local_blocks: chosen blocks of a row, and how many of them are forced.
        vision_heads, vision_head_dim: of the vision tower.
        experts, experts_per_token: routed ones of a layer, and of a token.
    """

    dtype: torch.dtype
    heads: int
    groups: int
    head_dim: int
    rotary_dim: int
    page_tokens: int
    num_blocks: int
    num_local_blocks: int
    vision_heads: int
    vision_head_dim: int
    experts: int
    experts_per_token: int
