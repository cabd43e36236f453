"""An engine for one arm, over a model that stands already: no gRPC, no tokenizer, no pictures."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from m3stack.assemble import kernel_shape
from m3stack.bench.agentic.arms import Arm
from m3stack.bench.agentic.replay import Mailbox
from m3stack.cache.media import MediaLedger
from m3stack.cache.pages import PageAllocator
from m3stack.cache.pool import KvPool, PageShape
from m3stack.cache.prefix import PrefixCache
from m3stack.engine.budget import SchedulerLimits
from m3stack.engine.encoder import Encoder
from m3stack.engine.engine import Engine, EngineParts, EngineSettings
from m3stack.engine.graphs import CudaRecorder, DecodeGraphs
from m3stack.engine.inputs import InputBuilder
from m3stack.engine.runner import ModelRunner
from m3stack.engine.sampler import Sampler
from m3stack.engine.scheduler import Scheduler
from m3stack.kernels.select import build_kernels
from m3stack.layers import Place
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.model import M3Model
from m3stack.models.minimax_m3.random_weights import random_model
from m3stack.telemetry import WorkerMetrics

GRAPH_BYTES = 2 << 30
STOP_S = 60.0


def truncated(config: M3Config, num_sparse: int) -> M3Config:
    """The same widths with the first dense layer, `num_sparse` sparse ones and next to no ViT."""
    return replace(
        config,
        num_layers=1 + num_sparse,
        sparse_layers=(False, *(True,) * num_sparse),
        moe_layers=(False, *(True,) * num_sparse),
        vision=replace(config.vision, num_layers=1),
        quantization=None,
    )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bounds that all arms share.

    Attributes:
        num_pages: of the cache.
        max_batch_tokens, max_mixed_tokens: of a step, and of one beside decode.
        max_sequences: that run at once.
    """

    num_pages: int
    max_batch_tokens: int
    max_mixed_tokens: int
    max_sequences: int


def build_model(config: M3Config, arm: Arm, kernels: str, device: torch.device) -> M3Model:
    """The arm's model, weights drawn on the device."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    table = build_kernels(kernels, shape=kernel_shape(config, dtype), device=device)
    place = Place(device, dtype, keeps_mxfp8=arm.keeps_mxfp8)
    return random_model(config, kernels=arm.kernels(table), place=place)


@contextmanager
def running_engine(model: M3Model, arm: Arm, sizes: Sizes) -> Iterator[tuple[Engine, Mailbox]]:
    """An engine of the arm; stopped, its memory given back, at the end of the block."""
    config, device = model.config, model.embedding.device
    shape = PageShape(
        sparse_layers=config.sparse_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        index_dim=config.index_dim,
        page_tokens=config.block_tokens,
        dtype=model.embedding.dtype,
    )
    pool = KvPool(shape, sizes.num_pages, device)
    forward = model.forward
    if device.type == "cuda":
        forward = DecodeGraphs(
            model.forward,
            pool.layers,
            record=CudaRecorder(device),
            page_tokens=config.block_tokens,
            max_sequences=sizes.max_sequences,
            budget_bytes=GRAPH_BYTES,
        )
    media = MediaLedger(1)
    runner = ModelRunner(
        forward,
        pool.layers,
        encoder=Encoder(model.encode_media, media, device),
        inputs=InputBuilder(config.block_tokens, device),
        sampler=Sampler(config.vocab_size, device),
    )
    pages = PrefixCache(PageAllocator(sizes.num_pages), enabled=arm.prefix_cache)
    limits = SchedulerLimits(
        max_batch_tokens=sizes.max_batch_tokens,
        max_sequences=sizes.max_sequences,
        max_encode_patches=1,
        max_mixed_tokens=sizes.max_mixed_tokens,
        prefill_first=arm.prefill_first,
    )
    mailbox = Mailbox()
    engine = Engine(
        EngineParts(
            Scheduler(limits, pages, media),
            pages,
            runner,
            media,
            WorkerMetrics(),
            runner if arm.overlap else None,
        ),
        EngineSettings(
            page_tokens=config.block_tokens,
            max_context_tokens=sizes.num_pages * config.block_tokens,
            eos_token_id=config.eos_token_id,
        ),
        deliver=mailbox.put,
        on_exit=lambda failure: None,
    )
    engine.start()
    try:
        yield engine, mailbox
    finally:
        engine.stop()
        engine.join(STOP_S)
        del engine, runner, pool, forward
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
