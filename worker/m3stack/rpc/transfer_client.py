"""Fetches contents from other workers over gRPC: one call a transfer, one connection a source."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass

import grpc

from m3stack.transfer.interface import Content, Holdings, TransferError, Wanted
from m3stack.types import Source
from m3stack.worker.v1 import worker_pb2 as pb
from m3stack.worker.v1 import worker_pb2_grpc as pb_grpc

# longest silence of a source, and longest time that it may say it is busy and send nothing
PROGRESS_S = 5.0
PATIENCE_S = 30.0
# connections kept; sources are few, but their addresses change
MAX_CONNECTIONS = 64
_OPTIONS = (
    ("grpc.max_receive_message_length", 16 << 20),
    # a source that was restarted is tried again at once
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
# the source says no; whatever else ends a call may be better the next time
_FINAL = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)


@dataclass(slots=True)
class _Call:
    """A transfer under way.

    Attributes:
        stream: what the source says.
        patience_s: how long it may still be busy and send nothing.
    """

    stream: grpc.aio.UnaryStreamCall
    patience_s: float


class GrpcTransport:
    """The filling of `transfer.interface.Transport` over gRPC; belongs to one event loop.

    Args:
        credentials: to speak TLS with; None: plain text.
        progress_s: longest silence of a source.
        patience_s: longest time that it may be busy and send nothing, over a whole transfer.
    """

    def __init__(
        self,
        credentials: grpc.ChannelCredentials | None = None,
        *,
        progress_s: float = PROGRESS_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._credentials = credentials
        self._progress_s = progress_s
        self._patience_s = patience_s
        self._channels: OrderedDict[Source, grpc.aio.Channel] = OrderedDict()

    async def close(self) -> None:
        while self._channels:
            await self._channels.popitem()[1].close()

    async def fetch(
        self, source: Source, wanted: Wanted
    ) -> AsyncGenerator[Holdings | Content, None]:
        stub = pb_grpc.TransferServiceStub(await self._channel(source))
        request = pb.FetchRequest(
            kind=wanted.kind.value,  # type: ignore[arg-type]
            layout=wanted.layout,
            epoch=wanted.epoch,
            keys=wanted.keys,
        )
        call = _Call(stub.Fetch(request), self._patience_s)
        try:
            holdings = await self._read(call)
            if holdings is None or holdings.WhichOneof("body") != "holdings":
                raise TransferError("the source does not say what it holds", is_final=True)
            yield Holdings(holdings.holdings.epoch, tuple(holdings.holdings.indices))
            last = -1
            while (first := await self._read(call)) is not None:
                is_next = last < first.piece.index < len(wanted.keys)
                if first.WhichOneof("body") != "piece" or not is_next:
                    raise TransferError("the source sends what was not asked for", is_final=True)
                last = first.piece.index
                yield await self._content(call, first, wanted.sizes[last])
        finally:
            call.stream.cancel()

    async def _content(self, call: _Call, response: pb.FetchResponse, size: int) -> Content:
        """The content of a size that begins with a message."""
        index, total = response.piece.index, response.piece.total_bytes
        # before room is made for it
        if total != size:
            text = f"a content of {total} bytes is announced where {size} are expected"
            raise TransferError(text, is_final=True)
        data, end = bytearray(total), 0
        while True:
            piece = response.piece
            start, end = end, end + len(piece.data)
            if (piece.index, piece.offset, piece.total_bytes) != (index, start, total):
                raise TransferError("the pieces of a content do not follow one another")
            if end > total or (end == start and total):
                raise TransferError("a content is not as long as was announced", is_final=True)
            data[start:end] = piece.data
            if end == total:
                return Content(index, data, piece.sha256)
            following = await self._read(call)
            if following is None:
                raise TransferError(f"the call ended after {end} of {total} bytes")
            response = following

    async def _read(self, call: _Call) -> pb.FetchResponse | None:
        """The next message but for signs of life; None at the end of a call that went well."""
        loop = asyncio.get_running_loop()
        began_at, was_busy = loop.time(), False
        while True:
            message = await self._read_any(call.stream)
            waited_s = loop.time() - began_at
            if message is None or message.WhichOneof("body") != "busy":
                if was_busy:
                    call.patience_s -= waited_s
                return message
            was_busy = True
            if waited_s > call.patience_s:
                reason = f"the source was busy for {self._patience_s:g} s"
                raise TransferError(reason, is_final=True, is_silent=True)

    async def _read_any(self, call: grpc.aio.UnaryStreamCall) -> pb.FetchResponse | None:
        """The next message of any kind."""
        try:
            async with asyncio.timeout(self._progress_s):
                message = await call.read()
                if isinstance(message, pb.FetchResponse):
                    return message
                # the end of the stream is a marker object of another type
                status = await call.code()
                details = await call.details()
        except TimeoutError:
            # nobody waits for the same silence twice
            reason = f"the source was silent for {self._progress_s:g} s"
            raise TransferError(reason, is_final=True, is_silent=True) from None
        except grpc.aio.AioRpcError as error:
            status, details = error.code(), error.details()
        if status is grpc.StatusCode.OK:
            return None
        reason = f"{status.name.lower()}: {details}"
        raise TransferError(reason, is_final=status in _FINAL)

    async def _channel(self, source: Source) -> grpc.aio.Channel:
        channel = self._channels.pop(source, None)
        if channel is None:
            channel = self._connect(source)
        self._channels[source] = channel
        if len(self._channels) > MAX_CONNECTIONS:
            with suppress(asyncio.CancelledError):
                await self._channels.popitem(last=False)[1].close()
        return channel

    def _connect(self, source: Source) -> grpc.aio.Channel:
        # said in full: the name of a host may be that of one of gRPC's other ways, such as `unix`
        target = f"dns:///{source.address}"
        if self._credentials is None:
            return grpc.aio.insecure_channel(target, options=_OPTIONS)
        name = (("grpc.ssl_target_name_override", source.tls_name),) if source.tls_name else ()
        return grpc.aio.secure_channel(target, self._credentials, options=(*_OPTIONS, *name))
