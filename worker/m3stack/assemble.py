"""Builds what a worker runs from its configuration: model, cache, engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from m3stack.cache.host import HostTier
from m3stack.cache.host_pool import HostPool, slots_within
from m3stack.cache.media import MediaLedger
from m3stack.cache.pages import PageAllocator
from m3stack.cache.pool import KvPool, PageShape
from m3stack.cache.prefix import PrefixCache
from m3stack.config import WorkerConfig
from m3stack.engine.budget import SchedulerLimits
from m3stack.engine.encoder import Encoder
from m3stack.engine.engine import EngineParts, EngineSettings
from m3stack.engine.inputs import InputBuilder
from m3stack.engine.runner import ModelRunner
from m3stack.engine.sampler import Sampler
from m3stack.engine.scheduler import Scheduler
from m3stack.errors import StartupError
from m3stack.kernels.build import KernelUnavailableError
from m3stack.kernels.interface import Kernels
from m3stack.kernels.select import build_kernels
from m3stack.kernels.shape import KernelShape
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.model import M3Model
from m3stack.models.minimax_m3.weights import load_model
from m3stack.rpc.checks import ModelLimits
from m3stack.telemetry import WorkerMetrics

_log = logging.getLogger(__name__)

# a CPU shares its memory with everything else on the machine
CPU_POOL_BYTES = 1 << 30
CPU_BATCH_TOKENS, GPU_BATCH_TOKENS = 512, 8192
# beside decode, a step of that share of the tokens of a whole one
GPU_MIXED_SHARE = 4
GPU_HOST_BYTES = 8 << 30
# below that many parameters, handing work to threads costs more than it saves
SMALL_MODEL_VALUES = 50_000_000

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Hardware:
    """Where the model runs, and in what."""

    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What exists before the model does.

    Attributes:
        progress: called with bytes loaded and bytes in all; may raise to end the loading.
    """

    media: MediaLedger
    metrics: WorkerMetrics
    progress: Progress


@dataclass(frozen=True, slots=True)
class Assembly:
    """A loaded worker, ready for an engine thread.

    Attributes:
        limits: what requests must agree with.
        page_tokens: tokens of a page.
    """

    parts: EngineParts
    settings: EngineSettings
    limits: ModelLimits


def choose_hardware(config: WorkerConfig) -> Hardware:
    """Device and dtype the configuration asks for.

    Raises:
        StartupError: the machine does not have it.
    """
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise StartupError(f"device is {config.device}, but torch sees no CUDA GPU here")
        if (device.index or 0) >= torch.cuda.device_count():
            raise StartupError(
                f"device is {config.device}, but there are only {torch.cuda.device_count()} GPUs"
            )
    if config.tensor_parallel != 1:
        raise StartupError(
            f"tensor_parallel is {config.tensor_parallel}, but this version runs on one device; "
            "set it to 1"
        )
    by_device = torch.float32 if device.type == "cpu" else torch.bfloat16
    dtypes = {"auto": by_device, "float32": torch.float32, "bfloat16": torch.bfloat16}
    return Hardware(device, dtypes[config.dtype])


def context_limit(config: WorkerConfig, model: M3Config) -> int:
    """Most tokens of prompt and output together, as far as settings and model go.

    Raises:
        StartupError: the setting is more than the model supports.
    """
    supported = model.max_position_embeddings
    if config.max_context_tokens > supported:
        raise StartupError(
            f"max_context_tokens is {config.max_context_tokens}, the model supports {supported}"
        )
    return config.max_context_tokens or supported


def assemble(
    config: WorkerConfig, model_config: M3Config, hardware: Hardware, around: Surroundings
) -> Assembly:
    """Loads the model and builds everything around it; takes as long as loading does.

    Raises:
        StartupError: checkpoint, kernels or memory do not allow it.
    """
    kernels = _kernels(config.kernels, model_config, hardware)
    model = load_model(
        Path(config.model_path),
        config=model_config,
        kernels=kernels,
        device=hardware.device,
        dtype=hardware.dtype,
        progress=around.progress,
    )
    if hardware.device.type == "cpu":
        _set_threads(config, model)
    pool = _build_pool(config, model_config, hardware)
    context = _context_of(config, model_config, pool)
    _log.info(
        "assembled device=%s dtype=%s kernels=%s pages=%d pool_bytes=%d max_context_tokens=%d",
        hardware.device,
        hardware.dtype,
        kernels.name,
        pool.num_pages,
        pool.num_bytes,
        context,
    )
    host_pool = _build_host_pool(config, pool, hardware.device)
    host = host_pool and HostTier(
        host_pool.num_slots, restore_cost_tokens=config.host_restore_cost_tokens
    )
    pages = PrefixCache(PageAllocator(pool.num_pages), enabled=config.prefix_cache, host=host)
    parts = EngineParts(
        scheduler=Scheduler(_scheduler_limits(config, hardware.device), pages, around.media),
        pages=pages,
        runner=_runner(model, pool, host_pool, around.media),
        media=around.media,
        metrics=around.metrics,
    )
    settings = EngineSettings(
        page_tokens=model_config.block_tokens,
        max_context_tokens=context,
        eos_token_id=model_config.eos_token_id,
        segment_patches=model_config.vision.segment_max_patches,
        page_bytes=pool.shape.bytes_per_page,
    )
    return Assembly(parts, settings, model_limits(model_config, context, hardware.dtype))


def model_limits(model: M3Config, max_context_tokens: int, dtype: torch.dtype) -> ModelLimits:
    """What a request for this model must agree with."""
    return ModelLimits(
        fingerprint=model.facts().fingerprint(),
        vocab_size=model.vocab_size,
        max_context_tokens=max_context_tokens,
        eos_token_id=model.eos_token_id,
        image_token_id=model.image_token_id,
        video_token_id=model.video_token_id,
        channels=model.vision.num_channels,
        patch_size=model.vision.patch_size,
        temporal_patch_size=model.vision.temporal_patch_size,
        merge_size=model.vision.merge_size,
        feature_bytes_per_token=model.hidden_size * dtype.itemsize,
    )


def _context_of(config: WorkerConfig, model: M3Config, pool: KvPool) -> int:
    """The context limit, which cannot be more than the pool holds."""
    wanted = context_limit(config, model)
    held = pool.num_pages * model.block_tokens
    if held < wanted:
        _log.warning(
            "context_reduced max_context_tokens=%d supported=%d reason=cache_pages", held, wanted
        )
    return min(wanted, held)


def _runner(
    model: M3Model, pool: KvPool, host_pool: HostPool | None, media: MediaLedger
) -> ModelRunner:
    device = pool.layers[0].k_PGBD.device
    segment_patches = model.config.vision.segment_max_patches
    return ModelRunner(
        model.forward,
        pool.layers,
        encoder=Encoder(model.encode_media, media, device, segment_patches=segment_patches),
        inputs=InputBuilder(model.config.block_tokens, device),
        sampler=Sampler(model.config.vocab_size, device),
        copy_page=host_pool.copy if host_pool is not None else None,
    )


def kernel_shape(model: M3Config, dtype: torch.dtype) -> KernelShape:
    """What the choice of kernels must know of a model held in `dtype`."""
    return KernelShape(
        dtype=dtype,
        heads=model.num_heads,
        groups=model.num_kv_heads,
        head_dim=model.head_dim,
        rotary_dim=model.rotary_dim,
        page_tokens=model.block_tokens,
        num_blocks=model.topk_blocks,
        num_local_blocks=model.num_local_blocks,
        vision_heads=model.vision.num_heads,
        vision_head_dim=model.vision.hidden_size // model.vision.num_heads,
    )


def _kernels(name: str, model: M3Config, hardware: Hardware) -> Kernels:
    shape = kernel_shape(model, hardware.dtype)
    try:
        return build_kernels(name, shape=shape, device=hardware.device)
    except KernelUnavailableError as error:
        raise StartupError(str(error)) from error


def _set_threads(config: WorkerConfig, model: M3Model) -> None:
    num_values = sum(parameter.numel() for parameter in model.parameters())
    automatic = 1 if num_values < SMALL_MODEL_VALUES else len(os.sched_getaffinity(0))
    torch.set_num_threads(config.cpu_threads or automatic)


def _scheduler_limits(config: WorkerConfig, device: torch.device) -> SchedulerLimits:
    is_cpu = device.type == "cpu"
    automatic = CPU_BATCH_TOKENS if is_cpu else GPU_BATCH_TOKENS
    batch = config.max_batch_tokens or max(automatic, 2 * config.max_sequences)
    mixed = batch if is_cpu else max(batch // GPU_MIXED_SHARE, 2 * config.max_sequences)
    return SchedulerLimits(
        max_batch_tokens=batch,
        max_sequences=config.max_sequences,
        max_encode_patches=config.max_encode_patches,
        max_mixed_tokens=config.max_mixed_tokens or mixed,
        growth_prefix_tokens=config.chunk_growth_prefix_tokens,
        max_running_per_tenant=config.max_sequences_per_tenant,
    )


def _build_host_pool(config: WorkerConfig, pool: KvPool, device: torch.device) -> HostPool | None:
    """Host memory for pages, if any is wanted and if restoring a page is ever worth it."""
    num_bytes = config.host_cache_bytes
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes < 0:
        num_bytes = 0 if device.type == "cpu" else min(GPU_HOST_BYTES, free // 4)
    num_slots = slots_within(num_bytes, pool.shape)
    if num_bytes > free:
        raise StartupError(
            f"host_cache_bytes is {num_bytes}, only {free} bytes of host memory are free; lower it"
        )
    if num_slots == 0 or config.host_restore_cost_tokens >= pool.shape.page_tokens:
        return None
    return HostPool(pool, num_slots)


def _build_pool(config: WorkerConfig, model: M3Config, hardware: Hardware) -> KvPool:
    shape = PageShape(
        sparse_layers=model.sparse_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        index_dim=model.index_dim,
        page_tokens=model.block_tokens,
        dtype=hardware.dtype,
    )
    num_pages = config.num_pages
    if not num_pages:
        num_bytes = int(_free_bytes(hardware.device) * config.kv_memory_fraction)
        # more than every request at full length could ever use is of no use
        useful = config.max_sequences * -(-context_limit(config, model) // model.block_tokens)
        num_pages = min(num_bytes // shape.bytes_per_page, useful)
        if num_pages < 1:
            raise StartupError(
                f"a cache page takes {shape.bytes_per_page} bytes, only {num_bytes} are free; "
                "free memory or raise kv_memory_fraction"
            )
    try:
        return KvPool(shape, num_pages, hardware.device)
    except RuntimeError as error:
        raise StartupError(
            f"{num_pages} cache pages of {shape.bytes_per_page} bytes do not fit: {error}; "
            "lower num_pages or kv_memory_fraction"
        ) from error


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(available, CPU_POOL_BYTES)
