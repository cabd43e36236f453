"""The least bytes and operations of a sparse layer, part by part, on one GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from m3stack.bench.kernels.moe_layers import BYTES_PER_VALUE
from m3stack.models.minimax_m3.config import M3Config

Part = Literal["attention", "moe", "projections"]
CACHE_BYTES = 2  # bf16 keys and values


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes that must move and floating-point operations that must be done."""

    num_bytes: float
    flops: float


def projected_values(config: M3Config) -> int:
    """Weights of the attention's two linears."""
    heads = config.num_heads + 2 * config.num_kv_heads
    width = heads * config.head_dim + (config.num_kv_heads + 1) * config.index_dim
    return (width + config.num_heads * config.head_dim) * config.hidden_size


def expert_values(config: M3Config) -> int:
    """Weights of one routed expert; the shared one has as many."""
    return 3 * config.hidden_size * config.expert_size


def touched_experts(config: M3Config, tokens: int) -> float:
    """Routed experts of a layer that some token chooses, if all are as likely."""
    share = config.num_experts_per_token / config.num_experts
    return config.num_experts * (1 - (1 - share) ** tokens)


def decode_work(config: M3Config, form: str, batch: int, context: int) -> dict[Part, Work]:
    """A step of one row for each of `batch` sequences of `context` tokens."""
    seen = min(context, config.topk_blocks * config.block_tokens)
    keys = context * config.index_dim + 2 * seen * config.num_kv_heads * config.head_dim
    attend = 2 * config.num_kv_heads * config.index_dim * context
    attend += 4 * config.num_heads * config.head_dim * seen
    work = _linears(config, form, batch)
    work["attention"] = Work(batch * keys * CACHE_BYTES, batch * attend)
    return work


def prefill_work(config: M3Config, form: str, chunk: int, context: int) -> dict[Part, Work]:
    """A chunk that ends a sequence of `context` tokens."""
    pairs = chunk * (context - chunk) + chunk * (chunk + 1) / 2
    seen = min(context, config.topk_blocks * config.block_tokens)
    # rows near the start of a sequence see less than they may choose
    short = max(0, seen - (context - chunk))
    chosen = chunk * seen - short * (short - 1) / 2
    attend = 2 * config.num_kv_heads * config.index_dim * pairs
    attend += 4 * config.num_heads * config.head_dim * chosen
    keys = context * config.index_dim + 2 * context * config.num_kv_heads * config.head_dim
    work = _linears(config, form, chunk)
    work["attention"] = Work(keys * CACHE_BYTES, attend)
    return work


def _linears(config: M3Config, form: str, tokens: int) -> dict[Part, Work]:
    each, one = BYTES_PER_VALUE[form], expert_values(config)
    used = touched_experts(config, tokens) + 1
    # the router is in fp32
    router = 4 * config.num_experts * config.hidden_size
    inout = 4 * tokens * config.hidden_size
    projected = projected_values(config)
    return {
        "moe": Work(
            used * one * each + router + inout,
            2 * tokens * (config.num_experts_per_token + 1) * one,
        ),
        "projections": Work(projected * each + 2 * inout, 2 * tokens * projected),
    }
