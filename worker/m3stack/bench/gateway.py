"""`m3stack bench gateway`: what the gateway costs, in front of a scripted worker.

Runs the release binary of the gateway before `scripted_worker`, which answers at once over gRPC,
and loads it with `gateway_load`. The peer in the same run is that worker asked directly: the
difference of the medians is what the gateway adds. Built by `make bench`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from m3stack.checkpoints import builtin_checkpoint

BUILT = Path(__file__).resolve().parents[3] / "target" / "release"
PROGRAMS = {
    "gateway": BUILT / "m3stack-gateway",
    "worker": BUILT / "examples" / "scripted_worker",
    "load": BUILT / "examples" / "gateway_load",
}
STARTS = 5


@dataclass(frozen=True, slots=True)
class Start:
    """One start of the gateway: seconds to a 200 on /health, resident MB when idle."""

    seconds: float
    resident_mb: float


def main(argv: Sequence[str]) -> int:
    """Measures and prints; 0 measured, 2 a program is not built."""
    parser = argparse.ArgumentParser(prog="m3stack bench gateway", description=__doc__)
    parser.add_argument("--seconds", type=int, default=5, help="length of each load run")
    parser.add_argument("--concurrency", default="1,16,64", help="requests in flight, run by run")
    parser.add_argument("--model", type=Path, default=None, metavar="DIR")
    parser.add_argument("--json", type=Path, default=None, help="file for the figures")
    arguments = parser.parse_args(argv)
    missing = [str(path) for path in PROGRAMS.values() if not path.is_file()]
    if missing:
        print(f"not built: {', '.join(missing)}\nrun `make bench`, which builds them in release")
        return 2
    model = arguments.model if arguments.model is not None else builtin_checkpoint("tiny")
    starts = [measure_start(model) for _ in range(STARTS)]
    with serving(model) as (gateway, worker):
        command = [str(PROGRAMS["load"]), "--gateway", gateway, "--worker", worker]
        command += ["--model", model.name, "--seconds", str(arguments.seconds)]
        command += ["--concurrency", arguments.concurrency]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures = {
        "start_to_health_s": statistics.median(start.seconds for start in starts),
        "idle_resident_mb": statistics.median(start.resident_mb for start in starts),
        "load": json.loads(done.stdout),
    }
    print(json.dumps(figures, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def measure_start(model: Path) -> Start:
    """Starts the gateway alone and stops it again."""
    began = time.monotonic()
    address = f"127.0.0.1:{free_port()}"
    with running(gateway_command(model, address, f"127.0.0.1:{free_port()}")) as process:
        wait_for(process, address, "/health")
        seconds = time.monotonic() - began
        # one answered request, then quiet: what stays resident
        httpx.get(f"http://{address}/v1/models").raise_for_status()
        return Start(seconds, resident_mb(process.pid))


@contextlib.contextmanager
def serving(model: Path) -> Iterator[tuple[str, str]]:
    """Addresses of a ready gateway and its scripted worker."""
    gateway, worker = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    scripted = [str(PROGRAMS["worker"]), "--model-path", str(model), "--listen", worker]
    with running(scripted), running(gateway_command(model, gateway, worker)) as process:
        wait_for(process, gateway, "/ready")
        yield gateway, worker


def gateway_command(model: Path, listen: str, worker: str) -> list[str]:
    command = [str(PROGRAMS["gateway"]), "--model-path", str(model), "--listen", listen]
    return [*command, "--workers", f"http://{worker}", "--log-level", "error"]


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(40)


def wait_for(process: subprocess.Popen[bytes], address: str, path: str) -> None:
    """Returns at the first 200."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the gateway ended with exit code {process.returncode}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"http://{address}{path}", timeout=1.0).status_code == 200:
                return
        time.sleep(0.01)
    raise SystemExit(f"{path} gave no 200 within 30 s")


def resident_mb(pid: int) -> float:
    """Resident memory of a process in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise SystemExit(f"process {pid} shows no resident memory")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
