"""Which pages have a copy in host memory: slots by content key, least recently used first.

The books only, free of torch; `cache.host_pool` holds the bytes. A slot holds K, V and index-K of
all layers of one page, so a copy is never partial.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum


class CopyDirection(Enum):
    TO_HOST = "to_host"
    TO_DEVICE = "to_device"


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Moves the content of one page, all layers together, between a device page and a host slot."""

    direction: CopyDirection
    page: int
    slot: int


def broken_pages(failed: Iterable[PageCopy]) -> frozenset[int]:
    """Device pages whose content is undefined after these copies failed."""
    return frozenset(copy.page for copy in failed if copy.direction is CopyDirection.TO_DEVICE)


class HostTier:
    """Slots by content key; the engine thread owns it.

    The cost rule: restoring a page takes as long as computing `restore_cost_tokens` prompt tokens,
    so a page is kept and restored only if it holds more tokens than that, and computed again
    otherwise.

    Args:
        num_slots: pages that fit the budget.
        restore_cost_tokens: prompt tokens computed in the time one restore takes.
    """

    def __init__(self, num_slots: int, *, restore_cost_tokens: int = 0) -> None:
        assert num_slots > 0
        self.num_slots = num_slots
        self._restore_cost_tokens = restore_cost_tokens
        self._free = list(range(num_slots - 1, -1, -1))
        self._slot_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        # held keys that nobody has pinned, least recently used first
        self._evictable: OrderedDict[bytes, None] = OrderedDict()
        self._pins: Counter[bytes] = Counter()
        self._dropped: Callable[[bytes], None] = lambda _: None

    def listen(self, dropped: Callable[[bytes], None]) -> None:
        """Calls `dropped` with every key that is held no longer."""
        self._dropped = dropped

    @property
    def num_held(self) -> int:
        return len(self._slot_of)

    def is_worth(self, num_tokens: int) -> bool:
        """Whether restoring a page of that many tokens is cheaper than computing them."""
        return num_tokens > self._restore_cost_tokens

    def holds(self, key: bytes) -> bool:
        return key in self._slot_of

    def keys(self) -> Iterable[bytes]:
        """Every key that is held."""
        return self._slot_of.keys()

    def use(self, key: bytes) -> int | None:
        """The slot of a key, which becomes the most recently used; None if it is not held."""
        slot = self._slot_of.get(key)
        if slot is not None and key in self._evictable:
            self._evictable.move_to_end(key)
        return slot

    def put(self, key: bytes) -> int | None:
        """A slot to copy the content of a key into.

        None if it is held already, or if every slot is pinned: then nothing need be copied.
        """
        if self.use(key) is not None:
            return None
        if not self._free:
            if not self._evictable:
                return None
            self.drop(next(iter(self._evictable)))
        slot = self._free.pop()
        self._slot_of[key] = slot
        self._key_of[slot] = key
        if not self._pins[key]:
            self._evictable[key] = None
        return slot

    def pin(self, keys: Sequence[bytes]) -> None:
        """Keeps keys, held now or later, from being evicted."""
        for key in keys:
            self._pins[key] += 1
            self._evictable.pop(key, None)

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Takes one pin of each key back."""
        for key in keys:
            self._pins[key] -= 1
            assert self._pins[key] >= 0, "a host page was unpinned once too often"
            if self._pins[key] == 0:
                del self._pins[key]
                if key in self._slot_of:
                    self._evictable[key] = None

    def drop(self, key: bytes) -> None:
        """Forgets a key, held or not, pinned or not."""
        slot = self._slot_of.pop(key, None)
        if slot is not None:
            del self._key_of[slot]
            self._evictable.pop(key, None)
            self._free.append(slot)
            self._dropped(key)

    def drop_slot(self, slot: int) -> None:
        """Forgets whatever a slot holds, if anything."""
        key = self._key_of.get(slot)
        if key is not None:
            self.drop(key)

    def reset(self) -> int:
        """Forgets all content and returns how many slots held some; pins stay."""
        count = self.num_held
        for key in list(self._slot_of):
            self.drop(key)
        return count

    def check(self) -> None:
        """Raises AssertionError unless slots, keys and pins agree."""
        assert self._slot_of == {key: slot for slot, key in self._key_of.items()}
        free = set(self._free)
        assert len(free) == len(self._free), "a host slot is free twice"
        assert free == set(range(self.num_slots)) - set(self._key_of), "host slots miscounted"
        assert set(self._evictable) == {key for key in self._slot_of if not self._pins.get(key)}

    @property
    def num_pinned(self) -> int:
        return len(+self._pins)
