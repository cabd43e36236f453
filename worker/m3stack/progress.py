"""Shows how far a long transfer of bytes is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

LINE_INTERVAL_S = 5.0
GIB = 1 << 30

Clock = Callable[[], float]


class TransferProgress:
    """Call it with bytes done and bytes in all, as often as you like; a context manager.

    Args:
        what: in progress, such as "loading MiniMax-M3"; begins the line.
        stream: standard error unless given.
        clock: seconds that only go up.
    """

    def __init__(
        self, what: str, *, stream: TextIO | None = None, clock: Clock = time.monotonic
    ) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._show = (
            _Bar(what, self._stream) if self._stream.isatty() else _Lines(what, self._stream, clock)
        )

    def __enter__(self) -> TransferProgress:
        return self

    def __call__(self, done: int, total: int) -> None:
        self._show.update(done, total)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._show.close()


class _Bar:
    """A bar with bytes, rate and time left, drawn by rich."""

    def __init__(self, what: str, stream: TextIO) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(file=stream),
        )
        self._task = self._progress.add_task(what, total=None)
        self._progress.start()

    def update(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total)

    def close(self) -> None:
        self._progress.stop()


class _Lines:
    """One line when it begins, every few seconds, and when it is done."""

    def __init__(self, what: str, stream: TextIO, clock: Clock) -> None:
        self._what, self._stream, self._clock = what, stream, clock
        self._began: float | None = None
        # a resumed transfer does not begin at zero, and must not count as fast
        self._first = 0
        self._shown_at = 0.0
        self._is_done = False

    def update(self, done: int, total: int) -> None:
        now = self._clock()
        if self._began is None:
            self._began, self._first = now, done
        elif done < total and now - self._shown_at < LINE_INTERVAL_S:
            return
        if self._is_done:
            return
        self._shown_at, self._is_done = now, done >= total
        print(self._line(done, total, now - self._began), file=self._stream, flush=True)

    def close(self) -> None:
        pass

    def _line(self, done: int, total: int, seconds: float) -> str:
        share = done / total if total else 1.0
        line = f"{self._what}: {done / GIB:.2f} of {total / GIB:.2f} GiB ({share:.0%})"
        moved = done - self._first
        if moved <= 0 or seconds <= 0:
            return line
        rate = moved / seconds
        if done >= total:
            return f"{line} in {_time(seconds)}, {rate / GIB:.2f} GiB/s"
        return f"{line}, {rate / GIB:.2f} GiB/s, {_time((total - done) / rate)} left"


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"
