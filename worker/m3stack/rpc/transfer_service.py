"""The servicer that hands out pages and features to other workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import aclosing
from typing import TypeVar

import grpc

from m3stack.errors import ErrorKind, WorkerError
from m3stack.rpc.server import abort
from m3stack.transfer.handing_out import Asked, checked, contents, holdings
from m3stack.transfer.interface import Content
from m3stack.transfer.store import ContentStore
from m3stack.worker.v1 import worker_pb2 as pb
from m3stack.worker.v1 import worker_pb2_grpc as pb_grpc

MAX_PIECE_BYTES = 2 << 20
# how often a source says that it is alive while it has nothing to send
SIGN_S = 1.0
# each holds the contents of one turn of the engine and, ready to go, of the next
MAX_TRANSFERS = 8

Call = grpc.aio.ServicerContext[pb.FetchRequest, pb.FetchResponse]
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

    async def close(self) -> None:
        """Hands nothing out any more; calls under way end with their server."""
        self._store = None
        reason = "the worker is stopping"
        self._refusal = WorkerError(ErrorKind.WORKER_UNAVAILABLE, reason)

    async def Fetch(self, request: pb.FetchRequest, context: Call) -> None:
        try:
            store = self._ready()
            asked = checked(
                store,
                kind=request.kind,
                layout=request.layout,
                epoch=request.epoch,
                keys=request.keys,
            )
            await self._take_place(context)
            try:
                await self._fetch(store, asked, context)
            finally:
                self._places.release()
        except WorkerError as error:
            await abort(context, error)

    async def _fetch(self, store: ContentStore, asked: Asked, context: Call) -> None:
        held = await self._meanwhile(holdings(store, asked), context)
        said = pb.Holdings(epoch=held.epoch, indices=held.indices)
        await context.write(pb.FetchResponse(holdings=said))
        async with aclosing(contents(store, asked, held)) as found:
            while True:
                content = await self._meanwhile(anext(found, None), context)
                if content is None:
                    break
                for piece in _pieces(content):
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


def _pieces(content: Content) -> Iterator[pb.Piece]:
    total = len(content.data)
    view = memoryview(content.data)
    for offset in range(0, max(total, 1), MAX_PIECE_BYTES):
        end = min(offset + MAX_PIECE_BYTES, total)
        yield pb.Piece(
            index=content.index,
            offset=offset,
            data=bytes(view[offset:end]),
            total_bytes=total,
            sha256=content.sha256 if end == total else b"",
        )
