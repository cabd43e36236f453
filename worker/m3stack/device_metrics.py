"""What is counted where steps run: its metrics, read when somebody asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class DeviceCounts:
    """What is counted since the start; None where there is nothing to count.

    Attributes:
        recorded_steps, recordings, recorded_bytes: replays of recorded steps, how many steps were
            recorded, and the device memory that recordings hold.
        asked_parts, fetched_parts: of pages with a home in host memory, those that attention
            asked for, and those of them that had to come from there.
        chosen_blocks, loaded_blocks: in prompts, blocks that tiles of rows chose, a row; and blocks
            loaded for a tile, each once however many of its rows chose it.
        ranked_blocks, rescored_blocks: in long decode steps, blocks that the 1-byte index keys
            ranked, a row and group; and those of them whose bf16 keys had to be read.
    """

    recorded_steps: int | None = None
    recordings: int | None = None
    recorded_bytes: int | None = None
    asked_parts: int | None = None
    fetched_parts: int | None = None
    chosen_blocks: int | None = None
    loaded_blocks: int | None = None
    ranked_blocks: int | None = None
    rescored_blocks: int | None = None

    @property
    def hit_parts(self) -> int | None:
        """Parts that were asked for and on the device already."""
        if self.asked_parts is None or self.fetched_parts is None:
            return None
        return self.asked_parts - self.fetched_parts

    @property
    def union_overlap(self) -> float | None:
        """Rows that a loaded block served, on average; None before any was loaded."""
        if self.chosen_blocks is None or not self.loaded_blocks:
            return None
        return self.chosen_blocks / self.loaded_blocks


class DeviceNumbers(Collector):
    """Shows device counters. A read waits for the steps under way, on the thread that asks.

    Every name is described at any time; it has a value where there is something to count.
    """

    def __init__(self, read: Callable[[], DeviceCounts]) -> None:
        self._read = read

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not wait for the device."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        counts = self._read()
        yield _counter(
            "recorded_steps", "Decode steps replayed from recordings.", counts.recorded_steps
        )
        yield _counter(
            "step_recordings", "Kinds of decode step that were recorded.", counts.recordings
        )
        yield _gauge(
            "recorded_step_bytes", "Device memory of recorded steps.", counts.recorded_bytes
        )
        yield _counter(
            "tier_hit_parts",
            "Parts of pages that attention asked a tiered cache for and that were on the device.",
            counts.hit_parts,
        )
        yield _counter(
            "tier_missed_parts",
            "Parts of pages that attention asked a tiered cache for and that came from the host.",
            counts.fetched_parts,
        )
        yield _counter(
            "prefill_chosen_blocks",
            "Blocks that tiles of prompt rows chose, each row's counted.",
            counts.chosen_blocks,
        )
        yield _counter(
            "prefill_loaded_blocks",
            "Blocks loaded for tiles of prompt rows, once for all their rows.",
            counts.loaded_blocks,
        )
        yield _gauge(
            "prefill_union_overlap",
            "Rows of a prompt that a loaded block served on average: chosen over loaded blocks.",
            counts.union_overlap,
        )
        yield _counter(
            "two_stage_ranked_blocks",
            "Blocks that 1-byte index keys ranked in long decode steps.",
            counts.ranked_blocks,
        )
        yield _counter(
            "two_stage_rescored_blocks",
            "Blocks of those whose bf16 index keys had to be read as well.",
            counts.rescored_blocks,
        )


def _counter(name: str, text: str, value: float | None) -> Metric:
    return CounterMetricFamily(f"m3stack_worker_{name}", text, value=value)


def _gauge(name: str, text: str, value: float | None) -> Metric:
    return GaugeMetricFamily(f"m3stack_worker_{name}", text, value=value)
