"""Runs steps: one after the other, or with the next one queued before this one has ended.

Planned ahead, a turn queues step n+1 behind step n, then waits for the tokens of n and tells them
while the device computes n+1. What n+1 takes for granted (that nothing ends) may turn out wrong:
rows of requests that ended are computed for nothing, and nobody sees them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from m3stack.engine.observer import Observer, StepTimes
from m3stack.engine.plan import FatalStepError, StepPlan, StepResult
from m3stack.engine.runner import AheadRunner, Launched, Runner
from m3stack.engine.scheduler import Scheduler
from m3stack.telemetry import WorkerMetrics
from m3stack.types import Event, MediaSettled

_log = logging.getLogger(__name__)

Events = Sequence[tuple[int, Event]]


@dataclass(frozen=True, slots=True)
class StepSettings:
    """
    Attributes:
        max_failed_steps: steps that may fail in a row before the engine gives up.
        clock: seconds, monotonic.
    """

    max_failed_steps: int
    clock: Callable[[], float]


class StepSink(Protocol):
    """Whoever is told what steps bring about."""

    def started(self, events: Events) -> None:
        """Requests have left the queue."""
        ...

    def told(self, events: Events) -> None:
        """What a step gave its requests."""
        ...

    def changed(self) -> None:
        """Queue, running set or pages are not what they were."""
        ...

    def waiting(self) -> AbstractContextManager[None]:
        """While the device computes: requests may end meanwhile."""
        ...


@dataclass(slots=True)
class _UnderWay:
    """A step that is queued on the device.

    Attributes:
        planned_at, launched_at: when it was begun, and when its plan was there.
    """

    plan: StepPlan
    step: Launched
    planned_at: float
    launched_at: float


class Steps:
    """The engine thread's hand on scheduler and runner.

    Args:
        ahead: the runner again, if steps are to be queued one behind another.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        ahead: AheadRunner | None,
        *,
        observer: Observer,
        metrics: WorkerMetrics,
        settings: StepSettings,
        sink: StepSink,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._ahead = ahead
        self._observer = observer
        self._metrics = metrics
        self._settings = settings
        self._clock = settings.clock
        self._sink = sink
        self._under_way: _UnderWay | None = None
        self._committed_at = 0.0
        self._failed_in_a_row = 0
        self.num_done = 0
        self.started_at: float | None = None
        """When the step was begun that is waited for; any thread may read it."""

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or self._under_way is not None

    @property
    def is_settled(self) -> bool:
        """Whether no step is under way."""
        return self._under_way is None

    def turn(self) -> None:
        """Brings one step to its end.

        Raises:
            FatalStepError: the device is lost.
            Exception: too many steps in a row have failed; the last one's error.
        """
        try:
            if self._ahead is None:
                self._turn_alone()
            else:
                self._turn_ahead(self._ahead)
        finally:
            self.started_at = None

    def _turn_alone(self) -> None:
        planned_at = self._clock()
        plan = self._plan()
        executed_at = self.started_at = self._clock()
        try:
            with self._sink.waiting():
                result = self._runner.execute(plan)
        except FatalStepError:
            raise
        except Exception as error:  # noqa: BLE001 - the step's requests alone fail
            self._end(plan, planned_at, executed_at, error)
        else:
            self._end(plan, planned_at, executed_at, result)

    def _turn_ahead(self, runner: AheadRunner) -> None:
        current = self._under_way
        self._under_way = None
        if current is None:
            planned_at = self._clock()
            if not self._scheduler.has_work:
                return
            current = self._launch(runner, self._plan(), planned_at, after=None)
            if current is None or not self._sample(runner, current):
                return
        self.started_at = current.launched_at
        planned_at = self._clock()
        plan = self._scheduler.plan_ahead(current.plan)
        following = None
        # a step that could not be launched ends behind the one under way
        failed: tuple[StepPlan, Exception] | None = None
        if plan is not None:
            try:
                step = runner.launch(plan, current.step)
                following = _UnderWay(plan, step, planned_at, self._clock())
            except FatalStepError:
                raise
            except Exception as error:  # noqa: BLE001 - the step's requests alone fail
                failed = (plan, error)
        outcome: StepResult | Exception
        try:
            with self._sink.waiting():
                outcome = runner.collect(current.step)
        except FatalStepError:
            raise
        except Exception as error:  # noqa: BLE001 - the step's requests alone fail
            outcome = error
        began_at = max(current.launched_at, self._committed_at)
        self._end(current.plan, current.planned_at, began_at, outcome)
        if failed is not None:
            self._end(failed[0], planned_at, self._clock(), failed[1])
        if following is not None and self._sample(runner, following):
            self._under_way = following

    def _launch(
        self, runner: AheadRunner, plan: StepPlan, planned_at: float, *, after: Launched | None
    ) -> _UnderWay | None:
        launched_at = self.started_at = self._clock()
        try:
            return _UnderWay(plan, runner.launch(plan, after), planned_at, launched_at)
        except FatalStepError:
            raise
        except Exception as error:  # noqa: BLE001 - the step's requests alone fail
            self._end(plan, planned_at, launched_at, error)
            return None

    def _sample(self, runner: AheadRunner, under_way: _UnderWay) -> bool:
        """Queues the choice of a step's tokens; False if that failed, which ends the step."""
        try:
            runner.sample(under_way.step)
        except FatalStepError:
            raise
        except Exception as error:  # noqa: BLE001 - the step's requests alone fail
            self._end(under_way.plan, under_way.planned_at, under_way.launched_at, error)
            return False
        return True

    def _plan(self) -> StepPlan:
        plan = self._scheduler.plan()
        self._sink.changed()
        started = self._observer.planned(plan)
        if started:
            self._sink.started(started)
        return plan

    def _end(
        self,
        plan: StepPlan,
        planned_at: float,
        executed_at: float,
        outcome: StepResult | Exception,
    ) -> None:
        """Takes over what a step gave, or that it failed, and tells it."""
        committed_at = self._committed_at = self._clock()
        events: Events
        if isinstance(outcome, Exception):
            events = self._step_failed(plan, outcome)
        else:
            self._failed_in_a_row = 0
            knows = self._scheduler.knows
            settled = [(handle, MediaSettled()) for handle in outcome.settled if knows(handle)]
            events = [*settled, *self._scheduler.commit(plan, outcome)]
            self._scheduler.took(plan, committed_at - executed_at)
        self.num_done += 1
        self._sink.changed()
        times = StepTimes(planned_at, executed_at, committed_at, self._clock())
        self._observer.step_done(plan, times)
        self._sink.told(events)

    def _step_failed(self, plan: StepPlan, error: Exception) -> Events:
        self._failed_in_a_row += 1
        self._metrics.step_failed()
        _log.error(
            "step_failed rows=%d tokens=%d in_a_row=%d",
            len(plan.rows),
            plan.num_tokens,
            self._failed_in_a_row,
            exc_info=error,
        )
        if self._failed_in_a_row >= self._settings.max_failed_steps:
            raise error
        return self._scheduler.abandon(plan, f"a model step failed: {type(error).__name__}")
