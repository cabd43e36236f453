"""How steps run on a GPU: recorded, queued ahead, and with how much memory beside the pages."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from m3stack.cache.pool import KvPool, PageShape
from m3stack.cache.tiered import TieredPages
from m3stack.config import WorkerConfig
from m3stack.device_metrics import DeviceCounts
from m3stack.dry_run import run_largest_step
from m3stack.engine.budget import SchedulerLimits
from m3stack.engine.graphs import Agree, CudaRecorder, DecodeGraphs
from m3stack.engine.pace import Pace, PaceLimits
from m3stack.engine.runner import Forward
from m3stack.errors import LoadingStoppedError, StartupError
from m3stack.first_steps import Bounds, run_first_steps, sizes
from m3stack.hardware import Hardware
from m3stack.models.minimax_m3.model import M3Model
from m3stack.parallel import ALONE, Mesh
from m3stack.pools import context_limit, free_bytes, page_shape
from m3stack.step_limits import graph_bytes

if TYPE_CHECKING:
    from m3stack.kernels.msa.with_cuda import CudaMsa

_log = logging.getLogger(__name__)

GPU_SLOWDOWN = 2.1
GPU_FIRST_STEPS_S = 120.0


def pace_of(config: WorkerConfig, device: torch.device) -> Pace | None:
    """What bounds prompts beside decode by time, if anything does."""
    slowdown = config.mixed_step_slowdown
    if slowdown < 0:
        slowdown = GPU_SLOWDOWN if device.type == "cuda" else 0.0
    return Pace(PaceLimits(slowdown)) if slowdown else None


def device_counts(model: M3Model, pool: KvPool, forward: Forward) -> Callable[[], DeviceCounts]:
    """Reads what is counted where steps run; a call waits for the device where there is one."""
    graphs = forward if isinstance(forward, DecodeGraphs) else None
    tiers = [layer.tier for layer in pool.layers if isinstance(layer, TieredPages) and layer.tier]
    msa = _counting_msa(model) if model.embedding.device.type == "cuda" else None
    # steps that no request had have been counted by now
    before = (msa.prefill.overlap(), msa.rescored()) if msa is not None else None

    def read() -> DeviceCounts:
        parts = [tier.counts() for tier in tiers]
        chosen = loaded = ranked = rescored = None
        if msa is not None and before is not None:
            overlap, stages = msa.prefill.overlap(), msa.rescored()
            chosen = overlap.chosen_blocks - before[0].chosen_blocks
            loaded = overlap.union_blocks - before[0].union_blocks
            ranked = stages.ranked - before[1].ranked
            rescored = stages.blocks - before[1].blocks
        return DeviceCounts(
            recorded_steps=None if graphs is None else graphs.num_replays,
            recordings=None if graphs is None else graphs.num_recordings,
            recorded_bytes=None if graphs is None else graphs.num_bytes,
            asked_parts=sum(asked for asked, _ in parts) if parts else None,
            fetched_parts=sum(fetched for _, fetched in parts) if parts else None,
            chosen_blocks=chosen,
            loaded_blocks=loaded,
            ranked_blocks=ranked,
            rescored_blocks=rescored,
        )

    return read


def _counting_msa(model: M3Model) -> CudaMsa | None:
    """The attention that counts what its runs share, if the model's is one."""
    # needs Triton and a second to import: only for GPUs
    from m3stack.kernels.msa.with_cuda import CudaMsa

    # operations are methods of whoever counts
    msa = getattr(model.kernels.choose_blocks, "__self__", None)
    return msa if isinstance(msa, CudaMsa) else None


def bytes_of_steps(
    config: WorkerConfig, model: M3Model, limits: SchedulerLimits, *, mesh: Mesh = ALONE
) -> int:
    """GPU memory that must stay free of pages: the largest step's, and that of recorded steps.

    Args:
        mesh: all ranks; each of them calls this, and runs the same step.

    Raises:
        StartupError: the largest step does not fit at all.
    """
    device = model.embedding.device
    if device.type != "cuda" or config.num_pages:
        return 0
    context = context_limit(config, model.config)
    num_tokens = limits.largest_step_tokens(context)
    shape = page_shape(config, model.config, Hardware(device, model.embedding.dtype), mesh.rank)
    try:
        step = run_largest_step(
            model,
            shape,
            num_tokens=num_tokens,
            context_tokens=context,
            num_patches=config.max_encode_patches,
        )
    except torch.OutOfMemoryError as error:
        raise StartupError(
            f"a step of {num_tokens} tokens in contexts of {context} does not fit beside the "
            f"weights: {error}; lower max_batch_tokens or max_context_tokens"
        ) from error
    recorded = graph_bytes(config, device.type)
    return step + recorded + _copies_of_many(shape, context)


def bytes_scarcest(
    config: WorkerConfig,
    model: M3Model,
    limits: SchedulerLimits,
    *,
    mesh: Mesh,
    least: Callable[[int], int],
) -> int:
    """As `bytes_of_steps`, such that no rank has less left than this one.

    Args:
        mesh: all ranks; each of them calls this.
        least: gives every rank the smallest of their numbers.
    """
    device = model.embedding.device
    own = bytes_of_steps(config, model, limits, mesh=mesh)
    free = free_bytes(device)
    return free - least(free - own)


def _copies_of_many(shape: PageShape, context_tokens: int) -> int:
    """Bytes by which many short sequences may widen more of their e4m3 pages than one long one."""
    if shape.kv_dtype is None:
        return 0
    # as above
    from m3stack.kernels.msa.prefill.widened_pages import MOST_WIDENED_PAGES

    pages = max(0, MOST_WIDENED_PAGES - -(-context_tokens // shape.page_tokens))
    row_bytes = 2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
    return pages * shape.page_tokens * row_bytes


def run_ahead(
    config: WorkerConfig,
    model: M3Model,
    limits: SchedulerLimits,
    *,
    mesh: Mesh = ALONE,
    agree: Callable[[bool], bool] = lambda goes_on: goes_on,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Has everything compiled that steps need, where that happens at first use.

    Args:
        mesh: all ranks; each of them calls this, and runs the same steps.
        agree, check: see `first_steps.Bounds`.

    Raises:
        Exception: a step failed on one of several ranks, which are out of step from then on.
    """
    device = model.embedding.device
    budget_s = config.first_steps_s
    if budget_s < 0:
        budget_s = GPU_FIRST_STEPS_S if device.type == "cuda" else 0.0
    if not budget_s:
        return
    context = context_limit(config, model.config)
    wanted = sizes(
        max_tokens=limits.most_tokens_within(context),
        max_mixed_tokens=limits.max_mixed_tokens,
        max_sequences=limits.max_sequences,
        context_tokens=context,
    )
    shape = page_shape(config, model.config, Hardware(device, model.embedding.dtype), mesh.rank)
    bounds = Bounds(budget_s, check, agree)
    try:
        run_first_steps(model, shape, list(wanted), bounds)
    except torch.OutOfMemoryError as error:
        if mesh.size > 1:
            raise
        # the largest step was sized for; a mixture of sizes that does not fit is none of it
        _log.warning("first_steps_ended reason=%s", error)
    except (torch.AcceleratorError, LoadingStoppedError):
        raise
    except Exception:
        if mesh.size > 1:
            raise
        _log.exception("first_steps_failed")
    finally:
        # behind a failure, whose traceback has held what the step had until here
        gc.collect()
        torch.cuda.empty_cache()


def forward_of(
    config: WorkerConfig, model: M3Model, pool: KvPool, *, agree: Agree | None = None
) -> Forward:
    """The model's forward, its decode steps recorded where that is possible and wanted.

    Args:
        agree: of several ranks, each of which calls this; see `DecodeGraphs`.
    """
    device = model.embedding.device
    budget = graph_bytes(config, device.type)
    if not budget:
        return model.forward
    return DecodeGraphs(
        model.forward,
        pool.layers,
        record=CudaRecorder(device),
        page_tokens=model.config.block_tokens,
        max_sequences=config.max_sequences,
        budget_bytes=budget,
        agree=agree,
    )
