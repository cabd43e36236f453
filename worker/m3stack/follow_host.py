"""`m3stack worker` on a host that follows: joins the leader, runs its ranks, serves health."""

from __future__ import annotations

import json
import logging
import multiprocessing
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from m3stack import __version__
from m3stack.config import WorkerConfig
from m3stack.errors import StartupError
from m3stack.host_link import MAX_GREETING_BYTES, Kind, Link, LinkLostError, read_key
from m3stack.host_network import choose_interface
from m3stack.hosts import JOIN_S, LOOK_S, SAY_S, greeting
from m3stack.local_ranks import READY, UP, BuildFollower, LocalRanks, StorePlace
from m3stack.log_lines import set_up_logging
from m3stack.rpc.tls import server_credentials

_log = logging.getLogger(__name__)

EXIT_ENDED, EXIT_FAILED = 0, 1
START_S = 300.0
CONNECT_S = 5.0
RETRY_S = 1.0
# how long ranks get to end by themselves
GOODBYE_S = 5.0
FAREWELL_S = 1.0


class _StoppedError(Exception):
    """A signal came before the leader was found."""


def run_follower(
    config: WorkerConfig,
    build: BuildFollower,
    *,
    on_listening: Callable[[int], None] | None = None,
) -> int:
    """Runs the ranks of this host until the leader or one of them ends.

    SIGTERM and SIGINT before it has joined end it; later they are the leader's to act on, and a
    second one ends it, and with it the worker.

    Args:
        config: `host_index` is above 0.
        build: makes a rank's runner, in its own process.
        on_listening: told the port of the health service.

    Returns:
        0 after an orderly end of the leader, 1 after any other.

    Raises:
        StartupError: it cannot listen, or may not join; says what to do.
    """
    set_up_logging(config.log_level)
    signals = _Signals()
    server, port, servicer = _serve_health(config)
    if on_listening is not None:
        on_listening(port)
    try:
        try:
            link, store_port = _join(config, signals)
        except _StoppedError:
            _log.info("stopped_while_joining")
            return EXIT_ENDED
        link.start_signs()
        choose_interface(link.own_host)
        own = config.tensor_parallel // config.hosts
        ranks = range(config.host_index * own, (config.host_index + 1) * own)
        host = config.leader_address.rpartition(":")[0].strip("[]")
        place = StorePlace(host, store_port)
        follower = _Follower(config, link, LocalRanks(config, ranks, place, build))
        reason = follower.run(signals, lambda: _set_health(servicer, is_serving=True))
        _set_health(servicer, is_serving=False)
        if reason:
            _log.critical("host_ended reason=%s", reason)
            return EXIT_FAILED
        _log.info("host_ended")
        return EXIT_ENDED
    finally:
        server.stop(FAREWELL_S).wait()
        signals.close()


class _Signals:
    """SIGTERM and SIGINT since the start, on something that can be waited for."""

    def __init__(self) -> None:
        self.count = 0
        self.came, self._tell = multiprocessing.Pipe(duplex=False)
        self._before: dict[int, object] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)

    def close(self) -> None:
        """Leaves signals to whoever had them before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: object) -> None:
        self.count += 1
        _log.info("signal name=%s", signal.Signals(number).name)
        self._tell.send_bytes(b"signal")


class _Follower:
    """A host that has joined; everything is called from the main thread."""

    def __init__(self, config: WorkerConfig, link: Link, ranks: LocalRanks) -> None:
        self._config = config
        self._link = link
        self._ranks = ranks
        self._heard, self._tell = multiprocessing.Pipe(duplex=False)

    def run(self, signals: _Signals, on_ready: Callable[[], None]) -> str:
        """Serves the leader to the end; returns why, or nothing if that was an orderly one."""
        reason = "it failed"
        try:
            reason = self._run(signals, on_ready)
        finally:
            # the leader says which rank it was; what it told itself, it knows
            self._tell_leader(Kind.END, reason.encode())
            self._ranks.stop(0.0 if reason else GOODBYE_S)
            self._link.close()
        return reason

    def _run(self, signals: _Signals, on_ready: Callable[[], None]) -> str:
        threading.Thread(target=self._relay, name="m3stack-relay", daemon=True).start()
        starting = list(self._ranks.connections)
        loading = list(starting)
        deadline = time.monotonic() + START_S
        while True:
            waited = [self._heard, signals.came, *self._ranks.sentinels, *loading]
            ready = wait(waited, max(0.0, deadline - time.monotonic()) if starting else None)
            if self._heard in ready:
                return self._heard.recv_bytes().decode()
            if signals.came in ready:
                signals.came.recv_bytes()
                if signals.count > 1:
                    return "it was told to stop at once"
                _log.info("signal_left_to_leader")
            ended = self._ranks.ended(0.0)
            if ended is not None:
                return ended
            if starting and time.monotonic() > deadline:
                return f"its ranks did not start within {START_S:g} s"
            for connection in [each for each in loading if each in ready]:
                try:
                    said = connection.recv_bytes()
                except (EOFError, OSError):
                    return self._ranks.ended(GOODBYE_S) or "a rank has closed its end"
                if said == UP:
                    starting.remove(connection)
                    if not starting:
                        self._tell_leader(Kind.UP)
                    continue
                assert said == READY
                loading.remove(connection)
                if not loading:
                    _log.info("ready host=%d", self._config.host_index)
                    on_ready()

    def _tell_leader(self, kind: Kind, data: bytes = b"") -> None:
        # one that is gone is noticed where it is listened to
        with suppress(LinkLostError):
            self._link.send(kind, data)

    def _relay(self) -> None:
        """Hands on what the leader says, as it comes, and tells the main thread of the end."""
        try:
            while True:
                kind, data = self._link.receive()
                if kind is Kind.COMMAND:
                    self._ranks.send(data)
                elif kind is Kind.END:
                    reason = data.decode(errors="replace")
                    break
        except LinkLostError as error:
            reason = f"the leader ({self._link.peer_host}) {error}"
        except OSError:
            reason = self._ranks.ended(GOODBYE_S) or "a rank cannot be reached"
        self._tell.send_bytes(reason.encode())


def _join(config: WorkerConfig, signals: _Signals) -> tuple[Link, int]:
    """The link to the leader, and the port of its store.

    Raises:
        StartupError: it is not there in time, or refuses this host.
    """
    key = read_key(config.host_key_file)
    host, _, port = config.leader_address.rpartition(":")
    said = greeting(config)
    began_at = said_at = time.monotonic()
    while True:
        trouble = ""
        try:
            sock = socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S)
        except OSError as error:
            trouble = error.strerror or str(error)
        else:
            sock.settimeout(None)
            try:
                return _introduced(Link(sock, silence_s=config.host_silence_s), key, said)
            except LinkLostError as error:
                # a leader that is about to end, or whose port another program has
                trouble = str(error)
        now = time.monotonic()
        if now - began_at > JOIN_S:
            raise StartupError(
                f"the leader at {config.leader_address} was not joined within {JOIN_S:g} s: "
                f"{trouble}"
            )
        if now - said_at > SAY_S:
            said_at = now
            _log.info("joining leader=%s trouble=%s", config.leader_address, trouble)
        until = now + RETRY_S
        while time.monotonic() < until:
            if signals.came.poll(LOOK_S):
                raise _StoppedError


def _introduced(link: Link, key: bytes, said: bytes) -> tuple[Link, int]:
    """The link and the port of the store, once it is said who this host is; else it is closed."""
    try:
        return link, _introduce(link, key, said)
    except (LinkLostError, StartupError):
        link.close()
        raise


def _introduce(link: Link, key: bytes, said: bytes) -> int:
    link.authenticate(key, is_leader=False)
    link.send(Kind.HELLO, said)
    kind, data = link.receive(MAX_GREETING_BYTES)
    if kind is Kind.END:
        raise StartupError(f"the leader refuses this host: {data.decode(errors='replace')}")
    if kind is not Kind.WELCOME:
        raise LinkLostError("the leader does not say that this host may join")
    return int(json.loads(data)["store_port"])


def _serve_health(config: WorkerConfig) -> tuple[grpc.Server, int, health.HealthServicer]:
    """The health service alone, not serving yet."""
    servicer = health.HealthServicer()
    server = grpc.server(ThreadPoolExecutor(2), options=(("grpc.so_reuseport", 0),))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    _set_health(servicer, is_serving=False)
    try:
        if config.tls_dir:
            credentials = server_credentials(Path(config.tls_dir))
            port = server.add_secure_port(config.listen, credentials)
        else:
            port = server.add_insecure_port(config.listen)
    except RuntimeError as error:
        raise StartupError(
            f"cannot listen on {config.listen}: {error}; choose another with --listen"
        ) from None
    server.start()
    host = config.listen.rpartition(":")[0]
    _log.info("listening address=%s:%d version=%s", host, port, __version__)
    return server, port, servicer


def _set_health(servicer: health.HealthServicer, *, is_serving: bool) -> None:
    status = health_pb2.HealthCheckResponse.ServingStatus
    servicer.set("", status.SERVING if is_serving else status.NOT_SERVING)
