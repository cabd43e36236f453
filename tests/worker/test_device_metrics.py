"""What is counted where steps run shows among a worker's metrics, and only where it is counted."""

from __future__ import annotations

from prometheus_client import generate_latest

from m3stack.assemble import Surroundings, assemble
from m3stack.cache.media import MediaLedger
from m3stack.checkpoints import builtin_checkpoint
from m3stack.config import WorkerConfig
from m3stack.device_metrics import DeviceCounts
from m3stack.engine.sequence import Sequence
from m3stack.hardware import choose_hardware
from m3stack.models.minimax_m3.config import M3Config
from m3stack.telemetry import WorkerMetrics
from m3stack.types import Request
from tests.worker.engine.history_model import sampling


def shown(metrics: WorkerMetrics) -> dict[str, float]:
    lines = generate_latest(metrics.registry).decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in pairs}


def test_numbers_are_read_when_somebody_asks_and_absent_ones_are_left_out() -> None:
    metrics, reads = WorkerMetrics(), []

    def read() -> DeviceCounts:
        reads.append(len(reads))
        return DeviceCounts(
            recorded_steps=7 + len(reads),
            recordings=3,
            recorded_bytes=1 << 20,
            chosen_blocks=90,
            loaded_blocks=60,
            ranked_blocks=4000,
            rescored_blocks=20,
        )

    metrics.watch_device(read)
    assert not reads, "registering must not wait for the device"
    assert shown(metrics)["m3stack_worker_recorded_steps_total"] == 8
    page = shown(metrics)
    assert page["m3stack_worker_recorded_steps_total"] == 9
    assert page["m3stack_worker_recorded_step_bytes"] == 1 << 20
    assert page["m3stack_worker_step_recordings_total"] == 3
    assert page["m3stack_worker_prefill_union_overlap"] == 1.5
    assert page["m3stack_worker_two_stage_ranked_blocks_total"] == 4000
    assert page["m3stack_worker_two_stage_rescored_blocks_total"] == 20
    assert not any("tier" in name for name in page)


def test_nothing_loaded_is_no_overlap() -> None:
    assert DeviceCounts(chosen_blocks=0, loaded_blocks=0).union_overlap is None
    assert DeviceCounts(asked_parts=7, fetched_parts=2).hit_parts == 5
    assert DeviceCounts().hit_parts is None


def test_a_tiered_cache_shows_what_it_was_asked_for_and_fetched() -> None:
    metrics = WorkerMetrics()
    config = WorkerConfig(
        model_path=str(builtin_checkpoint("tiny")),
        device="cpu",
        num_pages=24,
        hot_pages=20,
        max_sequences=2,
        max_batch_tokens=128,
        chunk_growth_prefix_tokens=0,
    )
    model_config = M3Config.from_dir(config.model_path)
    around = Surroundings(MediaLedger(1 << 20), metrics, lambda done, total: None)
    made = assemble(config, model_config, choose_hardware(config), around)
    assert shown(metrics)["m3stack_worker_tier_hit_parts_total"] == 0
    request = Request("r", tuple(range(100)), sampling(max_tokens=4))
    runner, scheduler = made.parts.runner, made.parts.scheduler
    runner.begin(1, request, stop_ids=frozenset())
    scheduler.add(
        Sequence(1, request, page_tokens=128, stop_ids=frozenset(), max_context_tokens=200)
    )
    while scheduler.has_work:
        plan = scheduler.plan()
        scheduler.commit(plan, runner.execute(plan))
    made.constraints.close()
    page = shown(metrics)
    # four sparse layers, four groups: every row reads the one page, which is fetched once a group
    assert page["m3stack_worker_tier_missed_parts_total"] == 4 * 4
    assert page["m3stack_worker_tier_hit_parts_total"] == 103 * 4 * 4 - 4 * 4
    assert "m3stack_worker_recorded_steps_total" not in page
