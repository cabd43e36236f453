"""An engine over a model that stands already: no gRPC, no tokenizer, no pictures."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from m3stack.batch import DeviceBatch, LayerCache
from m3stack.bench.agentic.replay import Mailbox
from m3stack.bench.agentic.step_times import StepTime, TimedForward, TimedRunner
from m3stack.cache.host import HostTier
from m3stack.cache.host_pool import HostPool
from m3stack.cache.media import MediaLedger
from m3stack.cache.pages import PageAllocator
from m3stack.cache.pool import KvPool, PageShape
from m3stack.cache.prefix import PrefixCache
from m3stack.cache.tiered import TieredPages, TieredPool
from m3stack.engine.budget import SchedulerLimits
from m3stack.engine.encoder import Encoder
from m3stack.engine.engine import Engine, EngineParts, EngineSettings
from m3stack.engine.graphs import CudaRecorder, DecodeGraphs
from m3stack.engine.inputs import InputBuilder
from m3stack.engine.pace import Pace, PaceLimits, is_prompt
from m3stack.engine.plan import StepPlan
from m3stack.engine.runner import Forward, ModelRunner
from m3stack.engine.sampler import Sampler
from m3stack.engine.scheduler import Scheduler
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.model import M3Model
from m3stack.telemetry import WorkerMetrics

# as the worker's own settings
GROWTH_PREFIX_TOKENS, RESTORE_COST_TOKENS = 131_072, 16
STOP_S = 60.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """What an engine is made of.

    Attributes:
        num_pages: of the cache.
        max_batch_tokens, max_mixed_tokens: of a step, and of one beside decode.
        max_sequences: that run at once.
        slowdown: of steps with prompts; 0: bounded by tokens alone.
        prefix_cache, prefill_first, overlap: as in `Arm`.
        host_slots: pages of host memory for those the device has no room for.
        hot_pages: pages whose keys and values stay on the device; 0: all.
        graph_bytes: device memory of recorded steps.
        filled: whether pages hold numbers from the start, and prompts can be passed over.
    """

    num_pages: int
    max_batch_tokens: int
    max_mixed_tokens: int
    max_sequences: int
    slowdown: float = 0.0
    prefix_cache: bool = True
    prefill_first: bool = False
    overlap: bool = True
    host_slots: int = 0
    hot_pages: int = 0
    graph_bytes: int = 2 << 30
    filled: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """A step that has ended.

    Attributes:
        ended_at: as `time.perf_counter` tells it.
        seconds: it took, or kept the next one waiting.
        num_decoding: requests that waited for their next token.
        prompt_tokens: computed in it.
        prompt_end: computed tokens of the prompt that has come furthest; 0 without prompts.
    """

    ended_at: float
    seconds: float
    num_decoding: int
    prompt_tokens: int
    prompt_end: int


class TimedScheduler(Scheduler):
    """A scheduler that keeps what it was told of its steps."""

    def __init__(
        self, limits: SchedulerLimits, pages: PrefixCache, media: MediaLedger, pace: Pace | None
    ) -> None:
        super().__init__(limits, pages, media, pace)
        self.steps: list[Step] = []

    def took(self, plan: StepPlan, seconds: float) -> None:
        super().took(plan, seconds)
        prompts = [row for row in plan.rows if is_prompt(row)]
        tokens = sum(len(row.token_ids) for row in prompts)
        end = max((row.end for row in prompts), default=0)
        count = len(plan.rows) - len(prompts)
        self.steps.append(Step(time.perf_counter(), seconds, count, tokens, end))


class Passing:
    """A forward that can let steps pass: their pages keep what is in them.

    Args:
        forward: of the model.
        vocab_size: of its logits.
    """

    def __init__(self, forward: Forward, vocab_size: int) -> None:
        self._forward = forward
        self._vocab_size = vocab_size
        self.is_on = False

    def __call__(self, batch: DeviceBatch, caches: LayerCache) -> Tensor:
        if not self.is_on:
            return self._forward(batch, caches)
        count = batch.sample_rows_S.shape[0]
        size = (count, self._vocab_size)
        return torch.zeros(size, dtype=torch.float32, device=batch.token_ids_T.device)


@dataclass(slots=True)
class Running:
    """An engine that runs.

    Attributes:
        graphs: its recorded steps; None on a CPU.
        passing: lets prompts pass while it is on; only where pages are filled.
        steps: those that have ended; grows.
        times: of steps as they were launched; grows.
    """

    engine: Engine
    mailbox: Mailbox
    pool: KvPool
    graphs: DecodeGraphs | None
    passing: Passing | None
    metrics: WorkerMetrics
    steps: list[Step]
    times: list[StepTime]

    @property
    def preemptions(self) -> int:
        """Requests that lost their pages so far."""
        value = self.metrics.registry.get_sample_value("m3stack_worker_preemptions_total")
        return int(value or 0)


def page_shape(config: M3Config, dtype: torch.dtype) -> PageShape:
    return PageShape(
        sparse_layers=config.sparse_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        index_dim=config.index_dim,
        page_tokens=config.block_tokens,
        dtype=dtype,
    )


def fill(pool: KvPool) -> None:
    """Gives every page normal values, the same for a page wherever it is kept."""
    for number, layer in enumerate(pool.layers):
        tier = layer.tier if isinstance(layer, TieredPages) else None
        targets = [*(tier.host if tier is not None else (layer.k_PGBD, layer.v_PGBD))]
        if layer.index_k_PBD is not None:
            targets.append(layer.index_k_PBD)
        device = layer.k_PGBD.device
        for part, target in enumerate(targets):
            generator = torch.Generator(device).manual_seed(10 * number + part)
            for pages in target.split(256):
                drawn = torch.empty(pages.shape, dtype=pages.dtype, device=device)
                pages.copy_(drawn.normal_(generator=generator))


@contextmanager
def running_engine(model: M3Model, sizes: Sizes) -> Iterator[Running]:
    """An engine over a model; stopped, its memory given back, at the end of the block."""
    config, device = model.config, model.embedding.device
    shape = page_shape(config, model.embedding.dtype)
    if sizes.hot_pages:
        pool = TieredPool(shape, sizes.num_pages, device, num_hot=sizes.hot_pages)
    else:
        pool = KvPool(shape, sizes.num_pages, device)
    forward: Forward = model.forward
    graphs = passing = None
    if device.type == "cuda":
        forward = graphs = DecodeGraphs(
            model.forward,
            pool.layers,
            record=CudaRecorder(device),
            page_tokens=config.block_tokens,
            max_sequences=sizes.max_sequences,
            budget_bytes=sizes.graph_bytes,
        )
    if sizes.filled:
        fill(pool)
        forward = passing = Passing(forward, config.vocab_size)
    host = HostPool(pool, sizes.host_slots) if sizes.host_slots else None
    media = MediaLedger(1)
    timed_forward = TimedForward(forward)
    model_runner = ModelRunner(
        timed_forward,
        pool.layers,
        encoder=Encoder(model.encode_media, media, device),
        inputs=InputBuilder(config.block_tokens, device),
        sampler=Sampler(config.vocab_size, device),
        copy_page=None if host is None else host.copy,
    )
    runner = TimedRunner(model_runner, timed_forward)
    tier = host and HostTier(host.num_slots, restore_cost_tokens=RESTORE_COST_TOKENS)
    pages = PrefixCache(PageAllocator(sizes.num_pages), enabled=sizes.prefix_cache, host=tier)
    limits = SchedulerLimits(
        max_batch_tokens=sizes.max_batch_tokens,
        max_sequences=sizes.max_sequences,
        max_encode_patches=1,
        max_mixed_tokens=sizes.max_mixed_tokens,
        growth_prefix_tokens=GROWTH_PREFIX_TOKENS,
        prefill_first=sizes.prefill_first,
    )
    pace = Pace(PaceLimits(sizes.slowdown)) if sizes.slowdown else None
    mailbox, metrics = Mailbox(), WorkerMetrics()
    scheduler = TimedScheduler(limits, pages, media, pace)
    engine = Engine(
        EngineParts(
            scheduler,
            pages,
            runner,
            media,
            metrics,
            runner if sizes.overlap else None,
        ),
        EngineSettings(
            page_tokens=config.block_tokens,
            max_context_tokens=sizes.num_pages * config.block_tokens,
            eos_token_id=config.eos_token_id,
            page_bytes=shape.bytes_per_page,
        ),
        deliver=mailbox.put,
        on_exit=mailbox.end,
    )
    # as the worker does: a full collection walks over all of torch while nobody gets a token
    gc.collect()
    gc.freeze()
    engine.start()
    try:
        yield Running(
            engine, mailbox, pool, graphs, passing, metrics, scheduler.steps, runner.times
        )
    finally:
        engine.stop()
        engine.join(STOP_S)
        gc.unfreeze()
        del engine, runner, model_runner, timed_forward, pool, forward, graphs, passing, host
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
