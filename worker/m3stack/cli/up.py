"""`m3stack up`: a worker and a gateway as two child processes, watched and stopped together."""

from __future__ import annotations

import argparse
import ctypes
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from m3stack.checkpoint_tools.locate import locate_model
from m3stack.checkpoints import builtin_checkpoint
from m3stack.errors import StartupError
from m3stack.local_ports import free_port

STOP_GRACE_S = 35.0
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Child:
    """A child process and the name people know it by."""

    name: str
    process: subprocess.Popen[bytes]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="m3stack up",
        description="Starts a worker and a gateway on this machine and stops both on Ctrl-C.",
    )
    parser.add_argument(
        "--model",
        default=None,
        metavar="DIR_OR_ID",
        help="checkpoint directory in the released layout, or a hub id such as "
        "MiniMaxAI/MiniMax-M3-MXFP8 (default: the built-in tiny model)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to serve REST on")
    parser.add_argument("--port", type=int, default=8000, help="port to serve REST on")
    parser.add_argument(
        "--served-model-name",
        default=None,
        metavar="NAME",
        help="name clients use (default: that of the directory or repository)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument(
        "--ready-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="how long loading may take",
    )
    parser.add_argument(
        "--log-level", default="warning", choices=("debug", "info", "warning", "error")
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Serves until a signal or until one of the two children ends.

    Returns:
        0 after Ctrl-C or SIGTERM, 1 if a child failed.
    """
    arguments = build_parser().parse_args(argv)
    try:
        located = locate_model(arguments.model or str(builtin_checkpoint("tiny")))
    except StartupError as error:
        print(f"m3stack up: {error}")
        return 1
    model = located.directory
    arguments.served_model_name = arguments.served_model_name or located.name
    if not (model / "config.json").is_file():
        print(f"m3stack up: {model} holds no config.json; give --model a checkpoint directory")
        return 1
    if not port_is_free(arguments.host, arguments.port):
        print(
            f"m3stack up: {arguments.host}:{arguments.port} is in use; "
            "stop what holds it or choose another with --port"
        )
        return 1
    # a signal becomes an exception, so that one `finally` stops the children; SIGINT is set too,
    # because a shell starts background jobs with it ignored
    signal.signal(signal.SIGTERM, raise_interrupt)
    signal.signal(signal.SIGINT, raise_interrupt)
    children: list[Child] = []
    try:
        children = start_children(arguments, model)
        return watch(children, f"http://{arguments.host}:{arguments.port}", arguments, model)
    except KeyboardInterrupt:
        print("\nstopping: running requests finish first", flush=True)
        return 0
    finally:
        stop(children)


def start_children(arguments: argparse.Namespace, model: Path) -> list[Child]:
    """Starts worker and gateway; the gateway finds the worker at a free local port."""
    worker_address = f"127.0.0.1:{free_port()}"
    shared = ["--model-path", str(model), "--log-level", arguments.log_level]
    shared += ["--served-model-name", arguments.served_model_name]
    worker = ["worker", *shared, "--listen", worker_address, "--device", arguments.device]
    listen = f"{arguments.host}:{arguments.port}"
    gateway = ["gateway", *shared, "--listen", listen, "--workers", f"http://{worker_address}"]
    return [start("worker", worker), start("gateway", gateway)]


def start(name: str, command: list[str]) -> Child:
    """A child in its own process group that dies with this process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "m3stack", *command],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    return Child(name, process)


def watch(children: list[Child], url: str, arguments: argparse.Namespace, model: Path) -> int:
    """Waits for readiness, says how to use it, then waits for the first child to end."""
    began = time.monotonic()
    print(f"loading {arguments.served_model_name} ...", flush=True)
    announced = False
    while True:
        for child in children:
            code = child.process.poll()
            if code is not None:
                print(f"m3stack up: the {child.name} ended with exit code {code}", flush=True)
                return 1
        if not announced:
            waited = time.monotonic() - began
            announced = is_ready(url)
            if announced:
                print(banner(url, waited), flush=True)
            elif waited > arguments.ready_timeout:
                print(f"m3stack up: not ready after {waited:.0f} s; see the messages above")
                return 1
        time.sleep(0.1 if not announced else 0.5)


def is_ready(url: str) -> bool:
    """Whether the gateway answers and sees a ready worker."""
    try:
        return httpx.get(f"{url}/ready", timeout=1.0).status_code == 200
    except httpx.TransportError:
        return False


def banner(url: str, waited_s: float) -> str:
    """What a person needs to send the first request."""
    return (
        f"ready after {waited_s:.1f} s: {url}/v1\n"
        f'  m3stack chat --url {url} "Hello"\n'
        f"  curl {url}/v1/chat/completions -H 'content-type: application/json' \\\n"
        '    -d \'{"messages": [{"role": "user", "content": "Hello"}]}\'\n'
        "Ctrl-C stops."
    )


def stop(children: list[Child]) -> None:
    """Gateway first, so that no request meets a vanished worker; then the worker."""
    for child in reversed(children):
        if child.process.poll() is not None:
            continue
        child.process.send_signal(signal.SIGTERM)
        try:
            child.process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            print(f"m3stack up: the {child.name} did not stop in {STOP_GRACE_S:.0f} s; killing it")
            child.process.kill()
            child.process.wait()


def raise_interrupt(_signal: int, _frame: object) -> None:
    """One signal stops in order; further ones must not cut that short."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def die_with_parent() -> None:
    """Runs in the child before exec: SIGTERM when the parent is gone, however it went."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
