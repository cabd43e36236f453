"""What a worker says about itself: identity, state, load; and who is told when it changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace

from m3stack.cache.journal import NO_PAGES, CacheNews, PageJournal, Place
from m3stack.rpc.convert import load_to_proto
from m3stack.types import Load, WorkerState
from m3stack.worker.v1 import worker_pb2 as pb

# load changes with every step; watchers are told at most that often
LOAD_INTERVAL_S = 0.1
_NO_LOAD = Load(0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class WatchTiming:
    """Pauses of one watcher, in seconds."""

    heartbeat_s: float
    load_interval_s: float = LOAD_INTERVAL_S


class StatusBoard:
    """State and load of this worker; belongs to one event loop.

    Args:
        identity: told to every watcher once.
    """

    def __init__(self, identity: pb.Identity) -> None:
        self.identity = identity
        self._state = WorkerState.LOADING
        self._is_closed = False
        self._measure: Callable[[], Load] = lambda: _NO_LOAD
        self._journal: PageJournal | None = None
        self._shares_nothing = False
        self._changes: set[asyncio.Event] = set()
        self._listeners: list[Callable[[WorkerState], None]] = []

    @property
    def state(self) -> WorkerState:
        return self._state

    def listen(self, listener: Callable[[WorkerState], None]) -> None:
        """Calls `listener` on every later change of state."""
        self._listeners.append(listener)

    def set_state(self, state: WorkerState) -> None:
        """Moves on; watchers are told at once."""
        if state is self._state:
            return
        self._state = state
        for listener in self._listeners:
            listener(state)
        self._notify()

    def set_load_source(self, measure: Callable[[], Load]) -> None:
        """Where load comes from once there is an engine."""
        self._measure = measure

    def set_cache_source(self, journal: PageJournal | None) -> None:
        """Where news of the cache come from; None if requests share no pages."""
        self._journal = journal
        self._shares_nothing = journal is None

    def replace_identity(self, identity: pb.Identity) -> None:
        """Corrects the identity; a watch that has told another one ends, to be started anew."""
        self.identity = identity
        self._notify()

    def close(self) -> None:
        """Ends every watch."""
        self._is_closed = True
        self._notify()

    async def watch(
        self, timing: WatchTiming, *, with_cache: bool = False
    ) -> AsyncGenerator[pb.WatchResponse, None]:
        """Messages for one watcher, until `close`; news of the cache come along if wished for."""
        changed = asyncio.Event()
        self._changes.add(changed)
        loop = asyncio.get_running_loop()
        told: tuple[WorkerState, Load] | None = None
        told_at = loop.time()
        place: Place | None = None
        identity = self.identity
        try:
            while not self._is_closed and identity == self.identity:
                changed.clear()
                now = (self._state, self._measure())
                is_due = loop.time() - told_at >= timing.heartbeat_s
                news = self._news(place) if with_cache else None
                if told is None or is_due or news or _differs(told, now):
                    yield pb.WatchResponse(
                        identity=identity if told is None else None,
                        state=f"WORKER_STATE_{now[0].name}",
                        load=load_to_proto(now[1]),
                        cache=_cache_to_proto(news) if news else None,
                    )
                    told, told_at = now, loop.time()
                    place = news.place if news is not None else place
                pause = min(timing.load_interval_s, timing.heartbeat_s)
                try:
                    async with asyncio.timeout(pause):
                        await changed.wait()
                except TimeoutError:
                    continue
        finally:
            self._changes.discard(changed)

    def _news(self, place: Place | None) -> CacheNews | None:
        if self._journal is not None:
            return self._journal.news(place)
        # said once: whoever hears nothing would guess
        return NO_PAGES if self._shares_nothing and place is None else None

    def _notify(self) -> None:
        for changed in self._changes:
            changed.set()


def _differs(told: tuple[WorkerState, Load], now: tuple[WorkerState, Load]) -> bool:
    # a step count or a rate that alone moved on is worth a heartbeat, not a message of its own
    before, after = (replace(load, steps=0, prompt_tokens_per_s=0.0) for _, load in (told, now))
    return told[0] is not now[0] or before != after


def _cache_to_proto(news: CacheNews) -> pb.CacheEvents:
    return pb.CacheEvents(
        is_restart=news.is_restart, epoch=news.epoch, added=news.added, removed=news.removed
    )
