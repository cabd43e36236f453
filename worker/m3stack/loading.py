"""Loading, seen from the loop: on a thread of its own, shown as it goes, given up if need be."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

from m3stack.errors import LoadingStoppedError, StartupError
from m3stack.progress import TransferProgress

_log = logging.getLogger(__name__)

LINE_S = 5.0
# how long loading gets to notice that it is to end
BREAK_OFF_S = 1.0

Loaded = TypeVar("Loaded")


class Loading:
    """One loading of a model.

    Args:
        model_name: as it is shown.

    Attributes:
        hangs: whether it was told to end and did not look up; its thread still runs.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._stopped = threading.Event()
        self._bar: TransferProgress | None = None
        self._failure: StartupError | None = None
        self._wake: Callable[[], object] = lambda: None
        self._began_at = self._shown_at = time.monotonic()
        self.hangs = False

    def stop(self) -> None:
        """Has the next `check` end it; from any thread."""
        self._stopped.set()

    def fail(self, error: Exception) -> None:
        """Has it end with an error that it may never meet itself; from any thread."""
        self._failure = StartupError(f"while loading: {error}")
        self._wake()

    def check(self) -> None:
        """Raises LoadingStoppedError once it is to end, StartupError if that is a failure."""
        if self._failure is not None:
            raise self._failure
        if self._stopped.is_set():
            raise LoadingStoppedError

    def show(self, done: int, total: int) -> None:
        """Shows how far it is: on the bar of a terminal, else by a line every few seconds.

        Args:
            done, total: bytes.

        Raises:
            LoadingStoppedError, StartupError: as `check`.
        """
        self.check()
        now = time.monotonic()
        if self._bar is not None:
            self._bar(done, total)
        elif now - self._shown_at >= LINE_S or done == total:
            left_s = (now - self._began_at) * (total - done) / max(done, 1)
            _log.info("loading bytes=%d total_bytes=%d left_s=%.0f", done, total, left_s)
            self._shown_at = now

    async def run(self, load: Callable[[], Loaded], stop_asked: asyncio.Event) -> Loaded:
        """What `load` gives.

        Raises:
            LoadingStoppedError: it was told to stop; see `hangs`.
            StartupError: it has failed, or was told to; see `hangs`.
        """
        with ExitStack() as stack:
            if sys.stderr.isatty():
                self._bar = stack.enter_context(TransferProgress(f"loading {self._model_name}"))
            loading = _start_thread(load)
            failed = asyncio.Event()
            loop = asyncio.get_running_loop()
            self._wake = lambda: loop.call_soon_threadsafe(failed.set)
            others = [asyncio.create_task(event.wait()) for event in (stop_asked, failed)]
            if self._failure is not None:
                # it came before there was anybody to wake
                failed.set()
            await asyncio.wait((loading, *others), return_when=asyncio.FIRST_COMPLETED)
            self._wake = lambda: None
            for other in others:
                other.cancel()
            # it looks up between two parts of its work; a compiler does not
            await asyncio.wait((loading,), timeout=BREAK_OFF_S)
            self.hangs = not loading.done()
            if self.hangs:
                raise self._failure or LoadingStoppedError
            return await loading


def _start_thread(work: Callable[[], Loaded]) -> asyncio.Future[Loaded]:
    """Runs `work` on a daemon thread: the loop's own executor would be waited for at the end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Loaded] = loop.create_future()

    def tell(setter: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            setter(value)

    def run() -> None:
        setter: Callable[[Any], None]
        try:
            value: Any = work()
            setter = future.set_result
        except BaseException as error:  # noqa: BLE001 - whoever awaits the future gets it
            value, setter = error, future.set_exception
        # the loop may be closed by now
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(tell, setter, value)

    threading.Thread(target=run, name="m3stack-loading", daemon=True).start()
    return future
