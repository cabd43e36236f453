"""How an operation is timed: checked first, inputs rotated past L2, CUDA graph replays, medians.

A case hands over a check, one closure for each input set, its floor and its peers. An operation
that fails its check is never timed: its row says so and the command fails.
"""

from __future__ import annotations

import math
import statistics
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

Call = Callable[[], object]

# a set of inputs must have left the cache before it is read again
L2_ROTATIONS = 3
GRAPH_CALLS, GRAPH_US = 24, 10_000


class CheckError(Exception):
    """An operation disagrees with its reference: what was compared, the error and the limit."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this GPU reached in this very run: copy bandwidth and bf16 matrix rate."""

    copy_bytes_per_s: float
    matmul_flops_per_s: float
    device: str
    versions: str

    def floor_us(self, num_bytes: float, flops: float = 0.0) -> float:
        """Least time for this traffic and this arithmetic, in microseconds."""
        traffic_s = num_bytes / self.copy_bytes_per_s
        return max(traffic_s, flops / self.matmul_flops_per_s) * 1e6


@dataclass(frozen=True, slots=True)
class Timing:
    """Median and extremes over the replays, in microseconds for one operation."""

    median_us: float
    low_us: float
    high_us: float


@dataclass(frozen=True, slots=True)
class Prepared:
    """One case with its inputs made.

    Attributes:
        check: raises `CheckError` unless the operation agrees with its reference.
        calls: the operation on each input set; together they move more than the L2 holds.
        floor_us: least possible time from the run's own ceilings.
        peers: other ways to the same end, timed in the same run; `dense` fills `dense_us`.
        flops: arithmetic of one call, for a rate; 0 where the rate says nothing.
        overlap: measured agreement of neighbouring selections, where it decides the cost.
        notes: facts of the run worth keeping beside the figure.
        graph: whether calls can be captured; otherwise they are timed on the stream.
        timing: how calls and peers are timed instead, where neither of the two will do.
    """

    check: Callable[[], None]
    calls: Sequence[Call]
    floor_us: float
    peers: Mapping[str, Sequence[Call]] = field(default_factory=dict)
    flops: float = 0.0
    overlap: float | None = None
    notes: str = ""
    graph: bool = True
    timing: Callable[[Sequence[Call]], Timing] | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """A named row of the report; `prepare` allocates on the current device."""

    name: str
    shape: str
    prepare: Callable[[Ceilings], Prepared]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report; `us` is None where the check refused the operation."""

    name: str
    shape: str
    us: float | None
    low_us: float | None = None
    high_us: float | None = None
    floor_us: float | None = None
    dense_us: float | None = None
    overlap: float | None = None
    tflops: float | None = None
    peers_us: Mapping[str, float] = field(default_factory=dict)
    notes: str = ""
    error: str = ""


def measure_ceilings(*, copy_bytes: int = 4 << 30, matmul_width: int = 8192) -> Ceilings:
    """Copies and multiplies random data on the current GPU and keeps the medians."""
    source = torch.randint(0, 1 << 30, (copy_bytes // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    copied = time_stream([partial(target.copy_, source)], replays=10).median_us
    del source, target
    left = torch.randn(matmul_width, matmul_width, dtype=torch.bfloat16, device="cuda")
    right = torch.randn_like(left)
    multiplied = time_stream([partial(torch.matmul, left, right)], replays=10).median_us
    return Ceilings(
        copy_bytes_per_s=2 * copy_bytes / copied * 1e6,
        matmul_flops_per_s=2 * matmul_width**3 / multiplied * 1e6,
        device=torch.cuda.get_device_name(),
        versions=f"torch {torch.__version__}",
    )


def num_input_sets(bytes_per_call: float) -> int:
    """Input sets needed so that none is still in L2 when its turn comes again."""
    own = torch.cuda.get_device_properties(torch.cuda.current_device())
    l2_bytes = own.L2_cache_size
    return max(2, 1 + math.ceil(L2_ROTATIONS * l2_bytes / max(bytes_per_call, 1.0)))


def time_graph(calls: Sequence[Call], *, replays: int = 15) -> Timing:
    """Replays one graph that runs all calls in turn, over and over; times are for one call.

    Starting a graph costs microseconds, so it holds at least `GRAPH_CALLS` calls, or fewer that
    take `GRAPH_US` together.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    each_us = time_stream(calls, replays=1).median_us
    wanted = min(GRAPH_CALLS, math.ceil(GRAPH_US / each_us))
    calls = list(calls) * -(-wanted // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    timing = time_stream([graph.replay], replays=replays)
    return Timing(*(value / len(calls) for value in _fields(timing)))


def time_stream(calls: Sequence[Call], *, replays: int = 15) -> Timing:
    """Times one round over all calls between two events, after two rounds of warm-up."""
    samples = []
    for replay in range(replays + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for call in calls:
            call()
        stop.record()
        stop.synchronize()
        if replay >= 2:
            samples.append(start.elapsed_time(stop) * 1e3 / len(calls))
    return Timing(statistics.median(samples), min(samples), max(samples))


def run_case(case: Case, ceilings: Ceilings) -> Row:
    """Checks, then times, one case and its peers; a failed check yields a row without a time."""
    try:
        prepared = case.prepare(ceilings)
        prepared.check()
    except CheckError as failure:
        return Row(case.name, case.shape, None, error=f"refused, not timed: {failure}")
    # one broken case must not hide the figures of the others
    except Exception as failure:  # noqa: BLE001
        traceback.print_exc()
        return Row(case.name, case.shape, None, error=f"{type(failure).__name__}: {failure}")
    timed = prepared.timing or (time_graph if prepared.graph else time_stream)
    timing = timed(prepared.calls)
    peers = {name: timed(calls).median_us for name, calls in prepared.peers.items()}
    return Row(
        name=case.name,
        shape=case.shape,
        us=timing.median_us,
        low_us=timing.low_us,
        high_us=timing.high_us,
        floor_us=prepared.floor_us,
        dense_us=peers.pop("dense", None),
        overlap=prepared.overlap,
        tflops=prepared.flops / timing.median_us / 1e6 if prepared.flops else None,
        peers_us=peers,
        notes=prepared.notes,
    )


def require_close(actual: Tensor, expected: Tensor, *, limit: float, what: str) -> None:
    """Relative error in the Frobenius norm, in fp64; NaN never passes.

    Raises:
        CheckError: names the compared values, the error and the limit.
    """
    expected64 = expected.double()
    error = ((actual.double() - expected64).norm() / expected64.norm()).item()
    if not error <= limit:
        raise CheckError(f"{what}: relative error {error:.3g}, limit {limit:.3g}")


def require_equal(actual: Tensor, expected: Tensor, *, what: str) -> None:
    """Every element the same.

    Raises:
        CheckError: names the first element that differs.
    """
    if actual.shape != expected.shape:
        raise CheckError(f"{what}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}")
    wrong = (actual != expected).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise CheckError(
            f"{what}: {len(wrong)} elements differ, first at {at}: "
            f"{actual[at].item()}, not {expected[at].item()}"
        )


def _fields(timing: Timing) -> tuple[float, float, float]:
    return timing.median_us, timing.low_us, timing.high_us
