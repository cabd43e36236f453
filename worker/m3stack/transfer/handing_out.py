"""What a worker hands out, whatever carries it: the source's half of every way of transfer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass

from m3stack.errors import ErrorKind, WorkerError
from m3stack.transfer.interface import Content, ContentKind, Holdings, content_hash_of
from m3stack.transfer.port import Data
from m3stack.transfer.store import ContentStore

KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Asked:
    """What another worker asks for, found to make sense; fields as in `worker.proto`."""

    kind: ContentKind
    epoch: int
    keys: tuple[bytes, ...]


def checked(
    store: ContentStore, *, kind: int, layout: str, epoch: int, keys: Iterable[bytes]
) -> Asked:
    """What is asked for.

    Args:
        store: of this worker.
        kind: number of a `ContentKind`.
        layout: of contents as the other worker takes them.

    Raises:
        WorkerError: it makes no sense, or other contents are held here; asking again is of no use.
    """
    layouts = {
        ContentKind.PAGE.value: store.page_layout,
        ContentKind.FEATURES.value: store.feature_layout,
    }
    own = layouts.get(kind)
    if own is None:
        raise WorkerError(ErrorKind.INVALID_REQUEST, f"kind is {kind}, expected a page or features")
    if layout != own:
        raise WorkerError(
            ErrorKind.INVALID_REQUEST,
            f"the layouts differ: {layout!r} is wanted, {own!r} is here",
            "layout",
        )
    asked = Asked(ContentKind(kind), epoch, tuple(keys))
    if not asked.keys or any(len(key) != KEY_BYTES for key in asked.keys):
        raise WorkerError(
            ErrorKind.INVALID_REQUEST, f"keys must be there and have {KEY_BYTES} bytes", "keys"
        )
    return asked


async def holdings(store: ContentStore, asked: Asked) -> Holdings:
    """Which of the keys are held here now.

    Raises:
        WorkerError: the engine has stopped.
    """
    if asked.kind is ContentKind.PAGE:
        epoch, num_held = await store.held_pages(asked.epoch, asked.keys)
        return Holdings(epoch, tuple(range(num_held)))
    return Holdings(asked.epoch, tuple(await store.held_features(asked.keys)))


async def contents(
    store: ContentStore, asked: Asked, held: Holdings
) -> AsyncGenerator[Content, None]:
    """The contents that were held, in the order of their keys and read as they are taken; close it.

    What has been evicted meanwhile is left out, and of a chain of pages what lies behind it.

    Raises:
        WorkerError: the engine has stopped.
    """
    if asked.kind is ContentKind.PAGE:
        found = _pages(store, asked.keys, len(held.indices))
    else:
        found = _features(store, asked.keys, held.indices)
    try:
        async for index, data in found:
            yield Content(index, data, await content_hash_of(asked.keys[index], data))
    finally:
        await found.aclose()


async def _pages(
    store: ContentStore, keys: tuple[bytes, ...], num_held: int
) -> AsyncGenerator[tuple[int, Data], None]:
    """Pages in order; while some are sent, the next ones are read."""
    size = store.pages_at_once
    batches = [range(first, min(first + size, num_held)) for first in range(0, num_held, size)]

    async def read(batch: range) -> list[Data | None]:
        return await store.read_pages([keys[index] for index in batch])

    following = asyncio.ensure_future(read(batches[0])) if batches else None
    try:
        for number, batch in enumerate(batches):
            assert following is not None
            pages = await following
            is_last = number + 1 == len(batches)
            following = None if is_last else asyncio.ensure_future(read(batches[number + 1]))
            for index, data in zip(batch, pages, strict=True):
                if data is None:
                    # nobody can use what lies behind it
                    return
                yield index, data
    finally:
        if following is not None:
            following.cancel()


async def _features(
    store: ContentStore, keys: tuple[bytes, ...], indices: tuple[int, ...]
) -> AsyncGenerator[tuple[int, Data], None]:
    for index in indices:
        data = await store.read_features(keys[index])
        if data is not None:
            yield index, data
