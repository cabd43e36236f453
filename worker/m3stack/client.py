"""Talks to a worker directly: identity, state, and generation from prepared prompts.

Prompts are token ids with placeholders expanded, media are patch rows; both come from the same
code the gateway uses, through the module `m3stack._gateway`.
"""

from __future__ import annotations

import asyncio
import hashlib
import queue
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import grpc

from m3stack.errors import ErrorKind, WorkerError
from m3stack.rpc import convert
from m3stack.rpc.tls import channel_credentials
from m3stack.types import (
    WHOLE,
    Event,
    Load,
    MediaItem,
    Request,
    Sampling,
    Stage,
    WorkerState,
)
from m3stack.worker.v1 import worker_pb2 as pb
from m3stack.worker.v1 import worker_pb2_grpc as pb_grpc

CHUNK_BYTES = 1 << 20
_CHANNEL_OPTIONS = (("grpc.max_receive_message_length", 16 << 20),)

# a kind for failures of the transport itself, which carry no detail of a worker
_KIND_OF_STATUS = {
    grpc.StatusCode.UNAVAILABLE: ErrorKind.WORKER_UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: ErrorKind.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED: ErrorKind.CANCELLED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorKind.OVERLOADED,
}


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Who a worker is.

    Attributes:
        fingerprint: of its model's facts, 32 bytes.
        facts: model facts by name, as in `worker.proto`.
    """

    worker_id: str
    version: str
    model_name: str
    fingerprint: bytes
    facts: dict[str, str | int]
    max_context_tokens: int
    page_tokens: int


@dataclass(frozen=True, slots=True)
class WatchUpdate:
    """One report of a worker; `info` is in the first one only."""

    info: WorkerInfo | None
    state: WorkerState
    load: Load


def default_sampling(max_tokens: int, **changes: object) -> Sampling:
    """Greedy sampling of at most `max_tokens`, with fields changed by name."""
    fields: dict[str, object] = {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": 0,
        "max_tokens": max_tokens,
        "min_tokens": 0,
        "ignore_eos": False,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": False,
        "top_logprobs": 0,
        "stop_token_ids": frozenset[int](),
        "logit_bias": {},
        "allowed_token_ids": frozenset[int](),
        "banned_token_ids": frozenset[int](),
    }
    unknown = set(changes) - set(fields)
    if unknown:
        raise TypeError(f"unknown sampling fields: {', '.join(sorted(unknown))}")
    return Sampling(**(fields | changes))  # type: ignore[arg-type]


class AsyncWorkerClient:
    """A connection to one worker for asyncio code.

    Args:
        target: address such as `127.0.0.1:50051`.
        tls_dir: speak TLS; `ca.crt` there has signed the worker's certificate, `tls.crt` and
            `tls.key`, if there, are shown to it.
    """

    def __init__(self, target: str, *, tls_dir: Path | None = None) -> None:
        self._channel = (
            grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
            if tls_dir is None
            else grpc.aio.secure_channel(
                target, channel_credentials(tls_dir), options=_CHANNEL_OPTIONS
            )
        )
        self._stub = pb_grpc.WorkerServiceStub(self._channel)

    async def __aenter__(self) -> AsyncWorkerClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def watch(self, heartbeat_ms: int = 0) -> AsyncGenerator[WatchUpdate, None]:
        """Reports until the worker stops.

        Raises:
            WorkerError: the worker cannot be reached or was lost.
        """
        call = self._stub.Watch(pb.WatchRequest(heartbeat_ms=heartbeat_ms))
        try:
            async for response in call:
                yield _update(response)
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from error
        finally:
            call.cancel()

    async def info(self) -> WorkerInfo:
        """Who the worker is."""
        updates = self.watch()
        try:
            async for update in updates:
                if update.info is not None:
                    return update.info
        finally:
            await updates.aclose()
        raise WorkerError(ErrorKind.WORKER_UNAVAILABLE, "the worker ended its report at once")

    async def wait_ready(self, timeout_s: float) -> None:
        """Returns once the worker takes requests.

        Raises:
            WorkerError: it is lost, or not ready in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    # a worker whose identity changes while loading ends its reports once
                    async for update in self.watch():
                        if update.state is WorkerState.READY:
                            return
        except TimeoutError:
            raise WorkerError(
                ErrorKind.DEADLINE_EXCEEDED, f"the worker was not ready after {timeout_s:g} s"
            ) from None

    async def generate(
        self, request: Request, *, fingerprint: bytes = b"", stage: Stage = WHOLE
    ) -> AsyncGenerator[Event, None]:
        """Events of a request, the last one Finished; leaving the loop cancels it.

        Args:
            request: media items bring their patches; those the worker holds are not sent.
            fingerprint: of the model the prompt was prepared for; empty leaves it unchecked.
            stage: what is wanted, and where parts of it may be had.

        Raises:
            WorkerError: the request failed; its kind says why.
        """
        call = self._stub.Generate()
        upload: asyncio.Task[None] | None = None
        try:
            header = convert.header_to_proto(request, fingerprint, stage)
            # a refused header ends the call while we write: the reason comes with the reading
            with suppress(asyncio.InvalidStateError):
                await call.write(pb.GenerateRequest(header=header))
            if not request.media:
                await _half_close(call)
            while True:
                response = await call.read()
                if not isinstance(response, pb.GenerateResponse):
                    break  # the end of the stream is a marker object of another type
                if response.WhichOneof("body") == "needs":
                    needed = _needed(request.media, response)
                    upload = asyncio.create_task(_send_media(call, request.media, needed))
                    continue
                event = convert.event_from_proto(response)
                if event is not None:
                    yield event
            status = await call.code()
            if status is not grpc.StatusCode.OK:
                raise await _call_failure(call, status)
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from error
        finally:
            if upload is not None:
                upload.cancel()
            call.cancel()


class WorkerClient:
    """A connection to one worker for plain, blocking code.

    Args:
        target: address such as `127.0.0.1:50051`.
        tls_dir: as for `AsyncWorkerClient`.
    """

    def __init__(self, target: str, *, tls_dir: Path | None = None) -> None:
        self._channel = (
            grpc.insecure_channel(target, options=_CHANNEL_OPTIONS)
            if tls_dir is None
            else grpc.secure_channel(target, channel_credentials(tls_dir), options=_CHANNEL_OPTIONS)
        )
        self._stub = pb_grpc.WorkerServiceStub(self._channel)

    def __enter__(self) -> WorkerClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def watch(self, heartbeat_ms: int = 0) -> Generator[WatchUpdate, None, None]:
        """Reports until the worker stops.

        Raises:
            WorkerError: the worker cannot be reached or was lost.
        """
        call = self._stub.Watch(pb.WatchRequest(heartbeat_ms=heartbeat_ms))
        try:
            for response in call:
                yield _update(response)
        except grpc.RpcError as error:
            raise _failure(error) from error
        finally:
            call.cancel()

    def info(self) -> WorkerInfo:
        """Who the worker is."""
        updates = self.watch()
        try:
            for update in updates:
                if update.info is not None:
                    return update.info
        finally:
            updates.close()
        raise WorkerError(ErrorKind.WORKER_UNAVAILABLE, "the worker ended its report at once")

    def generate(
        self, request: Request, *, fingerprint: bytes = b"", stage: Stage = WHOLE
    ) -> Generator[Event, None, None]:
        """As `AsyncWorkerClient.generate`."""
        outbox: queue.SimpleQueue[pb.GenerateRequest | None] = queue.SimpleQueue()
        header = convert.header_to_proto(request, fingerprint, stage)
        outbox.put(pb.GenerateRequest(header=header))
        if not request.media:
            outbox.put(None)
        call = self._stub.Generate(iter(outbox.get, None))
        try:
            for response in call:
                if response.WhichOneof("body") == "needs":
                    for message in _chunks(request.media, _needed(request.media, response)):
                        outbox.put(message)
                    outbox.put(None)
                    continue
                event = convert.event_from_proto(response)
                if event is not None:
                    yield event
        except grpc.RpcError as error:
            raise _failure(error) from error
        finally:
            # lets the thread that feeds the call end, whatever the call's fate
            outbox.put(None)
            call.cancel()


async def _send_media(
    call: grpc.aio.StreamStreamCall[pb.GenerateRequest, pb.GenerateResponse],
    media: Sequence[MediaItem],
    needed: Sequence[int],
) -> None:
    # a call that ends under way says why to whoever reads it
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        for message in _chunks(media, needed):
            await call.write(message)
        await call.done_writing()


async def _half_close(
    call: grpc.aio.StreamStreamCall[pb.GenerateRequest, pb.GenerateResponse],
) -> None:
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.done_writing()


def _needed(media: Sequence[MediaItem], response: pb.GenerateResponse) -> list[int]:
    """Items the worker asks for; all of them must have patches."""
    needed = list(response.needs.item_indices)
    for index in needed:
        if media[index].patches is None:
            raise WorkerError(
                ErrorKind.MEDIA_REJECTED,
                f"the worker does not hold media[{index}] and no patches were given",
                f"media[{index}]",
            )
    return needed


def _chunks(media: Sequence[MediaItem], needed: Sequence[int]) -> Iterator[pb.GenerateRequest]:
    for index in needed:
        patches = media[index].patches
        assert patches is not None
        view = memoryview(patches)
        digest = hashlib.sha256(view).digest()
        for offset in range(0, len(view), CHUNK_BYTES):
            data = bytes(view[offset : offset + CHUNK_BYTES])
            is_last = offset + len(data) == len(view)
            yield pb.GenerateRequest(
                chunk=pb.MediaChunk(
                    item_index=index,
                    offset=offset,
                    data=data,
                    patches_sha256=digest if is_last else b"",
                )
            )


def _update(response: pb.WatchResponse) -> WatchUpdate:
    info = None
    if response.HasField("identity"):
        given = response.identity
        facts = {field.name: value for field, value in given.facts.ListFields()}
        info = WorkerInfo(
            worker_id=given.worker_id,
            version=given.version,
            model_name=given.model_name,
            fingerprint=given.fingerprint,
            facts=facts,
            max_context_tokens=given.max_context_tokens,
            page_tokens=given.page_tokens,
        )
    return WatchUpdate(info, WorkerState(response.state), convert.load_from_proto(response.load))


def _failure(error: grpc.RpcError) -> WorkerError:
    """The failure a gRPC error stands for, from its detail if a worker sent one."""
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    return _explain(error.code(), error.details() or "", error.trailing_metadata() or ())


async def _call_failure(
    call: grpc.aio.StreamStreamCall[pb.GenerateRequest, pb.GenerateResponse],
    status: grpc.StatusCode,
) -> WorkerError:
    return _explain(status, await call.details() or "", await call.trailing_metadata() or ())


def _explain(
    status: grpc.StatusCode, details: str, trailers: Sequence[tuple[str, str | bytes]] | object
) -> WorkerError:
    for key, value in tuple(trailers):  # type: ignore[arg-type]
        if key == convert.ERROR_TRAILER and isinstance(value, bytes):
            return convert.error_from_proto(value)
    kind = _KIND_OF_STATUS.get(status, ErrorKind.INTERNAL)
    return WorkerError(kind, details or status.name.lower())
