"""Brings here what a request needs and another worker has; what does not come is computed.

Nothing of a request depends on a transfer: every content is checked by its hash, a broken transfer
goes on with what is missing, and one that cannot go on ends with what has come.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from m3stack.errors import WorkerError
from m3stack.transfer.interface import (
    Content,
    ContentKind,
    Holdings,
    TransferError,
    Transport,
    Wanted,
    content_hash_of,
)
from m3stack.transfer.keys import chain
from m3stack.transfer.port import Data
from m3stack.transfer.sources import Sources
from m3stack.transfer.store import ContentStore
from m3stack.types import Request, Source

_log = logging.getLogger(__name__)

# attempts in a row that bring nothing, and the pause before the second one
MAX_FRUITLESS = 2
PAUSE_S = 0.1
# of one media item; a larger one is encoded here
MAX_FEATURE_BYTES = 256 << 20
# hashing the pages of a prompt this long takes milliseconds
LONG_PROMPT_TOKENS = 8192


class TransferBook(Protocol):
    """Who is told of transfers."""

    def transferred(self, kind: str, num_bytes: int) -> None:
        """Contents have come and are good."""
        ...

    def transfer_ended(self, outcome: str) -> None:
        """A transfer is over: `whole`, `partial`, `failed`, or `corrupt`: damaged on its way."""
        ...


@dataclass(slots=True)
class _Progress:
    """How far a chain of pages has come.

    Attributes:
        here: pages at its head that are here.
        most: up to where it is to be brought.
        is_corrupt: whether a content came that was not what it should be.
    """

    here: int
    most: int
    is_corrupt: bool = False


class Puller:
    """Fetches pages and features for requests; belongs to the event loop.

    Args:
        store: of this worker.
        transport: to others.
        page_tokens: tokens of a page.
        book: is told what has come.
        keeps_pages: whether later requests find pages here; else none are fetched.
    """

    def __init__(
        self,
        store: ContentStore,
        transport: Transport,
        *,
        page_tokens: int,
        book: TransferBook,
        keeps_pages: bool = True,
    ) -> None:
        self._store = store
        self._transport = transport
        self._page_tokens = page_tokens
        self._book = book
        self._keeps_pages = keeps_pages
        self._sources = Sources()

    async def pages(self, request: Request, source: Source) -> int:
        """Brings the pages of a prompt here, as far as they can be had; returns the tokens brought.

        Raises:
            WorkerError: this worker's own engine has stopped.
        """
        if not self._keeps_pages:
            return 0
        epoch = await self._store.epoch()
        own = await self._chain(request, epoch)
        room = await self._store.room(own)
        if room.known == len(own):
            return 0
        progress = _Progress(room.known, room.most)
        # a full cache takes nothing in
        outcome = "failed"
        if room.most > room.known:
            try:
                async with self._sources.place(source):
                    outcome = await self._bring_pages(request, source, own, (epoch, progress))
            except Exception as error:  # noqa: BLE001 - what does not come is computed
                self._tell("pages", source, error)
                outcome = "partial" if progress.here > room.known else "failed"
        await self._store.use_pages(own[: progress.here])
        brought = progress.here - room.known
        self._book.transfer_ended(outcome)
        _log.info(
            "pages_fetched request_id=%s source=%s pages=%d of=%d outcome=%s",
            request.request_id,
            source.address,
            brought,
            len(own) - room.known,
            outcome,
        )
        return brought * self._page_tokens

    async def features(
        self, sizes: Sequence[tuple[bytes, int]], source: Source
    ) -> frozenset[bytes]:
        """Brings features of pinned media items here; returns the keys of those that came.

        Args:
            sizes: keys of the items, and the bytes that their features take.

        Raises:
            WorkerError: this worker's own engine has stopped.
        """
        came: set[bytes] = set()
        # what is moved in one go makes running requests wait
        small = [(key, size) for key, size in sizes if size <= MAX_FEATURE_BYTES]
        is_corrupt = False
        try:
            async with self._sources.place(source):
                is_corrupt = await self._bring_features(small, source, came)
        except Exception as error:  # noqa: BLE001 - what does not come is encoded here
            self._tell("features", source, error)
        whole = "whole" if len(came) == len(sizes) else "partial" if came else "failed"
        self._book.transfer_ended("corrupt" if is_corrupt else whole)
        return frozenset(came)

    async def _bring_features(
        self, sizes: Sequence[tuple[bytes, int]], source: Source, came: set[bytes]
    ) -> bool:
        """Adds the keys of what has come to `came`; says whether something was damaged."""
        is_corrupt = False
        fruitless = 0
        while len(came) < len(sizes) and fruitless < MAX_FRUITLESS:
            missing = [(key, size) for key, size in sizes if key not in came]
            try:
                async for index, content in self._features(missing, source):
                    key, size = missing[index]
                    await _check(content, key, size)
                    await self._store.write_features(key, content.data)
                    self._book.transferred("features", size)
                    came.add(key)
                    fruitless = 0
                break
            except TransferError as error:
                fruitless += 1
                is_corrupt |= isinstance(error, _CorruptError)
                self._tell("features", source, error)
                if error.is_final:
                    break
                await asyncio.sleep(PAUSE_S)
        return is_corrupt

    async def _features(self, missing: Sequence[tuple[bytes, int]], source: Source):
        keys = tuple(key for key, _ in missing)
        sizes = tuple(size for _, size in missing)
        wanted = Wanted(ContentKind.FEATURES, self._store.feature_layout, 0, keys, sizes)
        async with aclosing(self._transport.fetch(source, wanted)) as contents:
            async for content in contents:
                if isinstance(content, Content):
                    yield content.index, content

    async def _bring_pages(
        self,
        request: Request,
        source: Source,
        own: Sequence[bytes],
        start: tuple[int, _Progress],
    ) -> str:
        epoch, progress = start
        theirs, most = tuple(own), progress.most
        fruitless, began = 0, progress.here
        while progress.here < progress.most and fruitless < MAX_FRUITLESS:
            before = progress.here
            keys = theirs[progress.here : progress.most]
            sizes = (self._store.page_bytes,) * len(keys)
            wanted = Wanted(ContentKind.PAGE, self._store.page_layout, epoch, keys, sizes)
            try:
                said = await self._fetch_pages(source, wanted, own, progress)
            except TransferError as error:
                fruitless = 0 if progress.here > before else fruitless + 1
                progress.is_corrupt |= isinstance(error, _CorruptError)
                self._tell("pages", source, error)
                if error.is_final:
                    break
                await asyncio.sleep(PAUSE_S)
                continue
            if said == epoch:
                break
            # their cache was emptied more or less often than ours: ask by their names
            fruitless += 1
            epoch, theirs = said, await self._chain(request, said)
        if progress.is_corrupt:
            return "corrupt"
        if progress.here == most:
            return "whole"
        return "partial" if progress.here > began else "failed"

    async def _fetch_pages(
        self, source: Source, wanted: Wanted, own: Sequence[bytes], progress: _Progress
    ) -> int:
        """One call; takes in what comes and returns the source's epoch."""
        first = progress.here
        waiting: list[tuple[bytes, Data]] = []
        epoch = wanted.epoch
        failure: TransferError | None = None
        try:
            async with aclosing(self._transport.fetch(source, wanted)) as contents:
                async for content in contents:
                    if isinstance(content, Holdings):
                        epoch = content.epoch
                        continue
                    place = progress.here + len(waiting)
                    if content.index != place - first:
                        # one in between has gone: what lies behind it is of no use
                        break
                    await _check(content, wanted.keys[content.index], self._store.page_bytes)
                    waiting.append((own[place], content.data))
                    is_full = len(waiting) == self._store.pages_at_once
                    if is_full and not await self._land(waiting, progress):
                        return epoch
        except TransferError as error:
            failure = error
        await self._land(waiting, progress)
        if failure is not None:
            raise failure
        return epoch

    async def _land(self, waiting: list[tuple[bytes, Data]], progress: _Progress) -> bool:
        """Takes in what has come; False if there is no room for more."""
        num_waiting = len(waiting)
        landed = await self._store.write_pages(waiting) if waiting else 0
        self._book.transferred("pages", landed * self._store.page_bytes)
        progress.here += landed
        waiting.clear()
        if landed < num_waiting:
            progress.most = progress.here
        return landed == num_waiting

    def _tell(self, what: str, source: Source, error: Exception) -> None:
        if isinstance(error, WorkerError):
            # this worker's own end is no matter of transfers
            raise error
        if isinstance(error, TransferError):
            self._sources.failed(source, error)
        reason = f"{type(error).__name__}: {error}"
        _log.warning("transfer_broke what=%s source=%s reason=%s", what, source.address, reason)

    async def _chain(self, request: Request, epoch: int) -> tuple[bytes, ...]:
        size = self._page_tokens
        if len(request.prompt_token_ids) > LONG_PROMPT_TOKENS:
            return await asyncio.to_thread(chain, request, page_tokens=size, epoch=epoch)
        return chain(request, page_tokens=size, epoch=epoch)


class _CorruptError(TransferError):
    """A content is not what its hash says."""


async def _check(content: Content, key: bytes, num_bytes: int) -> None:
    if len(content.data) != num_bytes:
        raise _CorruptError(f"a content has {len(content.data)} bytes, expected {num_bytes}")
    if await content_hash_of(key, content.data) != content.sha256:
        raise _CorruptError("a content does not match its hash")
