"""Requests that leave while a step computes: the engine's state, lent to whoever cancels one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Leaving:
    """Says who may touch what the engine thread owns, and ends requests in between.

    Args:
        end: frees what a request holds, short of what the runner keeps of it; False if there is no
            such request any more. Called on any thread, by one at a time.
        forget: lets go of the rest of a request that has ended; called on the engine thread.
    """

    def __init__(self, end: Callable[[int], bool], forget: Callable[[int], None]) -> None:
        self._end = end
        self._forget = forget
        # held by whoever works on the state
        self._lock = threading.Lock()
        self._asked: deque[int] = deque()
        self._ended: deque[int] = deque()

    def take(self) -> None:
        """The engine thread begins to work on the state."""
        self._lock.acquire()

    def ask(self, handle: int) -> None:
        """Ends a request at once, if a step computes; any thread."""
        self._asked.append(handle)
        self._settle()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The engine thread waits for a step: requests may end meanwhile.

        The runner, which is at work, forgets them afterwards.
        """
        self._lock.release()
        try:
            # what was asked for while the lock was held
            self._settle()
            yield
        finally:
            self._lock.acquire()
            while self._ended:
                # once, whatever comes of it
                self._forget(self._ended.popleft())

    def _settle(self) -> None:
        while self._asked and self._lock.acquire(blocking=False):
            try:
                while self._asked:
                    handle = self._asked.popleft()
                    if self._end(handle):
                        self._ended.append(handle)
            finally:
                self._lock.release()
