"""The gateways that `m3stack bench gateway` compares, each before its own scripted worker."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from m3stack.local_ports import free_port

BUILT = Path(__file__).resolve().parents[3] / "target" / "release"
PROGRAMS = {
    "gateway": BUILT / "m3stack-gateway",
    "worker": BUILT / "examples" / "scripted_worker",
    "load": BUILT / "examples" / "gateway_load",
}
# the peer has rules of its own for models of this name
SERVED_NAME = "MiniMax-M3"


@dataclass(frozen=True, slots=True)
class Kind:
    """One gateway to measure: its name in the report and its program."""

    name: str
    protocol: str
    program: Path
    flags: tuple[str, ...] = ()

    def command(self, model: Path, listen: str, worker: str) -> list[str]:
        """How it is started before that worker."""
        if self.protocol == "ours":
            command = [str(self.program), "--model-path", str(model), "--listen", listen]
            command += ["--served-model-name", SERVED_NAME, "--workers", f"http://{worker}"]
            return [*command, "--log-level", "error", *self.flags]
        host, port = listen.split(":")
        command = [str(self.program), "launch", "--host", host, "--port", port]
        command += ["--prometheus-host", host, "--prometheus-port", str(free_port())]
        command += ["--worker-urls", f"grpc://{worker}", "--model-path", str(model)]
        command += ["--policy", "round_robin", "--reasoning-parser", "minimax_m3"]
        return [*command, "--tool-call-parser", "minimax_m3", "--log-level", "error", *self.flags]


@dataclass(frozen=True, slots=True)
class Script:
    """What a worker says: a text, or plain words; all at once, or a token every so many ms."""

    tokens: int
    interval_ms: int = 0
    text: Path | None = None


@dataclass(frozen=True, slots=True)
class Arm:
    """A ready gateway and its worker."""

    kind: Kind
    process: subprocess.Popen[bytes]
    gateway: str
    worker: str

    def ask(self, how: str, bodies: Sequence[Path], **amount: object) -> dict[str, Any]:
        """Loads the gateway with requests answered `whole` or as `streams`."""
        paths = [str(body) for body in bodies]
        return load(how, "--gateway", self.gateway, "--body", *paths, **amount)

    def ask_worker(self, **amount: object) -> dict[str, Any]:
        """Asks the worker behind it directly."""
        protocol = self.kind.protocol
        return load("direct", "--worker", self.worker, "--protocol", protocol, **amount)

    def cpu_s(self) -> float:
        """Processor seconds of the gateway so far, threads that have ended included."""
        # as clock_getcpuclockid(3) names the clock of another process
        return time.clock_gettime((~self.process.pid << 3) | 2)

    def resident_mb(self) -> float:
        """Its resident memory."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024 / 1e6
        raise SystemExit(f"process {self.process.pid} shows no resident memory")


def load(how: str, *arguments: str, **amount: object) -> dict[str, Any]:
    """What the load generator measured."""
    command = [str(PROGRAMS["load"]), how, *arguments]
    for name, value in amount.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


@contextlib.contextmanager
def serving(kind: Kind, model: Path, script: Script) -> Iterator[Arm]:
    """A ready gateway before a worker with that script."""
    gateway, worker = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    scripted = [str(PROGRAMS["worker"]), "--model-path", str(model), "--listen", worker]
    scripted += ["--protocol", kind.protocol, "--name", SERVED_NAME]
    scripted += ["--tokens", str(script.tokens), "--interval-ms", str(script.interval_ms)]
    if script.text:
        scripted += ["--text", str(script.text)]
    with running(scripted) as worker_process:
        wait_for_port(worker_process, worker)
        with running(kind.command(model, gateway, worker)) as process:
            arm = Arm(kind, process, gateway, worker)
            wait_until_ready(arm)
            yield arm


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ended at the end."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def wait_until_ready(arm: Arm) -> None:
    """Returns once a request is answered."""
    message = {"role": "user", "content": "x"}
    body = {"model": SERVED_NAME, "messages": [message], "max_tokens": 1}
    deadline = time.monotonic() + 60
    last = ""
    while time.monotonic() < deadline:
        if arm.process.poll() is not None:
            raise SystemExit(f"{arm.kind.name} ended with exit code {arm.process.returncode}")
        with contextlib.suppress(httpx.TransportError):
            url = f"http://{arm.gateway}/v1/chat/completions"
            answer = httpx.post(url, json=body, timeout=10)
            if answer.status_code == 200:
                return
            last = answer.text
        time.sleep(0.05)
    raise SystemExit(f"{arm.kind.name} answered no request within 60 s: {last[:500]}")


def wait_for_port(process: subprocess.Popen[bytes], address: str) -> None:
    """Returns once the address takes connections."""
    host, port = address.split(":")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the scripted worker ended with exit code {process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
            return
        time.sleep(0.02)
    raise SystemExit("the scripted worker took no connection within 60 s")


def measure_start(kind: Kind, model: Path) -> tuple[float, float]:
    """Starts a gateway alone: seconds to a 200 on /health, resident MB when idle."""
    began = time.monotonic()
    address = f"127.0.0.1:{free_port()}"
    with running(kind.command(model, address, f"127.0.0.1:{free_port()}")) as process:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://{address}/health", timeout=1.0).status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > began + 30:
                raise SystemExit(f"{kind.name}: /health gave no 200 within 30 s")
            time.sleep(0.005)
        seconds = time.monotonic() - began
        # one answered request, then quiet: what stays resident
        httpx.get(f"http://{address}/v1/models").raise_for_status()
        return seconds, Arm(kind, process, address, "").resident_mb()
