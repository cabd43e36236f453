"""The servicer for operators: empty the prefix cache, explain where a request's time went."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import grpc

from m3stack.engine.account import Account
from m3stack.errors import ErrorKind, WorkerError
from m3stack.rpc import convert
from m3stack.rpc.server import abort
from m3stack.worker.v1 import worker_pb2 as pb
from m3stack.worker.v1 import worker_pb2_grpc as pb_grpc

Answer = TypeVar("Answer")


class AdminTarget(Protocol):
    """The engine, as far as operators are concerned; answers come on its own thread."""

    def forget_prefixes(self, done: Callable[[int], None]) -> None: ...

    def explain(self, request_id: str, done: Callable[[Account | None], None]) -> None: ...


class AdminService(pb_grpc.AdminServiceServicer):
    """Refuses everything until `open_for` has named the engine."""

    def __init__(self) -> None:
        self._target: AdminTarget | None = None

    def open_for(self, target: AdminTarget) -> None:
        self._target = target

    async def FlushPrefixCache(
        self,
        request: pb.FlushPrefixCacheRequest,
        context: grpc.aio.ServicerContext[pb.FlushPrefixCacheRequest, pb.FlushPrefixCacheResponse],
    ) -> pb.FlushPrefixCacheResponse:
        try:
            freed = await _answer(self._ready().forget_prefixes)
        except WorkerError as error:
            await abort(context, error)
            raise AssertionError("invariant: abort raises") from error
        return pb.FlushPrefixCacheResponse(freed_pages=freed)

    async def Explain(
        self,
        request: pb.ExplainRequest,
        context: grpc.aio.ServicerContext[pb.ExplainRequest, pb.ExplainResponse],
    ) -> pb.ExplainResponse:
        try:
            target = self._ready()
            account = await _answer(partial(target.explain, request.request_id))
        except WorkerError as error:
            await abort(context, error)
            raise AssertionError("invariant: abort raises") from error
        if account is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                "the worker has no account of that request: it never came here, "
                "or too many have ended since",
            )
            raise AssertionError("invariant: abort raises")
        return convert.account_to_proto(account)

    def _ready(self) -> AdminTarget:
        if self._target is None:
            raise WorkerError(ErrorKind.WORKER_UNAVAILABLE, "the worker is still loading its model")
        return self._target


async def _answer(ask: Callable[[Callable[[Answer], None]], None]) -> Answer:
    """What the engine answers; it calls back on its own thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Answer] = loop.create_future()

    def settle(answer: Answer) -> None:
        # the call may have been given up meanwhile
        if not future.done():
            future.set_result(answer)

    def answer_from_engine(answer: Answer) -> None:
        loop.call_soon_threadsafe(settle, answer)

    ask(answer_from_engine)
    return await future
