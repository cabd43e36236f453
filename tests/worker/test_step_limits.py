"""What steps may be and take, as settings say it."""

from __future__ import annotations

import pytest

from m3stack.config import WorkerConfig
from m3stack.step_limits import GPU_GRAPH_BYTES, graph_bytes, overlaps_steps, scheduler_limits


@pytest.mark.parametrize(
    ("given", "ranks", "device", "is_ahead"),
    [
        ("on", 2, "cpu", True),
        ("off", 1, "cuda", False),
        ("auto", 1, "cuda", True),
        ("auto", 2, "cuda", True),
        ("auto", 1, "cpu", False),
    ],
)
def test_steps_are_queued_ahead_on_demand_and_by_gpus(
    given: str, ranks: int, device: str, is_ahead: bool
) -> None:
    config = WorkerConfig(step_overlap=given, tensor_parallel=ranks)
    assert overlaps_steps(config, device) is is_ahead


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize(
    ("given", "device", "num_bytes"),
    [(-1, "cuda", GPU_GRAPH_BYTES), (7, "cuda", 7), (0, "cuda", 0), (-1, "cpu", 0), (7, "cpu", 0)],
)
def test_every_gpu_keeps_room_for_recorded_steps(
    given: int, device: str, num_bytes: int, ranks: int
) -> None:
    config = WorkerConfig(decode_graph_bytes=given, tensor_parallel=ranks)
    assert graph_bytes(config, device) == num_bytes


@pytest.mark.parametrize(
    ("context", "growth", "most"),
    [
        (1 << 20, 131_072, 16_384),
        (131_073, 131_072, 16_384),
        # no prompt has so much behind it that its steps grow
        (131_072, 131_072, 8192),
        (1 << 20, 0, 8192),
        (1, 131_072, 8192),
    ],
)
def test_the_largest_step_is_a_grown_one_where_contexts_are_long(
    context: int, growth: int, most: int
) -> None:
    limits = scheduler_limits(WorkerConfig(chunk_growth_prefix_tokens=growth), "cuda")
    assert limits.most_tokens_within(context) == most
    lengths = (0, 1, context // 2, context - 1)
    assert most == max(limits.step_tokens(num_decoding=0, prefix_tokens=n) for n in lengths)
