"""The main loop: drain the inbox, turn a step, deliver what it gave.

One thread owns everything that changes: scheduler, pages, runner. Everyone else posts to the
inbox. While a step computes, it lends all but the runner to whoever cancels a request, under the
lock of `Leaving`: a client that has left keeps no pages and no place until a long step ends.
Whatever happens, every submitted request gets exactly one Finished or Failed, unless it
was cancelled, which gets nothing more.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as ReadOnlySequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from m3stack.cache.media import MediaLedger
from m3stack.cache.prefix import PrefixCache
from m3stack.engine.account import Account
from m3stack.engine.leaving import Leaving
from m3stack.engine.messages import (
    Abort,
    Between,
    Cancel,
    Explain,
    ForgetPrefixes,
    Hand,
    Message,
    Stop,
    Submit,
)
from m3stack.engine.observer import Observer
from m3stack.engine.runner import AheadRunner, Runner
from m3stack.engine.scheduler import Scheduler
from m3stack.engine.sequence import NO_SEGMENTS, Sequence, place_media
from m3stack.engine.steps import Steps, StepSettings
from m3stack.errors import ErrorKind, WorkerError
from m3stack.telemetry import WorkerMetrics
from m3stack.types import Event, Failed, Finished, Load, Request

_log = logging.getLogger(__name__)

Deliver = Callable[[ReadOnlySequence[tuple[int, Event]]], None]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Numbers the engine needs of model and configuration.

    Attributes:
        page_tokens: tokens of a page.
        max_context_tokens: prompt and output together.
        eos_token_id: ends a request unless it ignores that.
        segment_patches: temporal patches of a clip that the vision tower sees together.
        page_bytes: bytes of a page over all layers.
        max_failed_steps: steps that may fail in a row before the engine gives up.
    """

    page_tokens: int
    max_context_tokens: int
    eos_token_id: int
    segment_patches: int = NO_SEGMENTS
    page_bytes: int = 0
    max_failed_steps: int = 3


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What the engine thread takes over; nobody else may touch scheduler, pages and runner.

    Attributes:
        ahead: the runner again, if its steps are to be queued one behind another.
    """

    scheduler: Scheduler
    pages: PrefixCache
    runner: Runner
    media: MediaLedger
    metrics: WorkerMetrics
    ahead: AheadRunner | None = None


class Engine:
    """Runs requests until stopped.

    Args:
        parts: handed over for good.
        settings: fixed numbers.
        deliver: called on the engine thread with the events of a step, in order; must be quick.
        on_exit: called on the engine thread when it ends, with what went wrong or None.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        parts: EngineParts,
        settings: EngineSettings,
        *,
        deliver: Deliver,
        on_exit: Callable[[BaseException | None], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = parts.scheduler
        self._pages = parts.pages
        self._runner = parts.runner
        self._media = parts.media
        self._metrics = parts.metrics
        self._settings = settings
        self._deliver = deliver
        self._on_exit = on_exit
        self._clock = clock
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._inbox_lock = threading.Lock()
        self._is_closed = False
        self._leaving = Leaving(self._end, self._forget)
        self._live: dict[int, Sequence] = {}
        self._observer = Observer(parts.metrics, page_bytes=settings.page_bytes, clock=clock)
        self._steps = Steps(
            parts.scheduler,
            parts.runner,
            parts.ahead,
            observer=self._observer,
            metrics=parts.metrics,
            settings=StepSettings(settings.max_failed_steps, clock),
            sink=self,
        )
        self._load = self._measure_load()
        self._thread = threading.Thread(target=self._run, name="m3stack-engine", daemon=True)

    @property
    def load(self) -> Load:
        """As of the last step; may be read from any thread."""
        return self._load

    @property
    def step_age_s(self) -> float:
        """How long the step in progress has been running, 0 if none is; any thread."""
        started_at = self._steps.started_at
        return 0.0 if started_at is None else self._clock() - started_at

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Asks the engine to end after the step in progress; live requests fail."""
        self._inbox.put(Stop())

    def abort(self, failure: BaseException) -> None:
        """Makes the engine fail after the step in progress, as if a step had raised this."""
        self._inbox.put(Abort(failure))

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits for the thread; False if it is still running."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, handle: int, request: Request, *, upload_s: float = 0.0) -> None:
        """Takes over a checked request and its media pins; events follow under its handle.

        Args:
            handle: number of the request, unique for ever.
            request: with the patches the worker asked for.
            upload_s: how long it took to bring them here.

        Raises:
            WorkerError: the engine has ended; the pins stay with the caller.
        """
        self._post(Submit(handle, request, self._clock(), upload_s))

    def cancel(self, handle: int) -> None:
        """Ends a request without a further event; too late is no error.

        At once if a step is computing, else before the next one.
        """
        # behind its submission, which may not have been seen yet
        self._inbox.put(Cancel(handle))
        self._leaving.ask(handle)

    def forget_prefixes(self, done: Callable[[int], None]) -> None:
        """Empties the prefix cache; `done` is called on the engine thread with the pages freed."""
        self._post(ForgetPrefixes(done))

    def explain(self, request_id: str, done: Callable[[Account | None], None]) -> None:
        """Calls `done` on the engine thread with a copy of a request's account, if there is one."""
        self._post(Explain(request_id, done))

    def between_steps(self, work: Callable[[Hand | None], None]) -> None:
        """Runs quick work on the engine thread between two steps.

        Args:
            work: must see to its own errors; what it raises ends the engine.

        Raises:
            WorkerError: the engine has ended.
        """
        self._post(Between(work))

    def _post(self, message: Message) -> None:
        with self._inbox_lock:
            if self._is_closed:
                raise WorkerError(ErrorKind.WORKER_UNAVAILABLE, "the engine has stopped")
            self._inbox.put(message)

    def waiting(self) -> AbstractContextManager[None]:
        """A step computes: whoever cancels a request may end it meanwhile."""
        return self._leaving.waiting()

    def _end(self, handle: int) -> bool:
        """Frees what the scheduler gave a request; False if there is no such one any more."""
        is_there = self._scheduler.cancel(handle)
        if is_there:
            self._observer.ended(handle, "cancelled", self._clock())
            self.changed()
        return is_there

    def _run(self) -> None:
        self._leaving.take()
        failure: BaseException | None = None
        try:
            while self._take_messages():
                self._steps.turn()
        except BaseException as error:  # noqa: BLE001 - no request may hang on a dead thread
            failure = error
            _log.critical("engine_failed error=%s", type(error).__name__, exc_info=error)
        try:
            self._close(failure)
        finally:
            self._on_exit(failure)

    def _take_messages(self) -> bool:
        """Handles what is in the inbox, waiting for something to do; False after a stop."""
        while True:
            try:
                message = self._inbox.get(block=not self._steps.has_work)
            except queue.Empty:
                return True
            if isinstance(message, Stop):
                return False
            if isinstance(message, Abort):
                raise message.failure
            self._handle(message)

    def _handle(self, message: Message) -> None:
        if isinstance(message, Submit):
            self._accept(message)
        elif isinstance(message, Cancel):
            if self._end(message.handle):
                self._forget(message.handle)
        elif isinstance(message, ForgetPrefixes):
            message.done(self._pages.reset())
        elif isinstance(message, Explain):
            message.done(self._observer.explain(message.request_id))
        elif isinstance(message, Between):
            is_settled = self._steps.is_settled
            message.work(Hand(self._pages, self._media, self._runner, is_settled))
        self.changed()

    def _accept(self, message: Submit) -> None:
        request = message.request
        sampling = request.sampling
        eos = frozenset[int]() if sampling.ignore_eos else {self._settings.eos_token_id}
        sequence = Sequence(
            message.handle,
            _without_patches(request),
            page_tokens=self._settings.page_tokens,
            stop_ids=sampling.stop_token_ids | eos,
            max_context_tokens=self._settings.max_context_tokens,
            segment_patches=self._settings.segment_patches,
        )
        self._live[message.handle] = sequence
        self._observer.accepted(
            sequence, submitted_at=message.submitted_at, upload_s=message.upload_s
        )
        if not self._scheduler.fits(sequence):
            self._refuse(message.handle, sequence)
            return
        try:
            self._runner.begin(message.handle, request, stop_ids=sequence.stop_ids)
        except Exception as error:  # noqa: BLE001 - the request alone fails
            _log.exception("request_setup_failed handle=%d", message.handle)
            text = f"the request could not be set up: {type(error).__name__}"
            self.told([(message.handle, Failed(ErrorKind.INTERNAL, text))])
            return
        self._scheduler.add(sequence)

    def _refuse(self, handle: int, sequence: Sequence) -> None:
        size = self._settings.page_tokens
        text = (
            f"prompt and output may reach {sequence.num_prompt + sequence.max_output} tokens, "
            f"{sequence.pages_at_most} cache pages of {size}; this worker has "
            f"{self._pages.num_pages}"
        )
        self.told([(handle, Failed(ErrorKind.CONTEXT_TOO_LONG, text, "sampling.max_tokens"))])

    def started(self, events: ReadOnlySequence[tuple[int, Event]]) -> None:
        """Delivers that requests have left the queue."""
        self._deliver(events)

    def told(self, events: ReadOnlySequence[tuple[int, Event]]) -> None:
        """Delivers events, and lets go of the requests that end with them."""
        if not events:
            return
        now = self._clock()
        for handle, event in events:
            self._observer.told(handle, event, now)
            if isinstance(event, Finished | Failed):
                self._forget(handle)
        self._deliver(events)

    def _forget(self, handle: int) -> None:
        sequence = self._live.pop(handle)
        try:
            self._runner.forget(handle)
        finally:
            self._media.release([item.key for item in sequence.media])

    def _close(self, failure: BaseException | None) -> None:
        """Ends every request, those still in the inbox included."""
        with self._inbox_lock:
            self._is_closed = True
        kind = ErrorKind.WORKER_UNAVAILABLE if failure is None else ErrorKind.INTERNAL
        text = "the worker was stopped" if failure is None else "the engine failed and has stopped"
        events: list[tuple[int, Event]] = [(h, Failed(kind, text)) for h in self._live]
        for sequence in self._live.values():
            self._media.release([item.key for item in sequence.media])
        self._live.clear()
        for message in _rest(self._inbox):
            if isinstance(message, Submit):
                self._media.release([m.key for m in place_media(message.request)])
                events.append((message.handle, Failed(kind, text)))
            elif isinstance(message, ForgetPrefixes):
                message.done(0)
            elif isinstance(message, Explain):
                message.done(None)
            elif isinstance(message, Between):
                message.work(None)
        self._load = dataclasses.replace(
            self._load,
            running_requests=0,
            waiting_requests=0,
            waiting_prompt_tokens=0,
            used_pages=0,
        )
        self._metrics.set_load(self._load, cached_pages=0, host_pages=0)
        for _ in events:
            self._metrics.request_ended(kind.name.lower())
        if events:
            self._deliver(events)

    def changed(self) -> None:
        """Shows the load to everyone who watches; due after whatever changes it."""
        self._load = self._measure_load()
        self._metrics.set_load(
            self._load, cached_pages=self._pages.num_cached, host_pages=self._pages.num_host
        )
        self._metrics.set_media_bytes(self._media.booked_bytes)

    def _measure_load(self) -> Load:
        return Load(
            running_requests=self._scheduler.num_running,
            waiting_requests=self._scheduler.num_waiting,
            waiting_prompt_tokens=self._scheduler.num_pending_prompt_tokens,
            used_pages=self._pages.num_used,
            total_pages=self._pages.num_pages,
            steps=self._steps.num_done,
            prompt_tokens_per_s=self._observer.prompt_tokens_per_s,
        )


def _without_patches(request: Request) -> Request:
    # the runner owns the patches from here on: no second reference may keep them alive
    media = tuple(dataclasses.replace(item, patches=None) for item in request.media)
    return dataclasses.replace(request, media=media)


def _rest(inbox: queue.SimpleQueue[Message]) -> Iterable[Message]:
    while not inbox.empty():
        yield inbox.get_nowait()
