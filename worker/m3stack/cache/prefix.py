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

from m3stack.cache.host import CopyDirection, HostTier, PageCopy, broken_pages
from m3stack.cache.journal import PageJournal
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


def page_chain(parent: bytes, token_ids: Sequence[int], page_tokens: int) -> list[bytes]:
    """Keys of full pages without media, one after the other, as `page_key` gives them.

    Args:
        parent: key of the page before the first.
        token_ids: of whole pages.
        page_tokens: ids of a page.
    """
    assert len(token_ids) % page_tokens == 0
    keys: list[bytes] = []
    ids = array("I", token_ids)
    data, step = ids.tobytes(), ids.itemsize * page_tokens
    # a prompt of a million tokens has thousands of pages: one call for each, and nothing else
    count, blake2b = page_tokens.to_bytes(4, "little"), hashlib.blake2b
    for start in range(0, len(data), step):
        head = len(parent).to_bytes(4, "little")
        page = head + parent + count + data[start : start + step]
        parent = blake2b(page, digest_size=32).digest()
        keys.append(parent)
    return keys


@dataclass(frozen=True, slots=True)
class Salt:
    """What besides tokens and media two requests must have in common to share pages."""

    tenant: str = ""
    cache_salt: str = ""


def root_key(salt: Salt, epoch: int, private: int | None = None) -> bytes:
    """Where a key chain begins.

    Args:
        epoch: how often the cache had been emptied; content from before is not to be found after.
        private: number of a request that shares nothing.
    """
    digest = hashlib.blake2b(digest_size=32)
    digest.update(len(ROOT_KEY).to_bytes(4, "little") + ROOT_KEY)
    digest.update(epoch.to_bytes(8, "little"))
    for text in (salt.tenant, salt.cache_salt):
        data = text.encode()
        digest.update(len(data).to_bytes(4, "little") + data)
    if private is not None:
        digest.update(private.to_bytes(8, "little"))
    return digest.digest()


class PrefixCache:
    """Page ownership with memory: pages that nobody uses keep their content until it is needed.

    The cache is itself one owner of every page it has registered. With a host tier, what is
    evicted from the device is copied there and can be fetched back. The engine thread owns it.

    Copies are only noted here, in order; whoever plans a step takes them with `take_copies`, and
    they must be carried out in that order before anything else in the step.

    Args:
        pages: the device pages.
        enabled: whether requests share what others computed. Without, and with a host tier, every
            request still finds its own pages again after a preemption.
        host: where evicted pages go; None drops them.
    """

    def __init__(
        self, pages: PageAllocator, *, enabled: bool = True, host: HostTier | None = None
    ) -> None:
        self._pages = pages
        self._enabled = enabled
        self._host = host
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        # pages that only the cache owns, least recently used first
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._copies: list[PageCopy] = []
        self._epoch = 0
        # without sharing there is nothing that others could find
        self._journal = PageJournal() if enabled else None
        if host is not None:
            host.listen(self._note)

    @property
    def journal(self) -> PageJournal | None:
        """News of what requests can find here; None if they share nothing."""
        return self._journal

    @property
    def enabled(self) -> bool:
        """Whether pages are shared between requests."""
        return self._enabled

    @property
    def epoch(self) -> int:
        """How often all content has been forgotten."""
        return self._epoch

    @property
    def keeps(self) -> bool:
        """Whether content is registered at all."""
        return self._enabled or self._host is not None

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
        """Device pages whose content can be found, in use or not."""
        return len(self._key_of)

    @property
    def num_host(self) -> int:
        """Pages whose content is held in host memory."""
        return 0 if self._host is None else self._host.num_held

    def root_key(self, salt: Salt, private: int) -> bytes:
        """Where a request's key chain begins: equal only for requests that may share pages.

        Args:
            salt: of the request.
            private: number of the request; keeps chains apart while nothing is shared.
        """
        return root_key(salt, self._epoch, None if self._enabled else private)

    def knows(self, key: bytes) -> bool:
        """Whether the content of a page is on the device or in host memory."""
        return key in self._page_of or (self._host is not None and self._host.holds(key))

    def known_length(self, keys: Sequence[bytes]) -> int:
        """How many keys at the head of a chain are known."""
        for index, key in enumerate(keys):
            if not self.knows(key):
                return index
        return len(keys)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Device pages of the longest known prefix of a key chain, now owned by the caller too."""
        page_of, found = self._page_of, list[int]()
        # a prompt of a million tokens has thousands of pages, and others wait meanwhile
        for key in keys:
            page = page_of.get(key)
            if page is None:
                break
            found.append(page)
        self._pages.share_all(found)
        if self._idle:
            for page in found:
                self._idle.pop(page, None)
        return found

    def fetch(self, key: bytes) -> tuple[int, bool] | None:
        """A page with the content of a key, owned by the caller, and whether it was copied here.

        None if the content is not known, or if a copy would need a page and none is available.
        """
        page = self._share(key)
        if page is not None:
            return page, False
        slot = None if self._host is None else self._host.use(key)
        if slot is None or self.num_available == 0:
            return None
        (page,) = self.take(1)
        self._copies.append(PageCopy(CopyDirection.TO_DEVICE, page, slot))
        self.register(page, key)
        return page, True

    def claim(self, key: bytes) -> tuple[int, bool] | None:
        """As `fetch`, but the page is the caller's alone to write to, and its key is forgotten."""
        page = self._page_of.get(key)
        if page is not None:
            assert page in self._idle, "invariant: a private page is idle until it is claimed"
            del self._idle[page], self._page_of[key], self._key_of[page]
            self._drop_host(key)
            self._note(key)
            return page, False
        found = self.fetch(key)
        if found is not None:
            del self._page_of[key], self._key_of[found[0]]
            self._pages.give_back(found[0])
            self._drop_host(key)
            self._note(key)
        return found

    def take(self, count: int) -> list[int]:
        """`count` pages of undefined content, owned by the caller; evicts idle ones as needed.

        The caller has checked `num_available`.
        """
        assert count <= self.num_available, f"{count} pages asked, {self.num_available} available"
        while self._pages.num_free < count:
            page, _ = self._idle.popitem(last=False)
            slot = None if self._host is None else self._host.put(self._key_of[page])
            if slot is not None:
                self._copies.append(PageCopy(CopyDirection.TO_HOST, page, slot))
            self._unregister(page)
        return self._pages.take(count)

    def register(self, page: int, key: bytes) -> None:
        """Makes the computed page of a running sequence findable.

        A page with the same content may be known already; then this one stays private.
        """
        if not self.keeps or key in self._page_of or page in self._key_of:
            return
        self._pages.share(page)
        self._page_of[key] = page
        self._key_of[page] = key
        self._note(key)

    def release(self, pages: Sequence[int]) -> None:
        """Gives up the caller's ownership of a sequence's pages, in order of position."""
        # the tail becomes idle first and is evicted first: a page is useless without its parents
        for page in reversed(pages):
            left = self._pages.give_back(page)
            if left == 1 and page in self._key_of:
                self._idle[page] = None

    def is_worth_keeping(self, num_tokens: int) -> bool:
        """Whether a page of that many tokens is cheaper to bring back than to compute."""
        return self.keeps and (self._host is None or self._host.is_worth(num_tokens))

    def pin(self, keys: Sequence[bytes]) -> None:
        """Keeps the host copies of these keys, present or to come, until `unpin`."""
        if self._host is not None:
            self._host.pin(keys)

    def unpin(self, keys: Sequence[bytes]) -> None:
        if self._host is not None:
            self._host.unpin(keys)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Drops content that nobody can ask for again; pages in use stay with their owners."""
        for key in keys:
            page = self._page_of.get(key)
            if page is not None:
                self._idle.pop(page, None)
                self._unregister(page)
            self._drop_host(key)

    def take_copies(self) -> tuple[PageCopy, ...]:
        """Copies noted since the last call, in the order they must be made."""
        copies, self._copies = self._copies, []
        return tuple(copies)

    def distrust(self, failed: Sequence[PageCopy]) -> frozenset[int]:
        """Forgets content that copies should have made; returns the pages it should be in."""
        for copy in failed:
            if copy.direction is CopyDirection.TO_HOST:
                assert self._host is not None
                self._host.drop_slot(copy.slot)
            elif copy.page in self._key_of:
                self._idle.pop(copy.page, None)
                self._unregister(copy.page)
        return broken_pages(failed)

    def reset(self) -> int:
        """Forgets all content, in both tiers, and returns how many device pages that frees."""
        assert not self._copies
        freed = len(self._idle)
        self._idle.clear()
        for page in list(self._key_of):
            self._unregister(page)
        if self._host is not None:
            self._host.reset()
        self._epoch += 1
        if self._journal is not None:
            self._journal.restart()
        return freed

    def check(self, owned: Sequence[int]) -> None:
        """Raises AssertionError unless sequences own exactly `owned`, one entry an owner."""
        self._pages.check([*owned, *self._key_of])
        assert self._page_of == {key: page for page, key in self._key_of.items()}
        assert set(self._idle) == set(self._key_of) - set(owned), "idle pages miscounted"
        if self._host is not None:
            self._host.check()
        if self._journal is not None:
            assert self._journal.num_held == len(
                set(self._page_of) | set(self._host.keys() if self._host is not None else ())
            ), "the journal tells of other pages than are held"

    def check_unpinned(self) -> None:
        """Raises AssertionError if a host page is still pinned."""
        assert self._host is None or self._host.num_pinned == 0, "host pages are still pinned"

    def _share(self, key: bytes) -> int | None:
        page = self._page_of.get(key)
        if page is not None:
            self._pages.share(page)
            self._idle.pop(page, None)
        return page

    def _unregister(self, page: int) -> None:
        key = self._key_of.pop(page)
        del self._page_of[key]
        self._pages.give_back(page)
        self._note(key)

    def _note(self, key: bytes) -> None:
        if self._journal is not None:
            self._journal.note(key, is_held=self.knows(key))

    def _drop_host(self, key: bytes) -> None:
        if self._host is not None:
            self._host.drop(key)
