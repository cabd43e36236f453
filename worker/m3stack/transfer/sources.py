"""Whom to ask, and how much at once: a source that is silent holds up nobody who asks another."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from m3stack.transfer.interface import TransferError
from m3stack.types import Source

# transfers of one source at once, and of all; each holds `store.MAX_BYTES_AT_ONCE` at most
MAX_OF_ONE, MAX_OF_ALL = 2, 8
# a request waits that long for its turn, then computes
PLACE_WAIT_S = 5.0
# the longest that a transfer may take, and that a source is left alone after it was silent
MAX_TRANSFER_S = 60.0
SILENCE_S = 10.0


class Sources:
    """Places for transfers; belongs to the event loop."""

    def __init__(self) -> None:
        self._places: defaultdict[Source, int] = defaultdict(int)
        self._changed = asyncio.Condition()
        self._silent_until: dict[Source, float] = {}

    @asynccontextmanager
    async def place(self, source: Source) -> AsyncIterator[None]:
        """The right to ask a source, for as long as a transfer may take.

        Raises:
            TransferError: it is left alone for now, has too much to do, or the time is up.
        """
        try:
            async with asyncio.timeout(PLACE_WAIT_S), self._changed:
                await self._changed.wait_for(
                    lambda: self._is_silent(source) or self._is_free(source)
                )
                if self._is_silent(source):
                    raise TransferError("the source was silent a moment ago", is_final=True)
                self._places[source] += 1
        except TimeoutError:
            text = f"no place among its transfers within {PLACE_WAIT_S:g} s"
            raise TransferError(text, is_final=True) from None
        try:
            async with asyncio.timeout(MAX_TRANSFER_S):
                yield
        except TimeoutError:
            text = f"the transfer was not over after {MAX_TRANSFER_S:g} s"
            raise TransferError(text, is_final=True) from None
        finally:
            self._places[source] -= 1
            if not self._places[source]:
                del self._places[source]
            async with self._changed:
                self._changed.notify_all()

    def failed(self, source: Source, error: TransferError) -> None:
        """A transfer from a source broke; one that was silent is left alone for a while."""
        if error.is_silent:
            now = asyncio.get_running_loop().time()
            held = self._silent_until.items()
            self._silent_until = {other: until for other, until in held if until > now}
            self._silent_until[source] = now + SILENCE_S

    def _is_silent(self, source: Source) -> bool:
        now = asyncio.get_running_loop().time()
        return now < self._silent_until.get(source, 0.0)

    def _is_free(self, source: Source) -> bool:
        is_free = sum(self._places.values()) < MAX_OF_ALL
        return is_free and self._places.get(source, 0) < MAX_OF_ONE
