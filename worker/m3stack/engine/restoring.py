"""What becomes of a preempted sequence's pages, and how they come back."""

from __future__ import annotations

from enum import Enum

from m3stack.cache.prefix import PrefixCache
from m3stack.engine.sequence import Sequence


class Fetched(Enum):
    """What came of an attempt to bring a page back."""

    ON_DEVICE = "on_device"
    COPIED = "copied"
    GONE = "gone"
    """Nobody has it any more: it will be computed."""
    NO_PAGE = "no_page"
    """It is in host memory, and no device page is available for it."""


class Restorer:
    """Keeps what preempted sequences have computed findable, and finds it.

    Full pages are found by content like any prefix. The one page that is not full has a key of its
    own; it is kept only if that is cheaper than computing its tokens (`HostTier.is_worth`).
    """

    def __init__(self, pages: PrefixCache) -> None:
        self._pages = pages

    def keep(self, victim: Sequence) -> None:
        """Readies a running sequence's pages for being given up."""
        if not self._pages.keeps:
            return
        keys = victim.page_keys(victim.reached_tokens // victim.page_tokens)
        if victim.has_saved_partial:
            # it had not come back to that page yet
            keys = [*keys, victim.partial_key()]
        elif victim.num_partial and self._pages.is_worth_keeping(victim.num_partial):
            page = victim.pages[victim.num_computed // victim.page_tokens]
            self._pages.register(page, victim.partial_key())
            keys = [*keys, victim.partial_key()]
        self._pin(victim, keys)

    def begin(self, sequence: Sequence, missing_keys: list[bytes]) -> None:
        """A sequence starts, with host copies of some keys still to be fetched."""
        if sequence.has_saved_partial:
            missing_keys = [*missing_keys, sequence.partial_key()]
        self._pin(sequence, missing_keys)
        if not sequence.is_restoring:
            self.stop(sequence)

    def fetch_next(self, sequence: Sequence) -> Fetched:
        """Brings the next page of a restoring sequence back, or says why not."""
        is_full = sequence.is_restorable
        key = sequence.restoring_key()
        if not self._pages.knows(key):
            self.stop(sequence)
            return Fetched.GONE
        found = self._pages.fetch(key) if is_full else self._pages.claim(key)
        if found is None:
            return Fetched.NO_PAGE
        page, is_copied = found
        if is_full:
            sequence.add_restored(page)
        else:
            sequence.add_resumed(page)
        if not sequence.is_restoring:
            self.stop(sequence)
        return Fetched.COPIED if is_copied else Fetched.ON_DEVICE

    def stop(self, sequence: Sequence) -> None:
        """What comes next is computed; what was kept for this sequence alone is let go."""
        if sequence.has_saved_partial:
            self._pages.forget([sequence.partial_key()])
        sequence.stop_restoring()
        self._pin(sequence, [])

    def end(self, sequence: Sequence) -> None:
        """A sequence without pages has ended for good."""
        self.stop(sequence)
        if self._pages.keeps and not self._pages.enabled:
            # nobody else may ever find these
            self._pages.forget(sequence.page_keys(len(sequence.tokens) // sequence.page_tokens))

    def _pin(self, sequence: Sequence, keys: list[bytes]) -> None:
        """Keeps host copies for a sequence instead of those kept so far."""
        self._pages.pin(keys)
        self._pages.unpin(sequence.pinned_keys)
        sequence.pinned_keys = keys
