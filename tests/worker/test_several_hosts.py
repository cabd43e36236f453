"""A worker whose ranks are spread over hosts: same tokens, and no host outlives another."""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from m3stack.client import WorkerClient
from m3stack.config import WorkerConfig
from m3stack.errors import WorkerError
from m3stack.host_link import Kind, Link, LinkLostError
from m3stack.hosts import Hosts, greeting
from m3stack.local_ports import free_port
from m3stack.serve import EXIT_DRAINED, EXIT_FAILED
from m3stack.types import Started, WorkerState
from tests.parity import golden
from tests.worker.served import Served, config, serve_around
from tests.worker.test_serve import image_request, text_request

START_S = 100
END_S = 60
SERVING = health_pb2.HealthCheckResponse.ServingStatus.SERVING


@dataclass
class Host:
    """A host that follows: a process of its own, with the ranks it has started."""

    process: subprocess.Popen[bytes]
    log: Path

    def said(self, pattern: str) -> re.Match[str]:
        """The first match in what it has logged; waits for it."""
        deadline = time.monotonic() + START_S
        while True:
            found = re.search(pattern, self.log.read_text())
            if found:
                return found
            assert time.monotonic() < deadline, self.log.read_text()
            # a file that another process writes is read again
            time.sleep(0.05)

    @property
    def ranks(self) -> list[psutil.Process]:
        """Processes that it has started, those that multiprocessing needs for itself left out."""
        children = psutil.Process(self.process.pid).children()
        return [each for each in children if "spawn_main" in " ".join(each.cmdline())]

    def health(self) -> int:
        with grpc.insecure_channel(self.said(r"listening address=(\S+)")[1]) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            return stub.Check(health_pb2.HealthCheckRequest(), timeout=10).status


def start(settings: WorkerConfig, index: int, folder: Path) -> Host:
    """A host of its own loopback address, with the leader's settings."""
    own = replace(settings, host_index=index, listen=f"127.0.0.{index + 1}:0", log_level="info")
    environment = {
        f"M3STACK_WORKER_{name.upper()}": str(value) for name, value in asdict(own).items()
    }
    log = folder / f"host-{index}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "m3stack", "worker"],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
        )
    return Host(process, log)


@contextmanager
def followed(settings: WorkerConfig, folder: Path) -> Iterator[list[Host]]:
    """All hosts but the leading one; none is left."""
    hosts = [start(settings, index, folder) for index in range(1, settings.hosts)]
    try:
        yield hosts
    finally:
        for host in hosts:
            host.process.kill()
            host.process.wait()


def spread(ranks: int, hosts: int, **flags: object) -> WorkerConfig:
    address = f"127.0.0.1:{free_port()}"
    return config(
        golden.DIRECTORY,
        tensor_parallel=ranks,
        hosts=hosts,
        leader_address=address,
        **flags,
    )


def tokens_of(settings: WorkerConfig, check: Callable[[], None] = lambda: None) -> list[list[int]]:
    results: list[list[int]] = []
    requests = [text_request(300, max_tokens=5), image_request(max_tokens=4)]

    def scenario(served: Served) -> None:
        served.wait_until(WorkerState.READY)
        with ThreadPoolExecutor(2) as pool:
            results.extend(pool.map(served.tokens, requests))
        check()

    assert serve_around(settings, scenario) == EXIT_DRAINED
    return results


@pytest.fixture(scope="module")
def whole_tokens() -> list[list[int]]:
    return tokens_of(config(golden.DIRECTORY))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "hosts", "flags"),
    [
        (2, 2, {}),
        (4, 2, {"expert_parallel": 2, "shard_index_keys": True}),
        pytest.param(4, 4, {}, marks=pytest.mark.soak),
    ],
)
def test_ranks_on_several_hosts_give_the_tokens_of_one(
    ranks: int,
    hosts: int,
    flags: dict[str, object],
    whole_tokens: list[list[int]],
    tmp_path: Path,
) -> None:
    settings = spread(ranks, hosts, **flags)
    with followed(settings, tmp_path) as others:

        def check() -> None:
            for host in others:
                host.said(r"ready host=\d")
                assert host.health() == SERVING
                assert len(host.ranks) == ranks // hosts

        assert tokens_of(settings, check) == whole_tokens
        # the leader's orderly end is everybody's
        assert [host.process.wait(END_S) for host in others] == [0] * (hosts - 1)


def kill_host(host: Host) -> None:
    host.process.kill()


def kill_rank(host: Host) -> None:
    (rank,) = host.ranks
    rank.kill()


def freeze_host(host: Host) -> None:
    """Nothing closes: as with a host that lost its power or its network."""
    host.process.send_signal(signal.SIGSTOP)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (kill_host, r"host 1 \(127\.0\.0\.1\): is gone"),
        (kill_rank, r"host 1 \(127\.0\.0\.1\): rank 1 ended with exit code -9"),
        (freeze_host, r"host 1 \(127\.0\.0\.1\): has been silent for 15 s"),
    ],
)
def test_a_host_that_ends_or_falls_silent_ends_all_by_its_name(
    harm: Callable[[Host], None], named: str, tmp_path: Path
) -> None:
    # a busy machine is silent for a while, and nothing here must be taken for that
    settings = spread(2, 2, host_silence_s=15.0 if harm is freeze_host else 60.0)
    leader = start(settings, 0, tmp_path)
    with followed(settings, tmp_path) as (host,):
        try:
            leader.said("ready model=")
            client = WorkerClient(leader.said(r"listening address=(\S+)")[1])
            running = client.generate(text_request(20, max_tokens=8000))
            assert isinstance(next(running), Started)
            ranks = host.ranks
            harm(host)
            assert leader.process.wait(END_S) == EXIT_FAILED
            assert re.search(named, leader.log.read_text()), leader.log.read_text()
            with pytest.raises(WorkerError):
                list(running)
            client.close()
        finally:
            leader.process.kill()
            leader.process.wait()
        # as it comes back, it finds that it is not wanted any more
        host.process.send_signal(signal.SIGCONT)
        assert host.process.wait(END_S) != 0
        _, alive = psutil.wait_procs(ranks, timeout=END_S)
        assert not alive


@pytest.mark.timeout(300)
def test_a_host_that_freezes_while_the_model_loads_ends_all_by_its_name(tmp_path: Path) -> None:
    # far more steps than a CPU can run before the host is frozen
    sizes = {"first_steps_s": 600.0, "num_pages": 9000, "max_batch_tokens": 8192}
    settings = spread(2, 2, host_silence_s=10.0, **sizes)
    leader = start(settings, 0, tmp_path)
    with followed(settings, tmp_path) as (host,):
        frozen: list[psutil.Process] = []
        try:
            host.said("kernels name=")
            frozen = host.ranks
            for process in frozen:
                process.suspend()
            freeze_host(host)
            assert leader.process.wait(END_S) == EXIT_FAILED
            told = leader.log.read_text()
            assert re.search(r"host 1 \(127\.0\.0\.1\): has been silent for 10 s", told), told
            assert "ready model=" not in told
        finally:
            leader.process.kill()
            leader.process.wait()
            for process in frozen:
                process.kill()


@pytest.mark.timeout(300)
def test_hosts_end_when_the_leader_is_gone(tmp_path: Path) -> None:
    settings = replace(spread(2, 2), listen="127.0.0.1:0")
    with followed(settings, tmp_path) as (host,):
        leader = start(settings, 0, tmp_path)
        try:
            host.said(r"ready host=1")
            leader.said(r"ready model=")
            leader.process.kill()
            assert host.process.wait(END_S) == EXIT_FAILED
            assert "the leader (127.0.0.1) is gone" in host.log.read_text()
        finally:
            leader.process.kill()
            leader.process.wait()


def test_a_leader_that_waits_for_hosts_can_be_stopped() -> None:
    def scenario(served: Served) -> None:
        assert next(iter(served.client.watch())).state is WorkerState.LOADING

    assert serve_around(spread(2, 2), scenario) == EXIT_DRAINED


class Door:
    """A leader that waits for hosts, and what one that knocks is told."""

    def __init__(self, settings: WorkerConfig, address: str = "127.0.0.1") -> None:
        self.settings = settings
        self.address = address
        self.hosts = Hosts(settings, store_port=1)
        self.is_closed = False
        self.pool = ThreadPoolExecutor(1)
        self.waiting = self.pool.submit(self.hosts.await_joined, self.check)

    def check(self) -> None:
        if self.is_closed:
            raise InterruptedError

    def connect(self) -> socket.socket:
        port = int(self.settings.leader_address.rpartition(":")[2])
        deadline = time.monotonic() + START_S
        while True:
            try:
                return socket.create_connection((self.address, port), timeout=10)
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                # not listening yet, and nothing tells when it does
                time.sleep(0.02)

    def knock(self, said: bytes, key: bytes = b"m3stack") -> tuple[Kind, bytes]:
        sock = self.connect()
        sock.settimeout(None)
        link = Link(sock, silence_s=10)
        try:
            link.authenticate(key, is_leader=False)
            link.send(Kind.HELLO, said)
            return link.receive()
        finally:
            link.close()

    def close(self) -> None:
        self.is_closed = True
        # it has let all hosts in, lost one again, or is told to stop
        self.waiting.exception(END_S)
        self.pool.shutdown()
        self.hosts.stop("")


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    secret = tmp_path / "secret"
    secret.write_bytes(b"of three hosts")
    door = Door(spread(3, 3, host_key_file=str(secret)))
    yield door
    door.close()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"host_index": 0}, "host_index is 0, expected 1 to 2"),
        ({"host_index": 7}, "host_index is 7, expected 1 to 2"),
        ({"max_batch_tokens": 128}, "max_batch_tokens is 128, the leader's is 256"),
        ({"random_weights": True}, "random_weights is True, the leader's is False"),
    ],
)
def test_a_host_that_does_not_fit_is_refused_by_name(
    change: dict[str, int], complaint: str, door: Door
) -> None:
    other = replace(door.settings, host_index=1)
    kind, said = door.knock(greeting(replace(other, **change)), b"of three hosts")
    assert (kind, said.decode()) == (Kind.END, complaint)
    # whoever fits is still welcome
    assert door.knock(greeting(other), b"of three hosts")[0] is Kind.WELCOME


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_leader_with_a_name_is_joined_by_either_family(address: str) -> None:
    if address == "::1" and not socket.has_dualstack_ipv6():
        # containers without IPv6 cannot be joined by it
        pytest.skip("no IPv6 here")
    port = free_port()
    door = Door(replace(spread(2, 2), leader_address=f"m3-0.m3.serving:{port}"), address)
    try:
        assert door.knock(greeting(replace(door.settings, host_index=1)))[0] is Kind.WELCOME
        door.waiting.result(END_S)
        assert door.hosts.own_address == address
    finally:
        door.close()


def test_a_host_without_the_key_and_what_is_no_host_is_turned_away(door: Door) -> None:
    own = greeting(replace(door.settings, host_index=1))
    with pytest.raises(LinkLostError):
        door.knock(own, b"another key")
    with door.connect() as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        # an answer, if any, and then the end
        while stranger.recv(4096):
            pass
    assert door.knock(own, b"of three hosts")[0] is Kind.WELCOME


def test_strangers_that_say_nothing_do_not_hold_the_door(door: Door) -> None:
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(door.connect())
        own = greeting(replace(door.settings, host_index=1))
        # whoever joins is as impatient as one stranger is patient
        assert door.knock(own, b"of three hosts")[0] is Kind.WELCOME
        assert door.knock(own, b"of three hosts")[0] is Kind.END


def test_whoever_is_gone_before_being_let_in_is_no_trouble() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        # as a probe of a load balancer does: a reset right behind the connection
        with socket.create_connection(server.getsockname()) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock, _ = server.accept()
        with pytest.raises(LinkLostError, match="is gone"):
            Link(sock, silence_s=10)
        assert sock.fileno() == -1
