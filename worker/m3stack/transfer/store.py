"""Contents in and out of a running worker: its pages by content key, its features by media key.

All of it happens on the engine thread between two steps, so a page is whole when it is read, and
nobody's when it is written. What a call may move is bounded: running requests wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from m3stack.engine.messages import Hand
from m3stack.engine.plan import FatalStepError, StepPlan
from m3stack.errors import ErrorKind, WorkerError
from m3stack.transfer.port import Data, Port

_log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

# some milliseconds of copies over the bus of a GPU
MAX_BYTES_AT_ONCE = 64 << 20


class BetweenSteps(Protocol):
    """The engine, as far as contents are concerned."""

    def between_steps(self, work: Callable[[Hand | None], None]) -> None: ...


@dataclass(frozen=True, slots=True)
class Room:
    """What a worker has of a chain of pages.

    Attributes:
        known: pages at its head that are here already.
        most: pages at its head that could be here without driving each other out.
    """

    known: int
    most: int


class ContentStore:
    """The pages and features of this worker; belongs to the event loop.

    Args:
        engine: runs what is to be done here.
        port: to the tensors; only ever touched on the engine thread.
        page_layout, feature_layout: the forms in words; what differs is of no use to each other.
    """

    def __init__(
        self,
        engine: BetweenSteps,
        port: Port,
        *,
        page_layout: str,
        feature_layout: str,
    ) -> None:
        self._engine = engine
        self._port = port
        self.page_bytes = port.page_bytes
        self.page_layout = page_layout
        self.feature_layout = feature_layout

    @property
    def pages_at_once(self) -> int:
        """Pages that one call may move."""
        return max(1, MAX_BYTES_AT_ONCE // max(1, self.page_bytes))

    async def epoch(self) -> int:
        """The cache epoch that keys of pages are made under."""
        return await self._ask(lambda hand: hand.pages.epoch)

    async def room(self, keys: Sequence[bytes]) -> Room:
        """What is here of a chain, and how much of it could be."""

        def look(hand: Hand) -> Room:
            known = hand.pages.known_length(keys)
            # those that are here must not be evicted for those that come
            held = hand.pages.match(keys)
            room = Room(known, min(len(keys), known + hand.pages.num_available))
            hand.pages.release(held)
            return room

        return await self._ask(look)

    async def held_pages(self, epoch: int, keys: Sequence[bytes]) -> tuple[int, int]:
        """The worker's own epoch, and how many pages at the head of a chain it holds."""

        def look(hand: Hand) -> tuple[int, int]:
            own = hand.pages.epoch
            return own, hand.pages.known_length(keys) if own == epoch else 0

        return await self._ask(look)

    async def read_pages(self, keys: Sequence[bytes]) -> list[Data | None]:
        """Contents of at most `pages_at_once` pages; None for one that is not here any more."""
        assert len(keys) <= self.pages_at_once
        return await self._ask(lambda hand: [self._read_page(hand, key) for key in keys])

    async def write_pages(self, pages: Sequence[tuple[bytes, Data]]) -> int:
        """Takes in pages, of one chain and in order; returns how many of them are here then."""
        assert len(pages) <= self.pages_at_once
        return await self._ask(lambda hand: self._write_pages(hand, pages))

    async def use_pages(self, keys: Sequence[bytes]) -> None:
        """Makes a chain the most recently used one, so that it is evicted last and from its end."""

        def use(hand: Hand) -> None:
            hand.pages.release(hand.pages.match(keys))

        await self._ask(use)

    async def held_features(self, keys: Sequence[bytes]) -> list[int]:
        """Which items' features are here, by index."""

        def look(hand: Hand) -> list[int]:
            return [index for index, key in enumerate(keys) if hand.media.is_encoded(key)]

        return await self._ask(look)

    async def read_features(self, key: bytes) -> Data | None:
        """The features of an item; None if they are not here (any more)."""
        found = bytearray()
        while True:
            part = slice(len(found), len(found) + MAX_BYTES_AT_ONCE)

            def read(hand: Hand, part: slice = part) -> Data | None:
                # evicted features are freed on this very thread: what the ledger has is there
                held = hand.media.is_encoded(key)
                return self._port.read_features(key, part) if held else None

            data = await self._ask(read)
            if data is None:
                return None
            found += data
            if len(data) < MAX_BYTES_AT_ONCE:
                return found

    async def write_features(self, key: bytes, content: Data) -> None:
        """Takes in the features of an item, if some request still has it pinned."""

        def write(hand: Hand) -> None:
            if not hand.media.is_promised(key):
                return
            self._port.keep_features(key, content)
            # whoever wanted them may have left just now
            if not hand.media.adopt(key):
                self._port.drop_features(key)

        await self._ask(write)

    def _read_page(self, hand: Hand, key: bytes) -> Data | None:
        if not hand.is_settled:
            # whether the host's copies of the step under way were made is not known yet
            shared = hand.pages.match([key])
            try:
                return self._port.read_page(shared[0]) if shared else None
            finally:
                hand.pages.release(shared)
        found = hand.pages.fetch(key)
        if found is None:
            return None
        page, is_copied = found
        try:
            if is_copied and page in _move_noted(hand):
                return None
            return self._port.read_page(page)
        finally:
            hand.pages.release([page])

    def _write_pages(self, hand: Hand, pages: Sequence[tuple[bytes, Data]]) -> int:
        taken: list[int] = []
        try:
            for index, (key, content) in enumerate(pages):
                if hand.pages.knows(key):
                    continue
                if hand.pages.num_available == 0:
                    return index
                taken += hand.pages.take(1)
                # what had to make room goes to the host first
                _move_noted(hand)
                self._port.write_page(taken[-1], content)
                hand.pages.register(taken[-1], key)
            return len(pages)
        finally:
            hand.pages.release(taken)

    async def _ask(self, work: Callable[[Hand], Answer]) -> Answer:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()

        def settle(outcome: Answer | None, error: Exception | None) -> None:
            # whoever waited may have left
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(outcome)  # type: ignore[arg-type]

        def tell(outcome: Answer | None, error: Exception | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, outcome, error)

        def run(hand: Hand | None) -> None:
            outcome, error = None, None
            if hand is None:
                error = WorkerError(ErrorKind.WORKER_UNAVAILABLE, "the engine has stopped")
            else:
                try:
                    outcome = work(hand)
                except FatalStepError:
                    # the engine ends with this; nobody may wait for it for ever
                    tell(None, WorkerError(ErrorKind.WORKER_UNAVAILABLE, "the engine has failed"))
                    raise
                except Exception as failure:  # noqa: BLE001 - the transfer alone fails
                    _log.exception("transfer_work_failed")
                    error = failure
            tell(outcome, error)

        self._engine.between_steps(run)
        return await future


def _move_noted(hand: Hand) -> frozenset[int]:
    """Makes the copies that the cache has noted; returns pages whose content is lost."""
    copies = hand.pages.take_copies()
    if not copies:
        return frozenset()
    try:
        failed = hand.runner.execute(StepPlan(rows=(), copies=copies)).failed_copies
    except FatalStepError:
        raise
    except Exception:  # noqa: BLE001 - which of them were made is not known
        _log.exception("page_copies_failed")
        failed = copies
    return hand.pages.distrust(failed)
