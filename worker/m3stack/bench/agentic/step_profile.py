"""What kernels take of the GPU's time in each kind of step, while conversations are replayed."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from m3stack.bench.agentic.shares_report import PARTS, part_of
from m3stack.bench.agentic.step_times import KINDS, StepTime
from m3stack.bench.agentic.worker import Running

# the one copy to the host of a step; with it a step's work on the GPU ends
LAST_OF_STEP = "Memcpy DtoH"
NAMED = 14
# of a replay, before the trace and in it
BEFORE_S, TRACED_S = 2.0, 1.5


class TimedOperations:
    """Host time of operations by name, while it is on; wraps the calls of a table."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self.is_on = False

    def begin(self) -> None:
        """From now on, from nothing."""
        self.seconds.clear()
        self.calls.clear()
        self.is_on = True

    def __call__(self, name: str, run: Callable[[], object]) -> object:
        if not self.is_on:
            return run()
        began_at = self._clock()
        try:
            return run()
        finally:
            self.seconds[name] += self._clock() - began_at
            self.calls[name] += 1

    def milliseconds(self) -> dict[str, dict[str, float]]:
        """By name: `calls`, and `ms` of all of them."""
        return {
            name: {"calls": self.calls[name], "ms": seconds * 1e3}
            for name, seconds in self.seconds.items()
        }


@dataclass(slots=True)
class Trace:
    """What a profiler has seen.

    Attributes:
        events: name, begin and duration of all that ran on the GPU, in nanoseconds.
        first_step, num_steps: that had been launched before it began and by its end.
    """

    events: list[tuple[str, int, int]] = field(default_factory=list[tuple[str, int, int]])
    first_step: int = 0
    num_steps: int = 0


@contextmanager
def profiled(running: Running, operations: TimedOperations) -> Iterator[dict[str, Any]]:
    """Fills what it gives at the end of its block.

    First the host's time by operation, in steps that are no recordings; then, under a profiler,
    which slows the host, the GPU's time in `kinds` (see `by_kind`).
    """
    found: dict[str, Any] = {}
    first = len(running.times)
    operations.begin()
    try:
        with _traced(running, operations) as trace:
            yield found
    finally:
        operations.is_on = False
    begun = [step for step in running.times[first : trace.first_step] if step.prompt_tokens]
    found["host_steps"] = len(begun)
    found["host_operations"] = operations.milliseconds()
    found["kinds"] = by_kind(trace, running.times)


@contextmanager
def _traced(running: Running, operations: TimedOperations) -> Iterator[Trace]:
    """Profiles a stretch of what runs in its block; the trace is there behind it.

    The profiler is begun and ended between two steps, on the thread that runs them.
    """
    trace = Trace()
    profiler: profile | None = None
    activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU

    def begin(_: object) -> None:
        nonlocal profiler
        operations.is_on = False
        trace.first_step = len(running.times)
        profiler = profile(activities=[activity])
        profiler.start()

    def end(_: object) -> None:
        if profiler is None or trace.num_steps:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        profiler.stop()
        trace.num_steps = len(running.times)

    timers = [
        threading.Timer(after_s, running.engine.between_steps, (action,))
        for after_s, action in ((BEFORE_S, begin), (BEFORE_S + TRACED_S, end))
    ]
    for timer in timers:
        timer.start()
    try:
        yield trace
    finally:
        for timer in timers:
            timer.cancel()
            timer.join()
        is_over = threading.Event()

        def last(hand: object) -> None:
            end(hand)
            is_over.set()

        running.engine.between_steps(last)
        is_over.wait()
        if profiler is None:
            trace.first_step = len(running.times)
        else:
            trace.events = _device_events(profiler)


def _device_events(profiler: profile) -> list[tuple[str, int, int]]:
    inner = profiler.profiler
    results = None if inner is None else inner.kineto_results
    if results is None:
        return []
    found = [
        (event.name(), event.start_ns(), event.duration_ns())
        for event in results.events()
        if event.device_type().name == "CUDA"
    ]
    return sorted(found, key=lambda event: event[1])


def by_kind(trace: Trace, times: Sequence[StepTime]) -> dict[str, Any]:
    """Milliseconds of the GPU in a step of each kind.

    Args:
        times: of all steps; the last one launched before the trace ended is the last in it.

    Returns:
        By kind: `steps`, `tokens` of prompts, `period_ms` from the end of the step before,
        `busy_ms` in which something ran, `kernels` in number, `parts_ms` by part of a step, and
        `named_us`, the kernels that took most.
    """
    groups: list[list[tuple[str, int, int]]] = [[]]
    for event in trace.events:
        groups[-1].append(event)
        if event[0].startswith(LAST_OF_STEP):
            groups.append([])
    # the first may have begun before the trace, the last has not ended in it
    groups = groups[:-1]
    telling = [place for place, step in enumerate(times[: trace.num_steps]) if step.gives_tokens]
    found: dict[str, list[tuple[StepTime, float, list[tuple[str, int, int]]]]] = {
        kind: [] for kind in KINDS
    }
    for back in range(1, min(len(groups), len(telling))):
        place, own, before = telling[-back], groups[-back], groups[-back - 1]
        if telling[-back - 1] != place - 1:
            # a step that chose nothing hides in this one
            continue
        period_ns = _end(own) - _end(before)
        found[times[place].kind].append((times[place], period_ns / 1e6, own))
    return {kind: _of_kind(steps) for kind, steps in found.items() if steps}


def _of_kind(steps: list[tuple[StepTime, float, list[tuple[str, int, int]]]]) -> dict[str, Any]:
    count = len(steps)
    named: Counter[str] = Counter()
    parts: Counter[str] = Counter({part: 0 for part in PARTS})
    for _, _, events in steps:
        for name, _, duration in events:
            named[name] += duration
            parts[part_of(name)] += duration
    return {
        "steps": count,
        "tokens": fmean(step.prompt_tokens for step, _, _ in steps),
        "period_ms": fmean(period for _, period, _ in steps),
        "busy_ms": sum(named.values()) / count / 1e6,
        "kernels": fmean(len(events) for _, _, events in steps),
        "parts_ms": {part: ns / count / 1e6 for part, ns in parts.items()},
        "named_us": {name: ns / count / 1e3 for name, ns in named.most_common(NAMED)},
    }


def _end(events: list[tuple[str, int, int]]) -> int:
    return events[-1][1] + events[-1][2]
