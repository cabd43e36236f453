"""Three workers and two gateways, each on a host of its own, that can be ended and begun again."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.chaos.network import Host, Network

MODEL = "m3-tiny"
WORKERS, GATEWAYS = 3, 2
API_PORT, ADMIN_PORT, RPC_PORT, METRICS_PORT = 8000, 9101, 50051, 9100
START_TIMEOUT_S = 400.0
LOW_PRIORITY = 19
# of the file system that holds a host's log and temporary files
DISK_BYTES = 32 << 20


@dataclass
class Node:
    """A program on its host, running or not."""

    host: Host
    is_gateway: bool
    command: list[str]
    environment: dict[str, str]
    disk: Path
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    _spent_s: float = 0.0
    _before_s: float = 0.0

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def url(self) -> str:
        return f"http://{self.host.address}:{API_PORT}"

    @property
    def metrics_url(self) -> str:
        port = ADMIN_PORT if self.is_gateway else METRICS_PORT
        return f"http://{self.host.address}:{port}/metrics"

    @property
    def clock(self) -> Path:
        return self.disk.with_suffix(".clock")

    @property
    def lives(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Begins it behind all that serve: on a host of its own it would take from none."""
        self._before_s = self.cpu_s()
        self.starts += 1
        with (self.disk / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self.host.command("nice", "-n", str(LOW_PRIORITY), *self.command),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.disk,
            )

    def settle(self) -> None:
        """It serves now, and runs as all others do."""
        assert self.process is not None
        for thread in Path(f"/proc/{self.process.pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(thread.name), 0)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self, timeout_s: float = 60.0) -> int:
        """SIGTERM, and the exit code; what does not end in time is killed and gives -9."""
        assert self.process is not None
        self.signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout_s)
        self.process.kill()
        return self.process.wait()

    def metrics(self) -> dict[str, float]:
        """Sums over labels of every metric it tells."""
        sums: dict[str, float] = {}
        for line in httpx.get(self.metrics_url, timeout=5.0).text.splitlines():
            if match := re.match(r"([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)$", line):
                sums[match[1]] = sums.get(match[1], 0.0) + float(match[2])
        return sums

    def resident_bytes(self) -> int:
        assert self.process is not None
        fields = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def cpu_s(self) -> float:
        """Processor time of all its starts."""
        if not self.lives:
            return self._spent_s
        assert self.process is not None
        stat = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(stat[11]) + int(stat[12])
        self._spent_s = max(self._spent_s, self._before_s + ticks / os.sysconf("SC_CLK_TCK"))
        return self._spent_s

    def num_descriptors(self) -> int:
        assert self.process is not None
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def step_clock(self, seconds: int) -> None:
        """Its wall clock jumps to that distance from the true one."""
        with self.clock.open("r+b") as file:
            file.write(struct.pack("q", seconds))

    def fill_disk(self) -> None:
        """Not a byte is left on the disk of its log and temporary files."""
        file = os.open(self.disk / "ballast", os.O_WRONLY | os.O_CREAT)
        try:
            with contextlib.suppress(OSError):
                while True:
                    os.write(file, bytes(1 << 16))
        finally:
            os.close(file)

    def free_disk(self) -> None:
        (self.disk / "ballast").unlink()


@dataclass
class Fleet:
    """All nodes; those that live through the whole run come first of their kind."""

    network: Network
    nodes: list[Node] = field(default_factory=list)

    @property
    def workers(self) -> list[Node]:
        return [node for node in self.nodes if not node.is_gateway]

    @property
    def gateways(self) -> list[Node]:
        return [node for node in self.nodes if node.is_gateway]

    def wait_ready(self, gateway: Node, num_workers: int) -> None:
        """Until a gateway counts so many ready workers."""
        deadline = time.monotonic() + START_TIMEOUT_S
        seen = ""
        while time.monotonic() < deadline:
            assert gateway.process is not None
            if (code := gateway.process.poll()) is not None:
                raise AssertionError(f"{gateway.name} ended with {code}: {gateway.disk / 'log'}")
            with contextlib.suppress(httpx.TransportError):
                reply = httpx.get(f"{gateway.url}/ready", timeout=2.0)
                seen = reply.text
                if reply.json()["workers"]["ready"] >= num_workers:
                    return
            time.sleep(0.1)
        raise AssertionError(f"{gateway.name} never saw {num_workers} workers; last: {seen}")

    def wait_all_ready(self) -> None:
        """Until every gateway counts every worker; all run alike from then on."""
        for gateway in self.gateways:
            self.wait_ready(gateway, WORKERS)
        for node in self.nodes:
            node.settle()


@contextlib.contextmanager
def fleet(folder: Path, *, gateway: Path, model: Path, package: Path) -> Iterator[Fleet]:
    """A running fleet on copies of the programs, so that a tree that changes does not matter.

    Args:
        folder: for programs, disks and logs.
        gateway: the gateway's binary.
        model: the checkpoint.
        package: the folder that `m3stack` is imported from.
    """
    programs = folder / "programs"
    shutil.copytree(package, programs / "python", ignore=shutil.ignore_patterns("*.so"))
    model = Path(shutil.copytree(model, programs / "model"))
    binary = Path(shutil.copy2(gateway, programs / "m3stack-gateway"))
    preload = _build_clock(programs)
    made = Fleet(Network())
    common = ["--model-path", str(model), "--served-model-name", MODEL, "--log-level", "warning"]
    workers = [made.network.add(f"worker{index}") for index in range(WORKERS)]
    gateways = [made.network.add(f"gateway{index}") for index in range(GATEWAYS)]
    addresses = ",".join(f"http://{host.address}:{RPC_PORT}" for host in workers)
    for host in workers:
        flags = [
            "--listen",
            f"{host.address}:{RPC_PORT}",
            "--device",
            "cpu",
            "--set",
            "cpu_threads=1",
        ]
        flags += ["--metrics-listen", f"{host.address}:{METRICS_PORT}", "--drain-s", "20"]
        flags += [
            "--max-sequences",
            "16",
            "--set",
            "max_batch_tokens=256",
            "--set",
            "num_pages=512",
        ]
        command = [sys.executable, "-m", "m3stack", "worker", *common, *flags]
        made.nodes.append(_node(host, command, folder, preload, is_gateway=False))
    for host in gateways:
        flags = ["--listen", f"{host.address}:{API_PORT}", "--workers", addresses]
        flags += ["--admin-listen", f"{host.address}:{ADMIN_PORT}", "--allow-anonymous=true"]
        flags += ["--drain-timeout-s", "20", "--set", "worker_stall_s=5"]
        command = [str(binary), *common, *flags]
        made.nodes.append(_node(host, command, folder, preload, is_gateway=True))
    try:
        for node in made.nodes:
            node.start()
        made.wait_all_ready()
        yield made
    finally:
        for node in made.nodes:
            if node.process is not None:
                node.process.kill()
                node.process.wait()
            shutil.copy2(node.disk / "log", folder / f"{node.name}.log")
            subprocess.run(["umount", node.disk], check=True)


def _node(host: Host, command: list[str], folder: Path, preload: Path, *, is_gateway: bool) -> Node:
    disk = folder / host.name
    disk.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)], check=True
    )
    node = Node(host, is_gateway, command, {}, disk)
    node.clock.write_bytes(struct.pack("q", 0))
    node.environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(folder / "programs" / "python"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(disk),
        "LD_PRELOAD": str(preload),
        "CLOCK_STEP_FILE": str(node.clock),
    }
    return node


def _build_clock(folder: Path) -> Path:
    source = Path(__file__).with_name("clock_step.c")
    library = folder / "clock_step.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True)
    return library
