"""Prompt pages that running sequences are about to compute, so that nobody computes them twice."""

from __future__ import annotations

from m3stack.cache.prefix import PrefixCache
from m3stack.engine.sequence import Sequence


class PagesUnderway:
    """Who computes which shareable page; the scheduler owns it.

    Requests with one prompt, such as the samples of n > 1, often arrive together. The first one
    computes it; the others wait for its pages instead of computing their own.
    """

    def __init__(self, pages: PrefixCache) -> None:
        self._pages = pages
        self._owner_of: dict[bytes, Sequence] = {}
        self._keys_of: dict[int, list[bytes]] = {}
        # pages at the head of a waiting sequence's chain that were known when last looked at
        self._known: dict[int, int] = {}

    def announce(self, sequence: Sequence, known_pages: int) -> None:
        """A sequence starts, and will compute its prompt's pages behind the known ones."""
        self._known.pop(sequence.handle, None)
        if not self._pages.enabled:
            return
        keys = sequence.page_keys(sequence.num_prompt // sequence.page_tokens)[known_pages:]
        if keys:
            self._keys_of[sequence.handle] = keys
            for key in keys:
                self._owner_of.setdefault(key, sequence)

    def computed(self, sequence: Sequence, key: bytes) -> None:
        """A page is there."""
        if self._owner_of.get(key) is sequence:
            del self._owner_of[key]

    def withdraw(self, sequence: Sequence) -> None:
        """A sequence has ended or lost its pages; safe to call again."""
        self._known.pop(sequence.handle, None)
        for key in self._keys_of.pop(sequence.handle, ()):
            self.computed(sequence, key)

    def holds_back(self, sequence: Sequence) -> bool:
        """Whether the next page a waiting sequence lacks is computed by one that goes before it."""
        if not self._owner_of:
            return False
        keys = sequence.matchable_keys()
        known = self._known.get(sequence.handle, 0)
        known += self._pages.known_length(keys[known:])
        self._known[sequence.handle] = known
        if known == len(keys):
            return False
        owner = self._owner_of.get(keys[known])
        # one that goes after it must not make it wait
        return owner is not None and owner.order < sequence.order

    def check(self, running: list[Sequence]) -> None:
        """Raises AssertionError if somebody who does not run is expected to compute a page."""
        handles = {sequence.handle for sequence in running}
        assert set(self._keys_of) <= handles
        assert {sequence.handle for sequence in self._owner_of.values()} <= handles
