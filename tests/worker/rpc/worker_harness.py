"""A worker's gRPC side on the loopback interface, in front of an engine over the history model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from m3stack.client import AsyncWorkerClient
from m3stack.engine.engine import Engine, EngineParts, EngineSettings
from m3stack.engine.plan import StepPlan, StepResult
from m3stack.engine.runner import ModelRunner
from m3stack.rpc.admin import AdminService
from m3stack.rpc.admission import MediaAdmission
from m3stack.rpc.checks import ModelLimits
from m3stack.rpc.server import ServiceParts, ServiceSettings, WorkerService
from m3stack.rpc.sessions import SessionTable
from m3stack.rpc.source_addresses import AllowedSources
from m3stack.rpc.status import StatusBoard
from m3stack.rpc.transfer_client import GrpcTransport
from m3stack.rpc.transfer_service import TransferService
from m3stack.telemetry import WorkerMetrics
from m3stack.transfer.layout import page_form
from m3stack.transfer.port import RankPort
from m3stack.transfer.pull import Puller
from m3stack.transfer.store import ContentStore
from m3stack.types import Event, Request, Role, Tokens, WorkerState
from m3stack.worker.v1 import worker_pb2 as pb
from m3stack.worker.v1 import worker_pb2_grpc as pb_grpc
from tests.worker.engine.history_model import (
    CPU,
    EOS_ID,
    FEATURE_BYTES,
    IMAGE_ID,
    PAGE,
    VIDEO_ID,
    VOCAB,
    Stack,
)

# a bound on hangs, not on speed
TIMEOUT_S = 100
CONTEXT = 200
LIMITS = ModelLimits(
    fingerprint=b"f" * 32,
    vocab_size=VOCAB,
    max_context_tokens=CONTEXT,
    eos_token_id=EOS_ID,
    image_token_id=IMAGE_ID,
    video_token_id=VIDEO_ID,
    channels=3,
    patch_size=2,
    temporal_patch_size=2,
    merge_size=2,
    feature_bytes_per_token=FEATURE_BYTES,
)


class GatedRunner(ModelRunner):
    """The real runner, which a test can hold at the start of a step.

    Attributes:
        gate: steps begin while it is set.
        entered: set once a step is about to begin.
        steps_left: steps after which the gate closes by itself; none if not above 0.
    """

    gate: threading.Event
    entered: threading.Event
    steps_left: int

    def execute(self, plan: StepPlan) -> StepResult:
        self.entered.set()
        assert self.gate.wait(TIMEOUT_S)
        if self.steps_left > 0:
            self.steps_left -= 1
            if not self.steps_left:
                self.gate.clear()
        return super().execute(plan)


@dataclass(frozen=True, slots=True)
class Options:
    """What a test wants different."""

    max_waiting_requests: int = 100
    upload_timeout_s: float = TIMEOUT_S
    max_upload_bytes: int = 1 << 20
    state: WorkerState = WorkerState.READY
    role: Role = Role.ALL
    transfer_silence_s: float = TIMEOUT_S
    transfer_patience_s: float = TIMEOUT_S
    transfer_sign_s: float = TIMEOUT_S
    allowed_sources: str = ""
    keeps_pages: bool = True
    layout: str = "of the history model"


@dataclass(slots=True)
class Worker:
    """What a test can reach."""

    target: str
    stack: Stack
    engine: Engine
    runner: GatedRunner
    board: StatusBoard
    sessions: SessionTable
    admission: MediaAdmission
    metrics: WorkerMetrics
    client: AsyncWorkerClient
    stub: pb_grpc.WorkerServiceStub
    admin: pb_grpc.AdminServiceStub
    store: ContentStore
    puller: Puller
    transport: GrpcTransport

    async def tokens(self, request: Request) -> list[int]:
        return tokens_of([event async for event in self.client.generate(request)])

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for something the engine thread brings about."""
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                await asyncio.sleep(0.001)


def tokens_of(events: Sequence[Event]) -> list[int]:
    return [token for e in events if isinstance(e, Tokens) for token in e.token_ids]


@asynccontextmanager
async def worker(stack: Stack | None = None, options: Options = Options()) -> AsyncIterator[Worker]:
    """Serves until the block ends; then nothing may be left."""
    stack = stack or Stack()
    stack.runner.__class__ = GatedRunner
    runner = stack.runner
    assert isinstance(runner, GatedRunner)
    runner.gate, runner.entered = threading.Event(), threading.Event()
    runner.gate.set()
    runner.steps_left = -1
    metrics = WorkerMetrics()
    sessions = SessionTable()
    board = StatusBoard(pb.Identity(worker_id="w", fingerprint=LIMITS.fingerprint))
    admission = MediaAdmission(
        stack.media,
        max_upload_bytes=options.max_upload_bytes,
        timeout_s=options.upload_timeout_s,
    )
    service = WorkerService(
        ServiceParts(sessions, board, admission, metrics),
        ServiceSettings(
            options.max_waiting_requests,
            options.upload_timeout_s,
            options.role,
            AllowedSources(options.allowed_sources),
        ),
    )
    engine = Engine(
        EngineParts(stack.scheduler, stack.pages, runner, stack.media, metrics),
        EngineSettings(
            page_tokens=PAGE,
            max_context_tokens=CONTEXT,
            eos_token_id=EOS_ID,
            segment_patches=stack.segment_patches,
            page_bytes=stack.pool.shape.bytes_per_page,
        ),
        deliver=sessions.deliver,
        on_exit=lambda failure: None,
    )
    engine.start()
    store = contents_of(stack, engine, options)
    transport = GrpcTransport(
        progress_s=options.transfer_silence_s, patience_s=options.transfer_patience_s
    )
    puller = Puller(
        store, transport, page_tokens=PAGE, book=metrics, keeps_pages=options.keeps_pages
    )
    service.open_for(engine, LIMITS, stack.constraints.compiler, puller)
    transfers = TransferService(sign_s=options.transfer_sign_s)
    transfers.open_for(store)
    admin = AdminService()
    admin.open_for(engine)
    board.set_load_source(lambda: engine.load)
    board.set_state(options.state)
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 16 << 20)])
    pb_grpc.add_WorkerServiceServicer_to_server(service, server)
    pb_grpc.add_AdminServiceServicer_to_server(admin, server)
    pb_grpc.add_TransferServiceServicer_to_server(transfers, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    target = f"127.0.0.1:{port}"
    channel = grpc.aio.insecure_channel(target)
    client = AsyncWorkerClient(target)
    subject = Worker(
        target,
        stack,
        engine,
        runner,
        board,
        sessions,
        admission,
        metrics,
        client,
        pb_grpc.WorkerServiceStub(channel),
        pb_grpc.AdminServiceStub(channel),
        store,
        puller,
        transport,
    )
    try:
        yield subject
        runner.gate.set()
        # the last call's `finally` may run just after its client saw the end
        await subject.until(lambda: sessions.num_open == 0)
        await subject.until(lambda: engine.load.running_requests == 0)
        assert engine.load.used_pages == 0
        await subject.until(lambda: stack.media.num_pinned == 0)
        assert admission.upload_bytes == 0
    finally:
        runner.gate.set()
        board.close()
        await client.close()
        await transport.close()
        await channel.close()
        await server.stop(0.1)
        engine.stop()
        assert await asyncio.to_thread(engine.join, TIMEOUT_S), "the engine thread hangs"
        stack.constraints.close()


def contents_of(stack: Stack, engine: Engine, options: Options) -> ContentStore:
    """The pages and features of a stack."""
    form = page_form(stack.pool.shape, 1)
    port = RankPort(stack.pool, form, range(1), features=stack.encoder, width=1, device=CPU)
    return ContentStore(
        engine,
        port,
        page_layout=options.layout,
        feature_layout=options.layout,
    )


def run(scenario: Callable[[], Awaitable[None]], *, timeout_s: float = 2 * TIMEOUT_S) -> None:
    """Runs a test's coroutine; no test waits longer than the timeout."""

    async def bounded() -> None:
        async with asyncio.timeout(timeout_s):
            await scenario()

    asyncio.run(bounded())
