"""The servicer that hands out pages and features to other workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterator
from contextlib import aclosing
from typing import TypeVar

import grpc

from m3stack.errors import ErrorKind, WorkerError
from m3stack.rpc.server import abort
from m3stack.transfer.interface import content_hash_of
from m3stack.transfer.port import Data
from m3stack.transfer.store import ContentStore
from m3stack.worker.v1 import worker_pb2 as pb
from m3stack.worker.v1 import worker_pb2_grpc as pb_grpc

MAX_PIECE_BYTES = 2 << 20
KEY_BYTES = 32
# how often a source says that it is alive while it has nothing to send
SIGN_S = 1.0
# each holds the contents of one turn of the engine and, ready to go, of the next
MAX_TRANSFERS = 8

Call = grpc.aio.ServicerContext[pb.FetchRequest, pb.FetchResponse]
Contents = AsyncGenerator[tuple[int, Data], None]
Answer = TypeVar("Answer")
_BUSY = pb.FetchResponse(busy=pb.Busy())


class TransferService(pb_grpc.TransferServiceServicer):
    """Refuses everything until `open_for` has named the contents.

    Args:
        sign_s: how often a call says that it is alive while it has nothing to send.
    """

    def __init__(self, *, sign_s: float = SIGN_S) -> None:
        self._sign_s = sign_s
        self._store: ContentStore | None = None
        self._refusal = WorkerError(
            ErrorKind.WORKER_UNAVAILABLE, "the worker is still loading its model"
        )
        self._places = asyncio.Semaphore(MAX_TRANSFERS)

    def open_for(self, store: ContentStore) -> None:
        self._store = store

    def refuse(self, reason: str) -> None:
        """There is nothing to be had here, ever."""
        self._refusal = WorkerError(ErrorKind.INVALID_REQUEST, reason)

    async def Fetch(self, request: pb.FetchRequest, context: Call) -> None:
        try:
            store = self._ready()
            _check_request(request, store)
            await self._take_place(context)
            try:
                await self._fetch(store, request, context)
            finally:
                self._places.release()
        except WorkerError as error:
            await abort(context, error)

    async def _fetch(self, store: ContentStore, request: pb.FetchRequest, context: Call) -> None:
        keys = list(request.keys)
        if request.kind == pb.CONTENT_KIND_PAGE:
            asked = store.held_pages(request.epoch, keys)
            epoch, held = await self._meanwhile(asked, context)
            indices = list(range(held))
            contents = _pages(store, keys, held)
        else:
            epoch = request.epoch
            indices = await self._meanwhile(store.held_features(keys), context)
            contents = _features(store, keys, indices)
        await context.write(pb.FetchResponse(holdings=pb.Holdings(epoch=epoch, indices=indices)))
        async with aclosing(contents):
            while True:
                following = await self._meanwhile(anext(contents, None), context)
                if following is None:
                    break
                index, data = following
                digest = await content_hash_of(keys[index], data)
                for piece in _pieces(index, data, digest):
                    await context.write(pb.FetchResponse(piece=piece))

    async def _take_place(self, context: Call) -> None:
        # one waiter from begin to end: who came first is served first
        task = asyncio.ensure_future(self._places.acquire())
        try:
            while not (await asyncio.wait({task}, timeout=self._sign_s))[0]:
                await context.write(_BUSY)
        except BaseException:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                self._places.release()
            raise

    async def _meanwhile(self, work: Awaitable[Answer], context: Call) -> Answer:
        """What comes of some work; says that this end is alive until it does."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=self._sign_s))[0]:
                await context.write(_BUSY)
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                # a generator cannot be closed while it runs
                await asyncio.wait({task})

    def _ready(self) -> ContentStore:
        if self._store is None:
            raise self._refusal
        return self._store


def _check_request(request: pb.FetchRequest, store: ContentStore) -> None:
    kinds = {
        pb.CONTENT_KIND_PAGE: store.page_layout,
        pb.CONTENT_KIND_FEATURES: store.feature_layout,
    }
    own = kinds.get(request.kind)
    if own is None:
        raise WorkerError(
            ErrorKind.INVALID_REQUEST, f"kind is {request.kind}, expected a page or features"
        )
    if request.layout != own:
        raise WorkerError(
            ErrorKind.INVALID_REQUEST,
            f"the layouts differ: {request.layout!r} is wanted, {own!r} is here",
            "layout",
        )
    if not request.keys or any(len(key) != KEY_BYTES for key in request.keys):
        raise WorkerError(
            ErrorKind.INVALID_REQUEST, f"keys must be there and have {KEY_BYTES} bytes", "keys"
        )


async def _pages(store: ContentStore, keys: list[bytes], held: int) -> Contents:
    """Pages in order; while some are sent, the next ones are read."""
    size = store.pages_at_once
    batches = [range(first, min(first + size, held)) for first in range(0, held, size)]

    async def read(batch: range) -> list[Data | None]:
        return await store.read_pages([keys[index] for index in batch])

    following = asyncio.ensure_future(read(batches[0])) if batches else None
    try:
        for number, batch in enumerate(batches):
            assert following is not None
            contents = await following
            is_last = number + 1 == len(batches)
            following = None if is_last else asyncio.ensure_future(read(batches[number + 1]))
            for index, data in zip(batch, contents, strict=True):
                if data is None:
                    # nobody can use what lies behind it
                    return
                yield index, data
    finally:
        if following is not None:
            following.cancel()


async def _features(store: ContentStore, keys: list[bytes], indices: list[int]) -> Contents:
    for index in indices:
        data = await store.read_features(keys[index])
        if data is not None:
            yield index, data


def _pieces(index: int, data: Data, digest: bytes) -> Iterator[pb.Piece]:
    total = len(data)
    view = memoryview(data)
    for offset in range(0, max(total, 1), MAX_PIECE_BYTES):
        end = min(offset + MAX_PIECE_BYTES, total)
        yield pb.Piece(
            index=index,
            offset=offset,
            data=bytes(view[offset:end]),
            total_bytes=total,
            sha256=digest if end == total else b"",
        )
