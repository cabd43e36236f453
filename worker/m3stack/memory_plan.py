"""Whether MiniMax-M3 fits: GPUs x weight format x context x concurrency, before anything is loaded.

Weights and cache are exact, from the tensor list and the cache's layout; what a step needs beside
them is an estimate, itemised.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from importlib import resources
from typing import TypeVar

import torch

from m3stack.cache.pool import PageShape
from m3stack.config import WorkerConfig
from m3stack.errors import StartupError
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.quantization import MXFP8_GROUP, NVFP4_GROUP, WeightFormat
from m3stack.models.minimax_m3.ranks import Rank
from m3stack.models.minimax_m3.slices import Slice, rank_slices
from m3stack.step_limits import graph_bytes, scheduler_limits

GIB = 1 << 30
LIBRARY_BYTES = 5 << 29
"""CUDA context, NCCL and library workspaces: 2.5 GiB, where 1.6 were counted on two GPUs."""
LARGER_NUMBERS = (1, 2, 4, 8, 16)

Kind = TypeVar("Kind", bound=Enum)


class KvFormat(Enum):
    """Bytes a value of the cache: (keys and values of sparse layers, of dense ones, index keys)."""

    BF16 = "bf16"
    FP8 = "fp8"
    """Keys and values of sparse layers in fp8, as the worker keeps them; all else in bf16."""
    FP8_ALL = "fp8-all"
    """Everything in fp8, which the worker does not offer; published pool sizes know it."""

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype | None]:
        """Of a page, and of keys and values on sparse layers where that is another."""
        plain, fp8 = torch.bfloat16, torch.float8_e4m3fn
        return {"bf16": (plain, None), "fp8": (plain, fp8), "fp8-all": (fp8, None)}[self.value]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What every GPU of a group would hold; all bytes are of one GPU.

    Attributes:
        gpus: that share the model by tensor parallelism.
        gpu_bytes: of memory.
        weight_format: of the linears; with NVFP4 that of routed experts, the rest being MXFP8.
        context_tokens: of every request, prompt and output together.
        concurrency: requests at once, each at full context.
        weight_bytes: of its slices and of what stands on every GPU.
        replicated_bytes: what it holds beyond its even share of the weights.
        kv_bytes_per_token: keys, values and index keys of all layers.
        shard_index_keys: each GPU holds the index keys of its share of the pages only.
        work_bytes: beside weights and cache, by name; estimates.
        cache_share: of what these leave, what pages may take (`kv_memory_fraction`).
        page_tokens: the cache is given out in pages of this many.
        max_context_tokens: that the model supports.
    """

    gpus: int
    gpu_bytes: int
    weight_format: WeightFormat
    kv_format: KvFormat
    context_tokens: int
    concurrency: int
    weight_bytes: int
    replicated_bytes: int
    kv_bytes_per_token: int
    work_bytes: tuple[tuple[str, int], ...]
    cache_share: float
    page_tokens: int
    max_context_tokens: int
    shard_index_keys: bool

    @property
    def cache_bytes(self) -> int:
        """That pages may take; negative where weights and work alone do not fit."""
        return self._left_bytes - self.spare_bytes

    @property
    def spare_bytes(self) -> int:
        """That neither weights nor work need and pages do not take."""
        return max(0, self._left_bytes - int(self._left_bytes * self.cache_share))

    @property
    def _left_bytes(self) -> int:
        return self.gpu_bytes - self.weight_bytes - sum(size for _, size in self.work_bytes)

    @property
    def cache_tokens(self) -> int:
        """Whole pages of tokens that fit."""
        page_bytes = self.kv_bytes_per_token * self.page_tokens
        return max(0, self.cache_bytes // page_bytes) * self.page_tokens

    @property
    def needed_tokens(self) -> int:
        """Cache that all requests take at full context."""
        return self.concurrency * _whole_pages(self.context_tokens, self.page_tokens)

    @property
    def needed_bytes(self) -> int:
        return self.needed_tokens * self.kv_bytes_per_token

    @property
    def fits(self) -> bool:
        return self.cache_tokens >= self.needed_tokens

    @property
    def largest_concurrency(self) -> int:
        """Requests of this context that fit at once."""
        return self.cache_tokens // _whole_pages(self.context_tokens, self.page_tokens)

    @property
    def largest_context_tokens(self) -> int:
        """Context at which this many requests fit."""
        share = self.cache_tokens // self.concurrency // self.page_tokens * self.page_tokens
        return min(share, self.max_context_tokens)


def plan_memory(
    *,
    gpus: int,
    gpu_bytes: int,
    weight_format: WeightFormat | str,
    context_tokens: int,
    concurrency: int,
    kv_format: KvFormat | str,
    shard_index_keys: bool = False,
    config: M3Config | None = None,
) -> MemoryPlan:
    """Plans one tensor-parallel group.

    Args:
        gpus: of the group.
        gpu_bytes: of each.
        weight_format: `bf16`, `mxfp8` or `nvfp4`.
        context_tokens: of each request.
        concurrency: requests at once.
        kv_format: `bf16`, `fp8` or `fp8-all`.
        shard_index_keys: as the worker's setting.
        config: of the model; the released one unless given. Its own quantisation is not looked at.

    Raises:
        StartupError: a number out of range, or a size that does not divide over the GPUs.
    """
    config = released_model_config() if config is None else config
    weights, kv = _member(WeightFormat, weight_format), _member(KvFormat, kv_format)
    _check(gpus=gpus, gpu_bytes=gpu_bytes, context_tokens=context_tokens, concurrency=concurrency)
    if context_tokens > config.max_position_embeddings:
        raise StartupError(
            f"context is {context_tokens} tokens, the model supports "
            f"{config.max_position_embeddings}"
        )
    held = weights_of_rank(config, weights, gpus, shard_index_keys=shard_index_keys)
    whole = held if gpus == 1 else weights_of_rank(config, weights, 1)
    return MemoryPlan(
        gpus=gpus,
        gpu_bytes=gpu_bytes,
        weight_format=weights,
        kv_format=kv,
        context_tokens=context_tokens,
        concurrency=concurrency,
        weight_bytes=held,
        replicated_bytes=held - whole // gpus,
        kv_bytes_per_token=kv_bytes_per_token(config, kv, gpus, shard_index_keys=shard_index_keys),
        work_bytes=tuple(_work(config, gpus, concurrency)),
        cache_share=WorkerConfig().kv_memory_fraction,
        page_tokens=config.block_tokens,
        max_context_tokens=config.max_position_embeddings,
        shard_index_keys=shard_index_keys,
    )


def released_model_config() -> M3Config:
    """The config of the released model."""
    file = resources.files("m3stack.models.minimax_m3") / "released_config.json"
    return M3Config.from_object(json.loads(file.read_text(encoding="utf-8")))


def weights_of_rank(
    config: M3Config, weights: WeightFormat, gpus: int, *, shard_index_keys: bool = False
) -> int:
    """Bytes of the weights that each of a group of GPUs holds; the first one is as full as any.

    Raises:
        StartupError: a size does not divide over the GPUs.
    """

    def with_experts(count: int) -> int:
        rank = Rank(0, gpus, index_in_parts=shard_index_keys)
        slices = rank_slices(replace(config, num_experts=count), rank)
        return sum(_slice_bytes(item, weights) for item in slices.values())

    # one expert takes what any other does, its row of the router included
    one = with_experts(1)
    return one + (config.num_experts - 1) * (with_experts(2) - one)


def kv_bytes_per_token(
    config: M3Config, kv: KvFormat, gpus: int, *, shard_index_keys: bool = False
) -> int:
    """Bytes of cache of one token on each GPU; the one index key stands on all of them, or once."""
    dtype, kv_dtype = kv.dtypes
    shape = PageShape(
        sparse_layers=config.sparse_layers,
        num_kv_heads=config.per_rank(gpus).num_kv_heads,
        head_dim=config.head_dim,
        index_dim=config.index_dim,
        page_tokens=config.block_tokens,
        dtype=dtype,
        kv_dtype=kv_dtype,
        index_ranks=gpus if shard_index_keys else 1,
    )
    return shape.bytes_per_page // shape.page_tokens


def table(plan: MemoryPlan) -> str:
    """The plan in lines for a person, with what would fit where it does not."""
    rows = [
        ("weights", plan.weight_bytes, f"{plan.weight_format.value}, "
         f"{plan.replicated_bytes / GIB:.2f} GiB of them on every GPU"),
        *((name, size, "estimate") for name, size in plan.work_bytes),
        ("left free", plan.spare_bytes, f"kv_memory_fraction is {plan.cache_share:g}"),
        ("cache, needed", plan.needed_bytes,
         f"{plan.concurrency} x {plan.context_tokens} tokens, {plan.kv_format.value}, "
         f"{plan.kv_bytes_per_token / 1000:.1f} kB a token"
         + (", index keys shared out" if plan.shard_index_keys else "")),
        ("cache, possible", max(0, plan.cache_bytes), f"{plan.cache_tokens} tokens"),
    ]  # fmt: skip
    each = f"{plan.gpu_bytes / GIB:.1f} GiB"
    lines = [f"MiniMax-M3 on {plan.gpus} GPU{'s' * (plan.gpus > 1)} of {each}, per GPU:"]
    lines += [f"  {name:<20}{size / GIB:9.2f} GiB  {note}" for name, size, note in rows]
    return "\n".join([*lines, *_verdict(plan)])


def _verdict(plan: MemoryPlan) -> Iterator[str]:
    if plan.fits:
        most = plan.largest_concurrency
        yield (
            f"fits: up to {most} request{'s' * (most > 1)} of {plan.context_tokens} tokens, "
            f"or {plan.concurrency} of {plan.largest_context_tokens}"
        )
        return
    short = plan.needed_bytes - plan.cache_bytes
    yield f"does not fit: {short / GIB:.2f} GiB short on every GPU"
    if plan.largest_concurrency:
        yield f"  with this context: {plan.largest_concurrency} requests at once"
    if plan.largest_context_tokens:
        yield f"  with this concurrency: {plan.largest_context_tokens} tokens each"


def smallest_group(plan: MemoryPlan, config: M3Config | None = None) -> int | None:
    """The smallest larger group of such GPUs on which the plan fits, or None up to 16."""
    for gpus in LARGER_NUMBERS:
        if gpus <= plan.gpus:
            continue
        larger = plan_memory(
            gpus=gpus,
            gpu_bytes=plan.gpu_bytes,
            weight_format=plan.weight_format,
            context_tokens=plan.context_tokens,
            concurrency=plan.concurrency,
            kv_format=plan.kv_format,
            shard_index_keys=plan.shard_index_keys,
            config=config,
        )
        if larger.fits:
            return gpus
    return None


def _slice_bytes(item: Slice, weights: WeightFormat) -> int:
    values = item.rows.count * item.columns.count
    if item.keeps_fp32:
        return 4 * values
    if not item.is_quantisable or weights is WeightFormat.PLAIN:
        return 2 * values
    if weights is WeightFormat.NVFP4 and item.expert is not None:
        return values // 2 + values // NVFP4_GROUP + 4
    return values + values // MXFP8_GROUP


def _work(config: M3Config, gpus: int, concurrency: int) -> Iterator[tuple[str, int]]:
    """What a worker that is told nothing keeps from pages, in bf16 unless said otherwise."""
    settings, own = WorkerConfig(), config.per_rank(gpus)
    limits = scheduler_limits(settings, "cuda")
    tokens = limits.most_tokens_within(config.max_position_embeddings)
    width, vision = config.hidden_size, config.vision
    # the stream, its norm, and one layer's input and output
    stream = 4 * tokens * width * 2
    attention = tokens * 3 * own.num_heads * config.head_dim * 2
    dense = tokens * 3 * own.dense_size * 2
    # gate, up and their product a chosen expert, and its fp32 result
    pairs = tokens * config.num_experts_per_token
    experts = pairs * (3 * own.expert_size * 2 + width * 4)
    yield "activations", stream + attention + max(dense, experts)
    yield "logits", 2 * concurrency * config.vocab_size * 4
    inner = max(4 * vision.hidden_size, vision.intermediate_size)
    projected = 2 * max(width, vision.projector_hidden_size)
    patches = limits.max_encode_patches * (3 * vision.hidden_size + inner + projected) * 2
    yield "pictures and clips", patches + settings.vision_cache_bytes
    yield "recorded steps", graph_bytes(settings, "cuda")
    yield "CUDA and libraries", LIBRARY_BYTES


def _whole_pages(tokens: int, page_tokens: int) -> int:
    return -(-tokens // page_tokens) * page_tokens


def _check(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise StartupError(f"{name} is {number}, expected at least 1")


def _member(kind: type[Kind], value: Kind | str) -> Kind:
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(str(item.value) for item in kind)
        raise StartupError(f"{value!r} is none of {names}") from None
