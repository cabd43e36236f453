"""A real gateway and a real worker as processes on loopback, for the tests of the whole system."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from m3stack.checkpoints import builtin_checkpoint
from m3stack.local_ports import free_port

MODEL_NAME = "m3-tiny"
# for a machine that does much else
START_TIMEOUT_S = 200.0
STOP_TIMEOUT_S = 100.0


@dataclass
class Server:
    """One running process of ours and where it listens."""

    process: subprocess.Popen[bytes]
    address: str
    metrics_address: str = ""

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def stop(self) -> int:
        """SIGTERM, then the exit code; a process that will not stop fails the test."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_TIMEOUT_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(STOP_TIMEOUT_S)


@dataclass
class Stack:
    """Starts servers and stops what is left at the end."""

    folder: Path
    servers: list[Server] = field(default_factory=list)

    def worker(self, *flags: str, within: tuple[str, ...] = ()) -> Server:
        """A worker on the tiny checkpoint, returned at once; wait for the gateway's readiness.

        Args:
            within: a program, with its flags, that starts it.
        """
        address, metrics = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        flags = ("--device", "cpu", "--metrics-listen", metrics, *flags)
        return self.start("worker", address, metrics, *flags, within=within)

    def gateway(self, *workers: Server, flags: tuple[str, ...] = ()) -> Server:
        """A gateway in front of the workers, returned once it answers /health."""
        urls = ",".join(worker.url for worker in workers) or f"http://127.0.0.1:{free_port()}"
        server = self.start("gateway", f"127.0.0.1:{free_port()}", "", "--workers", urls, *flags)
        wait_for(server, "/health")
        return server

    def start(
        self, kind: str, address: str, metrics: str, *flags: str, within: tuple[str, ...] = ()
    ) -> Server:
        model = str(builtin_checkpoint("tiny"))
        command = [*within, sys.executable, "-m", "m3stack", kind, "--model-path", model]
        command += ["--served-model-name", MODEL_NAME, "--listen", address, *flags]
        with (self.folder / f"{kind}-{len(self.servers)}.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        server = Server(process, address, metrics)
        self.servers.append(server)
        return server

    def close(self) -> None:
        for server in reversed(self.servers):
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.stop()
            if server.process.poll() is None:
                server.kill()


def wait_for(server: Server, path: str, status: int = 200) -> httpx.Response:
    """Polls a path until it gives the status; the process must stay alive."""
    deadline = time.monotonic() + START_TIMEOUT_S
    seen: httpx.Response | None = None
    while time.monotonic() < deadline:
        assert server.process.poll() is None, f"the server ended: {server.process.returncode}"
        with contextlib.suppress(httpx.TransportError):
            seen = httpx.get(f"{server.url}{path}", timeout=20.0)
            if seen.status_code == status:
                return seen
        time.sleep(0.05)
    raise AssertionError(f"{path} never gave {status}; last: {seen and seen.text}")


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """Servers of one test."""
    stack = Stack(tmp_path)
    yield stack
    stack.close()


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """One gateway and one worker shared by tests that leave them as they were."""
    stack = Stack(tmp_path_factory.mktemp("served"))
    try:
        worker = stack.worker()
        gateway = stack.gateway(worker, flags=("--allow-private-media",))
        wait_for(gateway, "/ready")
        yield gateway, worker
    finally:
        stack.close()


@pytest.fixture(scope="session")
def gateway(served: tuple[Server, Server]) -> Server:
    return served[0]


@pytest.fixture(scope="session")
def worker(served: tuple[Server, Server]) -> Server:
    return served[1]
