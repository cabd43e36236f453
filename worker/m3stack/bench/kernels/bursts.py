"""Timing in short bursts behind a pause, before the power cap lowers the clocks.

Under full load for more than about 15 ms this GPU drops from 1.98 to about 1.5 GHz, whatever runs.
The ceilings of a run are measured in such a burst; what is held against them must be too.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence

import torch

from m3stack.bench.kernels.harness import Call, Timing

BURSTS = 8
BURST_MS = 12.0
PAUSE_S = 0.15
# the first call after a pause raises the clocks
WARM_CALLS = 2


def time_bursts(calls: Sequence[Call]) -> Timing:
    """Median over single calls, in turn over the input sets, in bursts of about 12 ms."""
    turn = itertools.cycle(calls)
    samples = _burst(turn, 1)
    each = max(1, round(BURST_MS * 1e3 / samples[0]) - WARM_CALLS)
    samples = [sample for _ in range(BURSTS) for sample in _burst(turn, each)]
    return Timing(statistics.median(samples), min(samples), max(samples))


def _burst(turn: itertools.cycle[Call], count: int) -> list[float]:
    """Microseconds of each of `count` calls behind the warm ones."""
    torch.cuda.synchronize()
    time.sleep(PAUSE_S)
    for _ in range(WARM_CALLS):
        next(turn)()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        next(turn)()
        mark.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) * 1e3 for start, stop in itertools.pairwise(marks)]
