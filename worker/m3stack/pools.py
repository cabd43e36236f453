"""How much memory pages get, on the device and on the host, and how long a context that allows."""

from __future__ import annotations

import logging
import os

import torch

from m3stack.cache.host_pool import HostPool, slots_within
from m3stack.cache.pool import KvPool, PageShape
from m3stack.cache.tiered import TieredPool, hot_pages_at_least
from m3stack.config import WorkerConfig
from m3stack.engine.budget import SchedulerLimits
from m3stack.errors import StartupError
from m3stack.hardware import Hardware
from m3stack.models.minimax_m3.config import M3Config

_log = logging.getLogger(__name__)

# a CPU shares its memory with everything else on the machine
CPU_POOL_BYTES = 1 << 30
GPU_HOST_BYTES = 8 << 30


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


def context_within(config: WorkerConfig, model: M3Config, pool: KvPool) -> int:
    """The context limit, which cannot be more than the pool holds."""
    wanted = context_limit(config, model)
    held = pool.num_pages * model.block_tokens
    if held < wanted:
        _log.warning(
            "context_reduced max_context_tokens=%d supported=%d reason=cache_pages", held, wanted
        )
    return min(wanted, held)


def build_host_pool(config: WorkerConfig, pool: KvPool, device: torch.device) -> HostPool | None:
    """Host memory for pages, if any is wanted and if restoring a page is ever worth it.

    Raises:
        StartupError: more is asked for than is free.
    """
    if config.hot_pages:
        # pages are in host memory already
        return None
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


def page_shape(
    config: WorkerConfig, model: M3Config, hardware: Hardware, rank: int = 0
) -> PageShape:
    """What a page holds on a rank."""
    return PageShape(
        sparse_layers=model.sparse_layers,
        num_kv_heads=model.per_rank(config.tensor_parallel).num_kv_heads,
        head_dim=model.head_dim,
        index_dim=model.index_dim,
        page_tokens=model.block_tokens,
        dtype=hardware.dtype,
        index_rank=rank if config.shard_index_keys else 0,
        index_ranks=config.tensor_parallel if config.shard_index_keys else 1,
        index_copy=config.index_copy == "int8",
        kv_dtype=torch.float8_e4m3fn if config.kv_dtype == "fp8" else None,
    )


def build_pool(
    config: WorkerConfig, model: M3Config, hardware: Hardware, *, reserved_bytes: int = 0
) -> KvPool:
    """The pages of this rank.

    Args:
        reserved_bytes: of what is free now, what steps need.

    Raises:
        StartupError: there is no room for one page, or not for those that were asked for.
    """
    shape = page_shape(config, model, hardware)
    free = max(0, free_bytes(hardware.device) - reserved_bytes)
    if config.hot_pages:
        return _build_tiered_pool(config, model, shape, hardware.device, free_bytes=free)
    num_pages = config.num_pages
    if not num_pages:
        num_bytes = int(free * config.kv_memory_fraction)
        if hardware.device.type == "cpu":
            # the ranks share it
            num_bytes //= config.tensor_parallel
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


def _build_tiered_pool(
    config: WorkerConfig,
    model: M3Config,
    shape: PageShape,
    device: torch.device,
    *,
    free_bytes: int,
) -> TieredPool:
    num_hot = config.hot_pages
    kv_values = 2 * shape.num_kv_heads * shape.head_dim * shape.page_tokens
    cold_bytes = kv_values * shape.layer_dtype(True).itemsize * sum(shape.sparse_layers)
    num_pages = config.num_pages
    if not num_pages:
        on_device = int(free_bytes * config.kv_memory_fraction) - (num_hot + 1) * cold_bytes
        on_host = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        if device.type == "cpu":
            on_host = min(on_host, CPU_POOL_BYTES)
        useful = config.max_sequences * -(-context_limit(config, model) // model.block_tokens)
        num_pages = min(
            on_device // (shape.bytes_per_page - cold_bytes), on_host // cold_bytes, useful
        )
    if num_hot > num_pages:
        raise StartupError(
            f"hot_pages is {num_hot}, but memory allows {num_pages} pages in all; lower it"
        )
    try:
        return TieredPool(shape, num_pages, device, num_hot=num_hot)
    except RuntimeError as error:
        raise StartupError(
            f"{num_hot} hot cache pages and {num_pages} in host memory do not fit: {error}; "
            "lower hot_pages or num_pages"
        ) from error


def check_hot_pages(
    config: WorkerConfig, model: M3Config, pool: KvPool, limits: SchedulerLimits
) -> None:
    """Raises StartupError unless the largest step can be computed with the hot pages."""
    if not isinstance(pool, TieredPool):
        return
    least = hot_pages_at_least(
        pool.shape,
        num_blocks=model.topk_blocks,
        step_tokens=limits.most_tokens,
        rows=limits.max_sequences,
    )
    if config.hot_pages < least:
        raise StartupError(
            f"hot_pages is {config.hot_pages}, steps of {limits.max_batch_tokens} tokens and "
            f"{limits.max_sequences} sequences need {least}; raise it, or lower max_batch_tokens"
        )


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(available, CPU_POOL_BYTES)
