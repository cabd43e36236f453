"""The least time a step can take on one rank: bytes it must move, products it must do."""

from __future__ import annotations

from dataclasses import dataclass

from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.ranks import Rank

BYTES = 2  # bf16


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What one GPU reached in the same run."""

    bytes_per_s: float
    flops_per_s: float

    def least_us(self, num_bytes: float, flops: float) -> float:
        """The longer of the two times."""
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s) * 1e6


@dataclass(frozen=True, slots=True)
class Work:
    """Of one sparse layer on one rank."""

    num_bytes: float
    flops: float


def layer_weights(config: M3Config, rank: Rank) -> tuple[float, float]:
    """Values of a layer's weights on a rank: read whatever is chosen, and of one expert."""
    own = config.per_rank(rank.tp_size, width_ranks=rank.width_ranks)
    index_heads = (config if rank.index_in_parts else own).num_kv_heads
    projected = (own.num_heads + 2 * own.num_kv_heads) * own.head_dim
    projected += (index_heads + 1) * own.index_dim
    attention = (projected + own.num_heads * own.head_dim) * own.hidden_size
    # the router is in fp32
    router = 2 * own.num_experts * own.hidden_size
    shared = 3 * own.shared_size * own.hidden_size
    return attention + router + shared, 3 * own.expert_size * own.hidden_size


def attention_decode_bytes(config: M3Config, rank: Rank, batch: int, context: int) -> float:
    """Index keys and chosen keys and values that a decode step reads in a layer."""
    own = config.per_rank(rank.tp_size)
    index = context * config.index_dim * BYTES
    if rank.index_in_parts:
        index /= rank.tp_size
    seen = min(context, config.topk_blocks * config.block_tokens)
    return batch * (index + 2 * seen * own.num_kv_heads * own.head_dim * BYTES)


def decode(config: M3Config, rank: Rank, batch: int, context: int) -> Work:
    """A step of one row a sequence; experts as a uniform router would touch them."""
    always, one_expert = layer_weights(config, rank)
    share = config.num_experts_per_token / config.num_experts
    touched = config.num_experts * (1 - (1 - share) ** batch) / rank.ep_size
    weights = (always + touched * one_expert) * BYTES
    chosen = batch * config.num_experts_per_token / rank.ep_size
    flops = 2 * (batch * always + chosen * one_expert)
    return Work(weights + attention_decode_bytes(config, rank, batch, context), flops)


def prefill(config: M3Config, rank: Rank, chunk: int, prefix: int) -> Work:
    """A chunk of one sequence; every chosen key of every row is multiplied, none is shared."""
    own = config.per_rank(rank.tp_size)
    always, one_expert = layer_weights(config, rank)
    chosen = chunk * config.num_experts_per_token / rank.ep_size
    weights = 2 * (chunk * always + chosen * one_expert)
    pairs = chunk * prefix + chunk * chunk / 2
    groups = config.num_kv_heads / rank.tp_size if rank.index_in_parts else own.num_kv_heads
    index = 2 * pairs * groups * config.index_dim
    seen = min(prefix, config.topk_blocks * config.block_tokens)
    attend = 4 * chunk * seen * own.num_heads * own.head_dim
    held = (always + config.num_experts / rank.ep_size * one_expert) * BYTES
    return Work(held, weights + index + attend)


def cache_bytes_per_token(config: M3Config, rank: Rank) -> float:
    """Of one rank, all layers, bf16. Source: two KV sides of the rank's heads, one index key."""
    own = config.per_rank(rank.tp_size)
    keys_values = 2 * config.num_layers * own.num_kv_heads * own.head_dim
    index = sum(config.sparse_layers) * config.index_dim
    return (keys_values + (index / rank.tp_size if rank.index_in_parts else index)) * BYTES
