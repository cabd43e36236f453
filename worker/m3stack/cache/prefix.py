"""Which page holds which content: finds, shares, keeps and evicts computed pages.

One page number stands for K, V and index-K alike, so a hit, a share and an eviction always cover
all three. Only whole pages are ever shared.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from m3stack.cache.pages import PageAllocator

ROOT_KEY = b"m3stack page chain v1"


@dataclass(frozen=True, slots=True)
class MediaMark:
    """Placeholder tokens of a page that a media item fills.

    Placeholder ids all look alike; what is really at these positions is this.

    Attributes:
        media_key: what identifies the features (`cache.media.media_key`).
        first_feature: feature that stands at `offset`.
        offset, length: position in the page, and how many positions.
    """

    media_key: bytes
    first_feature: int
    offset: int
    length: int


def page_key(parent: bytes, token_ids: Sequence[int], marks: Sequence[MediaMark] = ()) -> bytes:
    """Identity of a full page given everything before it: 32 bytes.

    Args:
        parent: key of the page before, or a root key that may carry a salt.
        token_ids: all ids of the page.
        marks: media in the page, in order.
    """
    # fixed-width fields and counts up front, so that no two inputs share an encoding
    digest = hashlib.blake2b(digest_size=32)
    digest.update(len(parent).to_bytes(4, "little") + parent)
    digest.update(len(token_ids).to_bytes(4, "little") + array("I", token_ids).tobytes())
    for mark in marks:
        digest.update(len(mark.media_key).to_bytes(4, "little") + mark.media_key)
        digest.update(array("Q", (mark.first_feature, mark.offset, mark.length)).tobytes())
    return digest.digest()


class PrefixCache:
    """Page ownership with memory: pages that nobody uses keep their content until it is needed.

    The cache is itself one owner of every page it has registered. The engine thread owns it.
    """

    def __init__(self, pages: PageAllocator, *, enabled: bool = True) -> None:
        self._pages = pages
        self._enabled = enabled
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        # pages that only the cache owns, least recently used first
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def enabled(self) -> bool:
        return self._enabled

    @property
    def num_pages(self) -> int:
        return self._pages.num_pages

    @property
    def num_available(self) -> int:
        """Pages that `take` can give: free ones and idle ones."""
        return self._pages.num_free + len(self._idle)

    @property
    def num_used(self) -> int:
        """Pages that some sequence owns."""
        return self.num_pages - self.num_available

    @property
    def num_cached(self) -> int:
        """Pages whose content can be found, in use or not."""
        return len(self._key_of)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Pages of the longest known prefix of a key chain, each now owned by the caller too."""
        found: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            self._pages.share(page)
            self._idle.pop(page, None)
            found.append(page)
        return found

    def take(self, count: int) -> list[int]:
        """`count` pages of undefined content, owned by the caller; evicts idle ones as needed.

        The caller has checked `num_available`.
        """
        assert count <= self.num_available, f"{count} pages asked, {self.num_available} available"
        while self._pages.num_free < count:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
        return self._pages.take(count)

    def register(self, page: int, key: bytes) -> None:
        """Makes the full, computed page of a running sequence findable.

        A page with the same content may be known already; then this one stays private.
        """
        if not self._enabled or key in self._page_of or page in self._key_of:
            return
        self._pages.share(page)
        self._page_of[key] = page
        self._key_of[page] = key

    def release(self, pages: Sequence[int]) -> None:
        """Gives up the caller's ownership of a sequence's pages, in order of position."""
        # the tail becomes idle first and is evicted first: a page is useless without its parents
        for page in reversed(pages):
            left = self._pages.give_back(page)
            if left == 1 and page in self._key_of:
                self._idle[page] = None

    def reset(self) -> int:
        """Forgets all content and returns how many pages that frees at once."""
        freed = len(self._idle)
        self._idle.clear()
        for page in list(self._key_of):
            self._forget(page)
        return freed

    def check(self, owned: Sequence[int]) -> None:
        """Raises AssertionError unless sequences own exactly `owned`, one entry an owner."""
        self._pages.check([*owned, *self._key_of])
        assert self._page_of == {key: page for page, key in self._key_of.items()}
        assert set(self._idle) == set(self._key_of) - set(owned), "idle pages miscounted"

    def _forget(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]
        self._pages.give_back(page)
