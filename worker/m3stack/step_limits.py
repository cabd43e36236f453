"""What steps may be and take under a worker's settings, before there is a model or a device."""

from __future__ import annotations

from m3stack.config import WorkerConfig
from m3stack.engine.budget import SchedulerLimits

CPU_BATCH_TOKENS, GPU_BATCH_TOKENS = 512, 8192
# beside decode, a step of that share of the tokens of a whole one
GPU_MIXED_SHARE = 4
GPU_GRAPH_BYTES = 2 << 30


def scheduler_limits(config: WorkerConfig, device_type: str) -> SchedulerLimits:
    """Bounds of a step.

    Args:
        device_type: `cpu` or `cuda`.
    """
    is_cpu = device_type == "cpu"
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


def overlaps_steps(config: WorkerConfig, device_type: str) -> bool:
    """Whether a step is queued before the one before it has ended."""
    if config.step_overlap == "auto":
        return device_type == "cuda"
    return config.step_overlap == "on"


def graph_bytes(config: WorkerConfig, device_type: str) -> int:
    """Memory that recorded decode steps may take on every GPU."""
    if device_type != "cuda":
        return 0
    return GPU_GRAPH_BYTES if config.decode_graph_bytes < 0 else config.decode_graph_bytes
