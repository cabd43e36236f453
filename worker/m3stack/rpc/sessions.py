"""Carries events from the engine thread to the call that waits for them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from m3stack.types import Event, Started


class Session:
    """One running call's mailbox; belongs to the event loop."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.has_started = False
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()

    async def take(self) -> list[Event]:
        """Everything that has arrived, at least one event, in order."""
        await self._arrived.wait()
        self._arrived.clear()
        events = list(self._events)
        self._events.clear()
        return events

    def put(self, event: Event) -> None:
        if isinstance(event, Started):
            self.has_started = True
        self._events.append(event)
        self._arrived.set()


class SessionTable:
    """Open calls by handle; `deliver` alone may be called from another thread.

    Handles are given here, in order, and never again.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._sessions: dict[int, Session] = {}
        self._next_handle = 0
        self._emptied = asyncio.Event()
        self._emptied.set()

    @property
    def num_open(self) -> int:
        return len(self._sessions)

    @property
    def num_queued(self) -> int:
        """Calls that have not left the queue, those still uploading included."""
        return sum(not session.has_started for session in self._sessions.values())

    def open(self) -> Session:
        session = Session(self._next_handle)
        self._next_handle += 1
        self._sessions[session.handle] = session
        self._emptied.clear()
        return session

    def close(self, session: Session) -> None:
        """Later events of the session are dropped."""
        del self._sessions[session.handle]
        if not self._sessions:
            self._emptied.set()

    async def wait_empty(self) -> None:
        """Returns once no call is open."""
        await self._emptied.wait()

    def deliver(self, events: Sequence[tuple[int, Event]]) -> None:
        """Called by the engine once a step: one wake-up of the loop for all requests."""
        self._loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: Sequence[tuple[int, Event]]) -> None:
        for handle, event in events:
            session = self._sessions.get(handle)
            if session is not None:
                session.put(event)
