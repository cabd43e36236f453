"""Which pages the cache holds, as news for whoever follows it: a gateway that routes by them.

The engine thread writes, watchers on the RPC side read; the lock is held for microseconds, save
for a reader that begins and takes everything.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from itertools import islice

SHORT_BYTES = 8
MAX_ENTRIES = 65_536


def short_key(key: bytes) -> int:
    """The name under which a page is told: the first eight bytes of its key, little endian."""
    return int.from_bytes(key[:SHORT_BYTES], "little")


@dataclass(frozen=True, slots=True)
class Place:
    """How far a reader has read."""

    generation: int
    entry: int


@dataclass(frozen=True, slots=True)
class CacheNews:
    """What has changed for a reader.

    Attributes:
        is_restart: everything told before is void, `added` is all there is.
        epoch: how often everything was forgotten.
        added, removed: short keys; none is in both.
        place: from where to read on.
    """

    is_restart: bool
    epoch: int
    added: tuple[int, ...]
    removed: tuple[int, ...]
    place: Place

    def __bool__(self) -> bool:
        return self.is_restart or bool(self.added or self.removed)


# what a cache says that shares nothing
NO_PAGES = CacheNews(True, 0, (), (), Place(0, 0))


class PageJournal:
    """The held pages and their latest changes.

    Args:
        max_entries: changes kept; a reader that is further behind is told everything anew.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._lock = threading.Lock()
        self._held: set[int] = set()
        self._entries: deque[tuple[int, bool]] = deque(maxlen=max_entries)
        self._num_entries = 0
        self._epoch = 0

    @property
    def num_held(self) -> int:
        return len(self._held)

    def note(self, key: bytes, *, is_held: bool) -> None:
        """A page is held from now on, or no longer; what is known already is no news."""
        short = short_key(key)
        if (short in self._held) == is_held:
            return
        with self._lock:
            if is_held:
                self._held.add(short)
            else:
                self._held.remove(short)
            self._entries.append((short, is_held))
            self._num_entries += 1

    def restart(self) -> None:
        """Everything is forgotten, and what comes has other keys."""
        with self._lock:
            self._held.clear()
            self._entries.clear()
            self._num_entries = 0
            self._epoch += 1

    def news(self, place: Place | None) -> CacheNews:
        """What has changed since `place`; everything for None, or if that is too long ago."""
        with self._lock:
            here = Place(self._epoch, self._num_entries)
            first = self._num_entries - len(self._entries)
            if place is None or place.generation != self._epoch or place.entry < first:
                return CacheNews(True, self._epoch, tuple(self._held), (), here)
            last = dict(islice(self._entries, place.entry - first, None))
        added = tuple(short for short, is_held in last.items() if is_held)
        removed = tuple(short for short, is_held in last.items() if not is_held)
        return CacheNews(False, here.generation, added, removed, here)
