"""The asyncio servicer: check, receive media, submit, relay events, cancel when the client goes."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import grpc

from m3stack.cache.media import MediaClaim, media_key
from m3stack.engine.grammar import GrammarCompiler
from m3stack.errors import GRPC_STATUS_NAME, ErrorKind, WorkerError
from m3stack.rpc import convert
from m3stack.rpc.admission import MediaAdmission, MediaDemand, Reservation
from m3stack.rpc.checks import ModelLimits, merged_tokens, patch_bytes, read_header
from m3stack.rpc.constraints import compile_constraint
from m3stack.rpc.sessions import Session, SessionTable
from m3stack.rpc.shared_pieces import reads_memory
from m3stack.rpc.source_addresses import AllowedSources
from m3stack.rpc.stages import pull_features, pull_pages, read_stage, staged
from m3stack.rpc.status import StatusBoard, WatchTiming
from m3stack.rpc.upload import NeededItem, Upload
from m3stack.telemetry import WorkerMetrics
from m3stack.transfer.pull import Puller
from m3stack.types import (
    Event,
    Finished,
    MediaSettled,
    Request,
    Role,
    Stage,
    Started,
    Tokens,
    WorkerState,
)
from m3stack.worker.v1 import worker_pb2 as pb
from m3stack.worker.v1 import worker_pb2_grpc as pb_grpc

_log = logging.getLogger(__name__)

DEFAULT_HEARTBEAT_MS = 1000
LONG_PROMPT_TOKENS = 32_768
MIN_HEARTBEAT_MS, MAX_HEARTBEAT_MS = 100, 60_000

Call = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]


class RequestSink(Protocol):
    """The engine, as far as calls are concerned."""

    def submit(self, handle: int, request: Request, *, upload_s: float = 0.0) -> None: ...

    def cancel(self, handle: int) -> None: ...


@dataclass(frozen=True, slots=True)
class ServiceParts:
    """What the servicer works with; all of it lives on the servicer's event loop."""

    sessions: SessionTable
    board: StatusBoard
    admission: MediaAdmission
    metrics: WorkerMetrics


@dataclass(frozen=True, slots=True)
class _Target:
    """Where requests go, and what they must agree with."""

    engine: RequestSink
    limits: ModelLimits
    grammars: GrammarCompiler
    puller: Puller | None


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    max_waiting_requests: int
    upload_timeout_s: float
    role: Role = Role.ALL
    allowed_sources: AllowedSources = AllowedSources()  # noqa: RUF009 - it never changes


@dataclass(frozen=True, slots=True)
class _Telling:
    """How a request's events are told.

    Attributes:
        brought: prompt tokens that came from another worker.
    """

    stage: Stage
    brought: int

    def started(self, event: Started) -> pb.GenerateResponse:
        message = convert.started_to_proto(event)
        message.started.transferred_tokens = min(self.brought, event.cached_tokens)
        return message

    def finished(self, event: Finished) -> pb.GenerateResponse:
        message = convert.finished_to_proto(event)
        message.finished.usage.transferred_tokens = min(self.brought, event.usage.cached_tokens)
        return message


class _EngineFailureError(WorkerError):
    """A request that the engine had accepted, and counted when it ended."""


class WorkerService(pb_grpc.WorkerServiceServicer):
    """The worker's two calls.

    Requests are refused until `open_for` has named the engine and the board says READY.
    """

    def __init__(self, parts: ServiceParts, settings: ServiceSettings) -> None:
        self._parts = parts
        self._settings = settings
        self._target: _Target | None = None

    def open_for(
        self,
        engine: RequestSink,
        limits: ModelLimits,
        grammars: GrammarCompiler,
        puller: Puller | None = None,
    ) -> None:
        """Requests within `limits` go to `engine` from now on, their constraints compiled.

        Args:
            puller: fetches what other workers have of a request; None leaves it to be computed.
        """
        self._target = _Target(engine, limits, grammars, puller)

    async def Generate(self, request_iterator: object, context: Call) -> None:
        request_id = "?"
        try:
            target = self._ready_target()
            header = await self._read_header(context)
            request_id = header.request_id
            await self._generate(target, header, context)
        except WorkerError as error:
            if not isinstance(error, _EngineFailureError):
                self._parts.metrics.request_refused(error.kind)
            _log.info(
                "request_failed request_id=%s kind=%s message=%s",
                _loggable(request_id),
                error.kind.name.lower(),
                _loggable(error.message),
            )
            await abort(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception:  # noqa: BLE001 - the call must end with a status of ours
            # writes to a client that has just left fail in many ways
            if context.done():
                return
            _log.exception("request_crashed request_id=%s", _loggable(request_id))
            await abort(context, WorkerError(ErrorKind.INTERNAL, "the worker failed"))

    async def Watch(
        self,
        request: pb.WatchRequest,
        context: grpc.aio.ServicerContext[pb.WatchRequest, pb.WatchResponse],
    ) -> None:
        heartbeat_ms = request.heartbeat_ms or DEFAULT_HEARTBEAT_MS
        if not MIN_HEARTBEAT_MS <= heartbeat_ms <= MAX_HEARTBEAT_MS:
            text = f"heartbeat_ms is {heartbeat_ms}, expected 0 or {MIN_HEARTBEAT_MS} to "
            error = WorkerError(
                ErrorKind.INVALID_REQUEST, text + str(MAX_HEARTBEAT_MS), "heartbeat_ms"
            )
            await abort(context, error)
        timing = WatchTiming(heartbeat_ms / 1000)
        watch = self._parts.board.watch(timing, with_cache=request.cache_events)
        async with aclosing(watch) as messages:
            async for message in messages:
                if message.HasField("identity"):
                    can_read = reads_memory(request.memory, request.memory_token)
                    message.identity.reads_memory = can_read
                await context.write(message)

    def _ready_target(self) -> _Target:
        state = self._parts.board.state
        if state is WorkerState.READY and self._target is not None:
            return self._target
        what = "stopping" if state is WorkerState.DRAINING else "still loading its model"
        raise WorkerError(ErrorKind.WORKER_UNAVAILABLE, f"the worker is {what}")

    async def _read_header(self, context: Call) -> pb.GenerateHeader:
        timeout_s = self._settings.upload_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                message = await _read(context)
        except TimeoutError:
            raise WorkerError(
                ErrorKind.DEADLINE_EXCEEDED, f"no header arrived within {timeout_s:g} s"
            ) from None
        if message is None or message.WhichOneof("body") != "header":
            raise WorkerError(ErrorKind.INVALID_REQUEST, "the first message must be a header")
        return message.header

    async def _generate(self, target: _Target, header: pb.GenerateHeader, context: Call) -> None:
        parts, engine, limits = self._parts, target.engine, target.limits
        stage = read_stage(header, self._settings.role, self._settings.allowed_sources)
        if len(header.prompt_token_ids) > LONG_PROMPT_TOKENS:
            # checks of a million ids would hold up every other stream
            request = await asyncio.to_thread(read_header, header, limits)
        else:
            request = read_header(header, limits)
        request = staged(request, stage)
        queued, most = parts.sessions.num_queued, self._settings.max_waiting_requests
        if queued >= most:
            raise WorkerError(
                ErrorKind.OVERLOADED, f"{queued} requests are waiting, the limit is {most}"
            )
        loop = asyncio.get_running_loop()
        if request.constraint is not None:
            asked_at = loop.time()
            await compile_constraint(target.grammars, request.constraint)
            parts.metrics.constraint_waited(loop.time() - asked_at)
        began_at = loop.time()
        session = parts.sessions.open()
        reservation: Reservation | None = None
        is_submitted = False
        try:
            if request.media:
                reservation = await parts.admission.reserve(_demands(request, limits))
                await pull_features(stage, target.puller, reservation)
                sizes = [patch_bytes(item, limits) for item in request.media]
                received = await self._receive_media(sizes, reservation, context)
                request = _with_patches(request, received)
                del received
            brought = await pull_pages(stage, target.puller, request)
            upload_s = loop.time() - began_at if request.media or brought else 0.0
            engine.submit(session.handle, request, upload_s=upload_s)
            is_submitted = True
            # the engine owns the patches now: keep no reference here
            del request, header
            await self._relay(session, reservation, context, _Telling(stage, brought))
        finally:
            # after an end this is too late and harmless; otherwise the client is gone
            if is_submitted:
                engine.cancel(session.handle)
            elif reservation is not None:
                reservation.release_features()
            if reservation is not None:
                reservation.release_upload()
            parts.sessions.close(session)

    async def _receive_media(
        self, sizes: Sequence[int], reservation: Reservation, context: Call
    ) -> Mapping[int, bytearray]:
        """Asks for what is needed and receives it; `sizes` are the patch bytes of all items."""
        needs = pb.MediaNeeds(item_indices=reservation.needed)
        await context.write(pb.GenerateResponse(needs=needs))
        self._parts.metrics.media_named(num_held=len(sizes) - len(reservation.needed))
        upload = Upload(lambda: _read(context), self._settings.upload_timeout_s)
        needed = [NeededItem(index, sizes[index]) for index in reservation.needed]
        received = await upload.receive(needed)
        if upload.was_shared:
            await context.write(pb.GenerateResponse(taken=pb.MediaTaken()))
        self._parts.metrics.patches_received(reservation.upload_bytes)
        return received

    async def _relay(
        self,
        session: Session,
        reservation: Reservation | None,
        context: Call,
        telling: _Telling,
    ) -> None:
        """Sends events until the request ends; raises its failure."""
        while True:
            for event in _merged(await session.take()):
                if isinstance(event, Tokens):
                    if not telling.stage.is_silent:
                        await context.write(convert.tokens_to_proto(event))
                elif isinstance(event, Started):
                    await context.write(telling.started(event))
                elif isinstance(event, MediaSettled):
                    if reservation is not None:
                        reservation.release_upload()
                elif isinstance(event, Finished):
                    await context.write(telling.finished(event))
                    return
                else:
                    raise _EngineFailureError(event.kind, event.message, event.param)


def _demands(request: Request, limits: ModelLimits) -> list[MediaDemand]:
    assert request.patch_format is not None
    return [
        MediaDemand(
            MediaClaim(
                media_key(item, request.patch_format),
                merged_tokens(item, limits) * limits.feature_bytes_per_token,
            ),
            patch_bytes(item, limits),
        )
        for item in request.media
    ]


def _with_patches(request: Request, received: Mapping[int, bytearray]) -> Request:
    media = tuple(
        dataclasses.replace(item, patches=received.get(index))
        for index, item in enumerate(request.media)
    )
    return dataclasses.replace(request, media=media)


def _merged(events: Sequence[Event]) -> Iterator[Event]:
    """The same events with neighbouring tokens in one: a slow reader gets fewer messages."""
    waiting: list[Tokens] = []
    for event in events:
        if isinstance(event, Tokens):
            waiting.append(event)
            continue
        if waiting:
            yield _join(waiting)
            waiting = []
        yield event
    if waiting:
        yield _join(waiting)


def _join(parts: Sequence[Tokens]) -> Tokens:
    if len(parts) == 1:
        return parts[0]
    return Tokens(
        tuple(token for part in parts for token in part.token_ids),
        tuple(entry for part in parts for entry in part.logprobs),
    )


async def _read(context: Call) -> pb.GenerateRequest | None:
    message = await context.read()
    # the end of the stream is a marker object of another type
    return message if isinstance(message, pb.GenerateRequest) else None


async def abort(context: grpc.aio.ServicerContext, error: WorkerError) -> None:
    """Ends a call with an error in the form every client of a worker knows."""
    status = grpc.StatusCode[GRPC_STATUS_NAME[error.kind]]
    detail = convert.error_to_proto(error.kind, error.message, error.param)
    await context.abort(status, error.message, ((convert.ERROR_TRAILER, detail),))


def _loggable(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode().replace("\n", " ")
