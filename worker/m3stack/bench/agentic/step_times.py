"""Where the time of each step goes: what the host does for it, and what it waits for the GPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from m3stack.batch import DeviceBatch, LayerCache
from m3stack.engine.pace import is_prompt
from m3stack.engine.plan import StepPlan, StepResult
from m3stack.engine.runner import Forward, Launched, ModelRunner
from m3stack.types import Request

# a wait shorter than that is none: the GPU had ended before the host asked
NO_WAIT_S = 50e-6
KINDS = ("decode", "mixed", "prompt")


@dataclass(slots=True)
class StepTime:
    """One step, by the host's clock and by events on the GPU's stream.

    Attributes:
        num_decoding, prompt_tokens: of the step.
        launched_at: when its launch began.
        launch_s: of that launch, of which `forward_s` in the model.
        sample_s: to queue the choice of tokens.
        wait_s: until its tokens were there.
        collected_at: when they were; 0 before.
        gives_tokens: whether it chooses any.
        first, last: in front of its first work on the GPU and behind its last.
    """

    num_decoding: int
    prompt_tokens: int
    launched_at: float
    launch_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    wait_s: float = 0.0
    collected_at: float = 0.0
    gives_tokens: bool = False
    first: torch.cuda.Event | None = None
    last: torch.cuda.Event | None = None

    @property
    def kind(self) -> str:
        """One of `KINDS`: next tokens alone, prompts beside them, prompts alone."""
        if not self.prompt_tokens:
            return "decode"
        return "mixed" if self.num_decoding else "prompt"


class TimedForward:
    """A forward that adds up what the host takes to queue it."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self.seconds = 0.0

    def __call__(self, batch: DeviceBatch, caches: LayerCache) -> Tensor:
        began_at = time.perf_counter()
        try:
            return self._forward(batch, caches)
        finally:
            self.seconds += time.perf_counter() - began_at


class TimedRunner:
    """A runner that notes the times of its steps.

    Args:
        inner: does the work.
        forward: its forward.
    """

    def __init__(self, inner: ModelRunner, forward: TimedForward) -> None:
        self._inner, self._timed_forward = inner, forward
        self._under_way: dict[int, StepTime] = {}
        self.times: list[StepTime] = []

    def begin(self, handle: int, request: Request, *, stop_ids: frozenset[int]) -> None:
        self._inner.begin(handle, request, stop_ids=stop_ids)

    def forget(self, handle: int) -> None:
        self._inner.forget(handle)

    def execute(self, plan: StepPlan) -> StepResult:
        step = self.launch(plan)
        self.sample(step)
        return self.collect(step)

    def launch(self, plan: StepPlan, after: Launched | None = None) -> Launched:
        prompts = [row for row in plan.rows if is_prompt(row)]
        found = StepTime(
            num_decoding=len(plan.rows) - len(prompts),
            prompt_tokens=sum(len(row.token_ids) for row in prompts),
            launched_at=time.perf_counter(),
            first=_mark(),
        )
        forward_s = self._timed_forward.seconds
        step = self._inner.launch(plan, after)
        found.launch_s = time.perf_counter() - found.launched_at
        found.forward_s = self._timed_forward.seconds - forward_s
        self._under_way[id(step)] = found
        self.times.append(found)
        return step

    def sample(self, step: Launched) -> None:
        found, began_at = self._under_way[id(step)], time.perf_counter()
        self._inner.sample(step)
        found.gives_tokens = step.draw is not None
        found.last = _mark()
        found.sample_s = time.perf_counter() - began_at

    def collect(self, step: Launched) -> StepResult:
        found, began_at = self._under_way.pop(id(step)), time.perf_counter()
        result = self._inner.collect(step)
        found.collected_at = time.perf_counter()
        found.wait_s = found.collected_at - began_at
        return result


def _mark() -> torch.cuda.Event | None:
    if not torch.cuda.is_available():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def summary(times: Sequence[StepTime]) -> dict[str, dict[str, float]]:
    """Means over the steps of each kind that occurred, in milliseconds; waits for the GPU.

    Args:
        times: one behind the other, all of them collected.

    Returns:
        By kind: `steps`; `tokens`, of prompts in one; `period_ms`, from the tokens of the step
        before to its own, of which `wait_ms` for the GPU, `launch_ms` and `forward_ms` for the
        *next* step, `sample_ms`, and `rest_ms` for plan, commit and delivery; `not_waited`, the
        share of steps that the GPU had ended before the host asked; on a GPU `gpu_ms`, from the
        later of its launch and the end of the step before to its end, and `idle_ms`, from there
        to its launch.
    """
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    ends = _ends_ms(times)
    for place in range(1, len(times) - 1):
        before, step, following = times[place - 1 : place + 2]
        period_s = step.collected_at - before.collected_at
        host_s = following.launch_s + step.sample_s + step.wait_s
        entry = {
            "tokens": float(step.prompt_tokens),
            "period_ms": period_s * 1e3,
            "wait_ms": step.wait_s * 1e3,
            "launch_ms": following.launch_s * 1e3,
            "forward_ms": following.forward_s * 1e3,
            "sample_ms": step.sample_s * 1e3,
            "rest_ms": max(0.0, period_s - host_s) * 1e3,
            "not_waited": float(step.wait_s < NO_WAIT_S),
        }
        if ends:
            (_, end_before), (begin, end) = ends[place - 1 : place + 1]
            entry |= {"gpu_ms": end - begin, "idle_ms": max(0.0, begin - end_before)}
        found[step.kind].append(entry)
    return {
        kind: {
            "steps": len(entries),
            **{name: fmean(entry[name] for entry in entries) for name in entries[0]},
        }
        for kind, entries in found.items()
        if entries
    }


def _ends_ms(times: Sequence[StepTime]) -> list[tuple[float, float]]:
    """When each step began and ended on the GPU; empty without one."""
    if not torch.cuda.is_available() or not times or times[0].first is None:
        return []
    torch.cuda.synchronize()
    origin = times[0].first
    found: list[tuple[float, float]] = []
    for step in times:
        assert step.first is not None
        assert step.last is not None
        found.append((origin.elapsed_time(step.first), origin.elapsed_time(step.last)))
    return found
