"""A running engine over the history model, and the events it delivered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType

from m3stack.cache.media import MediaClaim
from m3stack.engine.engine import Engine, EngineParts, EngineSettings
from m3stack.engine.plan import StepPlan, StepResult
from m3stack.engine.runner import AheadRunner, Launched
from m3stack.engine.sequence import place_media
from m3stack.telemetry import WorkerMetrics
from m3stack.types import Event, Failed, Finished, MediaSettled, Request, Started, Tokens
from tests.worker.engine.history_model import EOS_ID, FEATURE_BYTES, PAGE, Stack

# a bound on hangs, not on speed
TIMEOUT_S = 60


class FaultyRunner:
    """A runner that can be told to fail, or to wait at the start of a step.

    Attributes:
        steps_left: steps after which the gate closes by itself; none if negative.
    """

    def __init__(self, inner: AheadRunner) -> None:
        self._inner = inner
        self.calls: list[str] = []
        self.faults: list[BaseException | None] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.steps_left = -1

    def begin(self, handle: int, request: Request, *, stop_ids: frozenset[int]) -> None:
        if request.request_id == "unprepared":
            raise RuntimeError("cannot begin")
        self._inner.begin(handle, request, stop_ids=stop_ids)

    def forget(self, handle: int) -> None:
        self._inner.forget(handle)

    def execute(self, plan: StepPlan) -> StepResult:
        self._enter()
        return self._inner.execute(plan)

    def launch(self, plan: StepPlan, after: Launched | None = None) -> Launched:
        self.calls.append("launch" if after is None else "launch behind")
        self._enter()
        return self._inner.launch(plan, after)

    def sample(self, step: Launched) -> None:
        self.calls.append("sample")
        self._enter()
        self._inner.sample(step)

    def collect(self, step: Launched) -> StepResult:
        self.calls.append("collect")
        self._enter()
        return self._inner.collect(step)

    def _enter(self) -> None:
        self.entered.set()
        assert self.gate.wait(TIMEOUT_S)
        self.steps_left -= 1
        if self.steps_left == 0:
            # before anybody hears of this step: whoever opens the gate then finds it closed
            self.gate.clear()
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None:
            raise fault


class EngineHarness:
    """Starts an engine; collects events by handle; checks at the end that nothing leaked."""

    def __init__(self, stack: Stack | None = None, *, is_ahead: bool = False) -> None:
        self.stack = stack or Stack()
        self.runner = FaultyRunner(self.stack.runner)
        self.metrics = WorkerMetrics()
        self.events: dict[int, list[Event]] = {}
        self.exits: list[BaseException | None] = []
        self._changed = threading.Condition()
        self.stack.media.on_release(self._notify)
        self.engine = Engine(
            EngineParts(
                self.stack.scheduler,
                self.stack.pages,
                self.runner,
                self.stack.media,
                self.metrics,
                self.runner if is_ahead else None,
            ),
            EngineSettings(
                page_tokens=PAGE,
                max_context_tokens=10_000,
                eos_token_id=EOS_ID,
                segment_patches=self.stack.segment_patches,
                page_bytes=self.stack.pool.shape.bytes_per_page,
            ),
            deliver=self._deliver,
            on_exit=self._exit,
        )

    def __enter__(self) -> EngineHarness:
        self.engine.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.runner.gate.set()
        self.engine.stop()
        assert self.engine.join(TIMEOUT_S), "the engine thread hangs"
        self.stack.constraints.close()
        if error is None:
            assert self.stack.media.num_pinned == 0
            assert len(self.exits) == 1

    def submit(self, request: Request) -> int:
        handle = len(self.events)
        self.events[handle] = []
        if request.media:
            claims = [
                MediaClaim(item.key, FEATURE_BYTES * sum(span.length for span in item.spans))
                for item in place_media(request)
            ]
            # as the door does: a request whose features have no room yet waits
            self.wait_until(lambda: self.stack.media.reserve(claims) is not None)
        self.engine.submit(handle, request)
        return handle

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, TIMEOUT_S), "timed out"

    def ending(self, handle: int) -> Finished | Failed:
        """The end of a request, once it has come."""
        self.wait_until(lambda: bool(self._endings(handle)))
        (ending,) = self._endings(handle)
        return ending

    def tokens(self, handle: int) -> list[int]:
        return [t for e in self.events[handle] if isinstance(e, Tokens) for t in e.token_ids]

    def told(self, handle: int) -> list[type[Event]]:
        """Kinds of the events a client would see, in order."""
        return [type(e) for e in self.events[handle] if not isinstance(e, MediaSettled)]

    def wait_idle(self) -> None:
        self.wait_until(
            lambda: self.engine.load.running_requests + self.engine.load.waiting_requests == 0
        )

    def started(self, handle: int) -> bool:
        return any(isinstance(event, Started) for event in self.events[handle])

    def _endings(self, handle: int) -> list[Finished | Failed]:
        return [e for e in self.events[handle] if isinstance(e, Finished | Failed)]

    def _deliver(self, events: Sequence[tuple[int, Event]]) -> None:
        assert threading.current_thread().name == "m3stack-engine"
        with self._changed:
            for handle, event in events:
                assert not self._endings(handle), "an event after the end"
                self.events[handle].append(event)
            self._changed.notify_all()

    def _exit(self, failure: BaseException | None) -> None:
        with self._changed:
            self.exits.append(failure)
            self._changed.notify_all()
