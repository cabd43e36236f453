"""A worker whose ranks are spread over hosts: same tokens, and no host outlives another."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from m3stack.client import WorkerClient
from m3stack.config import WorkerConfig
from m3stack.errors import WorkerError
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
