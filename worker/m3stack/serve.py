"""A worker's life: listen, load, serve, drain, stop."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import os
import signal
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import start_http_server

from m3stack import __version__
from m3stack.assemble import Assembly, Surroundings, assemble
from m3stack.cache.media import MediaLedger
from m3stack.config import WorkerConfig
from m3stack.encode_only import assemble_encoder
from m3stack.engine.engine import Engine
from m3stack.errors import LoadingStoppedError, StartupError
from m3stack.hardware import choose_hardware
from m3stack.life_metrics import LifeMetrics
from m3stack.loading import Loading
from m3stack.log_lines import set_up_logging
from m3stack.models.minimax_m3.config import M3Config
from m3stack.pools import context_limit
from m3stack.rpc.admin import AdminService
from m3stack.rpc.admission import MediaAdmission
from m3stack.rpc.server import ServiceParts, ServiceSettings, WorkerService
from m3stack.rpc.sessions import SessionTable
from m3stack.rpc.source_addresses import AllowedSources
from m3stack.rpc.status import StatusBoard
from m3stack.rpc.tls import server_credentials
from m3stack.telemetry import WorkerMetrics
from m3stack.transfers import Transfers
from m3stack.types import Role, WorkerState
from m3stack.vllm_names import VllmNames
from m3stack.worker.v1 import worker_pb2 as pb
from m3stack.worker.v1 import worker_pb2_grpc as pb_grpc

_log = logging.getLogger(__name__)

EXIT_DRAINED, EXIT_FAILED, EXIT_CUT = 0, 1, 3
SERVICE_NAME = pb.DESCRIPTOR.services_by_name["WorkerService"].full_name
ADMIN_NAME = pb.DESCRIPTOR.services_by_name["AdminService"].full_name
TRANSFER_NAME = pb.DESCRIPTOR.services_by_name["TransferService"].full_name
MAX_MESSAGE_BYTES = 16 << 20
# how long calls get to deliver their last message once everything has ended
FAREWELL_S = 2.0
WATCHDOG_INTERVAL_S = 0.5

_SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # two workers on one port would each see half of the requests
    ("grpc.so_reuseport", 0),
    # notice clients that vanished without a word, and let theirs notice us
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


@dataclass(frozen=True, slots=True)
class Listening:
    """Ports that a worker really listens on; 0 where there are no metrics."""

    port: int
    metrics_port: int


OnListening = Callable[[Listening], None]


def run_worker(config: WorkerConfig, *, on_listening: OnListening | None = None) -> int:
    """Runs a worker until a signal or a failure.

    The first SIGTERM or SIGINT drains: running requests finish within `drain_s`. A second one
    stops at once. While it loads one is enough; should loading not look up within a second, the
    process is ended here.

    Args:
        config: what to run.
        on_listening: told the ports once the worker answers (as loading, still).

    Returns:
        0 if every request had ended, 1 after a failure of the engine, 3 if requests were cut.

    Raises:
        StartupError: it could not start; says what to do.
    """
    set_up_logging(config.log_level)
    worker = _Worker(config)
    try:
        code = asyncio.run(worker.run(on_listening))
    except StartupError as error:
        if not worker.loading_hangs:
            raise
        _log.critical("startup_failed reason=%s", error)
        code = EXIT_FAILED
    if worker.loading_hangs:
        # an orderly end would wait for what does not end; ranks follow their leader
        logging.shutdown()
        os._exit(code)
    return code


class _Worker:
    """Everything that belongs to one run."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._worker_id = uuid.uuid4().hex
        self._hardware = choose_hardware(config)
        self._model_config = M3Config.from_dir(config.model_path)
        self._metrics = WorkerMetrics()
        self._life = LifeMetrics(self._metrics.registry, config.role)
        self._media = MediaLedger(config.vision_cache_bytes)
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        self._stop_asked = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._loading = Loading(config.model_name)
        self._engine_ended: asyncio.Future[BaseException | None] | None = None
        self._admin = AdminService()

    @property
    def loading_hangs(self) -> bool:
        """Whether loading was left behind on its thread."""
        return self._loading.hangs

    async def run(self, on_listening: OnListening | None) -> int:
        identity = self._identity(context_limit(self._config, self._model_config))
        self._board = StatusBoard(identity)
        self._board.listen(self._life.set_state)
        self._sessions = SessionTable()
        self._service = WorkerService(
            ServiceParts(
                sessions=self._sessions,
                board=self._board,
                admission=MediaAdmission(
                    self._media,
                    max_upload_bytes=self._config.max_upload_bytes,
                    timeout_s=self._config.upload_timeout_s,
                ),
                metrics=self._metrics,
            ),
            ServiceSettings(
                max_waiting_requests=self._config.max_waiting_requests,
                upload_timeout_s=self._config.upload_timeout_s,
                role=Role[self._config.role.upper()],
                allowed_sources=AllowedSources(self._config.allowed_sources),
            ),
        )
        self._transfers = Transfers(
            self._config.tls_dir,
            page_tokens=self._model_config.block_tokens,
            book=self._metrics,
        )
        self._engine_ended = asyncio.get_running_loop().create_future()
        self._catch_signals()
        server, port = await self._start_server()
        metrics_server = None
        try:
            metrics_server, metrics_port = self._start_metrics()
            if on_listening is not None:
                on_listening(Listening(port, metrics_port))
            return await self._load_and_serve()
        finally:
            self._board.close()
            await server.stop(FAREWELL_S)
            await self._transfers.close()
            if metrics_server is not None:
                await asyncio.to_thread(metrics_server.shutdown)
                metrics_server.server_close()

    async def _load_and_serve(self) -> int:
        build = assemble_encoder if self._config.role == "encode" else assemble
        loading = self._loading
        around = Surroundings(self._media, self._metrics, loading.show, loading.check, loading.fail)
        try:
            assembly = await loading.run(
                lambda: build(self._config, self._model_config, self._hardware, around),
                self._stop_asked,
            )
        except LoadingStoppedError:
            _log.info("stopped_while_loading hangs=%s", loading.hangs)
            return EXIT_DRAINED
        engine = self._start_engine(assembly)
        if assembly.group is not None:
            assembly.group.tell_losses_to(engine.abort)
        code = EXIT_FAILED
        try:
            code = await self._serve(engine)
        finally:
            engine.stop()
            await asyncio.to_thread(engine.join)
            await asyncio.to_thread(assembly.constraints.close)
            if assembly.group is not None:
                failed = self._engine_ended
                failure = failed.result() if failed is not None and failed.done() else None
                reason = "" if failure is None else str(failure) or type(failure).__name__
                await asyncio.to_thread(assembly.group.stop, reason)
            # the last events are on their way to the calls through this loop
            await asyncio.sleep(0)
            try:
                async with asyncio.timeout(FAREWELL_S):
                    await self._sessions.wait_empty()
            except TimeoutError:
                _log.warning("calls_cut count=%d", self._sessions.num_open)
        # a failure may come in the middle of an orderly stop
        assert self._engine_ended is not None
        return code if await self._engine_ended is None else EXIT_FAILED

    def _start_engine(self, assembly: Assembly) -> Engine:
        loop = asyncio.get_running_loop()
        ended = self._engine_ended
        assert ended is not None

        def report_end(failure: BaseException | None) -> None:
            loop.call_soon_threadsafe(ended.set_result, failure)

        engine = Engine(
            assembly.parts,
            assembly.settings,
            deliver=self._sessions.deliver,
            on_exit=report_end,
        )
        self._board.replace_identity(self._identity(assembly.limits.max_context_tokens))
        self._board.set_load_source(lambda: engine.load)
        self._board.set_cache_source(assembly.parts.pages.journal)
        # what is loaded stays: the collector need not walk it again and again
        gc.collect()
        gc.freeze()
        engine.start()
        puller = self._transfers.open_for(engine, assembly.contents)
        self._service.open_for(engine, assembly.limits, assembly.constraints.compiler, puller)
        self._admin.open_for(engine)
        return engine

    async def _serve(self, engine: Engine) -> int:
        self._board.set_state(WorkerState.READY)
        await self._set_health(is_serving=True)
        _log.info("ready model=%s", self._config.model_name)
        assert self._engine_ended is not None
        watchdog = asyncio.create_task(self._watch_steps(engine))
        stop_asked = asyncio.create_task(self._stop_asked.wait())
        try:
            await asyncio.wait(
                (stop_asked, self._engine_ended), return_when=asyncio.FIRST_COMPLETED
            )
            self._board.set_state(WorkerState.DRAINING)
        finally:
            watchdog.cancel()
            stop_asked.cancel()
        await self._set_health(is_serving=False)
        if self._engine_ended.done():
            return EXIT_FAILED
        return await self._drain()

    async def _drain(self) -> int:
        """Waits for running requests, as long as they may take."""
        _log.info("draining requests=%d drain_s=%g", self._sessions.num_open, self._config.drain_s)
        assert self._engine_ended is not None
        emptied = asyncio.create_task(self._sessions.wait_empty())
        stop_now = asyncio.create_task(self._stop_now.wait())
        try:
            await asyncio.wait(
                (emptied, stop_now, self._engine_ended),
                timeout=self._config.drain_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            emptied.cancel()
            stop_now.cancel()
        if self._engine_ended.done():
            return EXIT_FAILED
        if self._sessions.num_open == 0:
            _log.info("drained")
            return EXIT_DRAINED
        _log.warning("drain_incomplete requests=%d", self._sessions.num_open)
        return EXIT_CUT

    async def _watch_steps(self, engine: Engine) -> None:
        """Unhealthy while a step takes far longer than any step should."""
        is_stuck = False
        while True:
            await asyncio.sleep(WATCHDOG_INTERVAL_S)
            was_stuck, is_stuck = is_stuck, engine.step_age_s > self._config.stuck_step_s
            if is_stuck != was_stuck:
                _log.error("step_stuck is_stuck=%s age_s=%.1f", is_stuck, engine.step_age_s)
                await self._set_health(is_serving=not is_stuck)

    async def _set_health(self, *, is_serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.ServingStatus
        value = status.SERVING if is_serving else status.NOT_SERVING
        self._life.set_healthy(is_serving)
        for name in ("", SERVICE_NAME):
            await self._health.set(name, value)

    async def _start_server(self) -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(options=_SERVER_OPTIONS)
        pb_grpc.add_WorkerServiceServicer_to_server(self._service, server)
        pb_grpc.add_AdminServiceServicer_to_server(self._admin, server)
        pb_grpc.add_TransferServiceServicer_to_server(self._transfers.service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        await self._set_health(is_serving=False)
        names = (
            SERVICE_NAME,
            ADMIN_NAME,
            TRANSFER_NAME,
            "grpc.health.v1.Health",
            reflection.SERVICE_NAME,
        )
        reflection.enable_server_reflection(names, server)
        tls_dir = self._config.tls_dir
        credentials = server_credentials(Path(tls_dir)) if tls_dir else None
        try:
            if credentials is None:
                port = server.add_insecure_port(self._config.listen)
            else:
                port = server.add_secure_port(self._config.listen, credentials)
        except RuntimeError as error:
            raise StartupError(
                f"cannot listen on {self._config.listen}: {error}; choose another with --listen"
            ) from None
        await server.start()
        host = self._config.listen.rpartition(":")[0]
        _log.info("listening address=%s:%d version=%s", host, port, __version__)
        return server, port

    def _start_metrics(self) -> tuple[Any, int]:
        if self._config.metrics_listen == "off":
            return None, 0
        if self._config.vllm_metrics:
            registry = self._metrics.registry
            registry.register(VllmNames(registry, self._config.model_name))
        host, _, port = self._config.metrics_listen.rpartition(":")
        try:
            server, _ = start_http_server(int(port), host.strip("[]"), self._metrics.registry)
        except OSError as error:
            raise StartupError(
                f"cannot serve metrics on {self._config.metrics_listen}: {error}; "
                "choose another with --metrics-listen, or off"
            ) from None
        _log.info("metrics address=%s:%d", host, server.server_port)
        return server, server.server_port

    def _catch_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number.name)

    def _on_signal(self, name: str) -> None:
        _log.info("signal name=%s", name)
        self._loading.stop()
        if self._stop_asked.is_set():
            self._stop_now.set()
        self._stop_asked.set()

    def _identity(self, max_context_tokens: int) -> pb.Identity:
        facts = self._model_config.facts()
        return pb.Identity(
            worker_id=self._worker_id,
            version=__version__,
            model_name=self._config.model_name,
            facts=pb.ModelFacts(**dataclasses.asdict(facts)),
            fingerprint=facts.fingerprint(),
            max_context_tokens=max_context_tokens,
            page_tokens=self._model_config.block_tokens,
            role=f"WORKER_ROLE_{self._config.role.upper()}",  # type: ignore[arg-type]
        )
