"""Clients that leave in every phase of a request, and what the gauges say then.

`python -m tests.e2e.leaving` prints how long each phase takes to be free of a client that has left.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.e2e.conftest import MODEL_NAME, Server, Stack, wait_for

CLIP = Path(__file__).parents[1] / "data" / "media" / "vid_long_10min_30fps.mp4"
GATEWAY_GAUGES = (
    "m3stack_gateway_held_bytes",
    "m3stack_gateway_running_requests",
    "m3stack_gateway_video_processes",
    "m3stack_gateway_worker_requests",
)
WORKER_GAUGES = (
    "m3stack_worker_running_requests",
    "m3stack_worker_waiting_requests",
    "m3stack_worker_used_pages",
)
# of the waits for a phase to begin and for what it took to come back
PATIENCE_S = 100.0
# nothing is cached, so that pages in use are those of requests; one request runs, others queue
WORKER_FLAGS = ("--set", "prefix_cache=false", "--max-sequences", "1")


@dataclass(frozen=True)
class Fleet:
    """A gateway and a worker that only these clients use."""

    gateway: Server
    worker: Server
    # one that is kept: opening a client takes longer than a page of metrics
    client: httpx.Client

    @classmethod
    @contextlib.contextmanager
    def start(cls, stack: Stack) -> Iterator[Fleet]:
        worker = stack.worker(*WORKER_FLAGS)
        gateway = stack.gateway(worker, flags=("--allow-private-media",))
        wait_for(gateway, "/ready")
        with httpx.Client(timeout=PATIENCE_S) as client:
            yield cls(gateway, worker, client)

    def values(self, names: tuple[str, ...]) -> dict[str, float]:
        """Gauges of one of the two, each the sum of its samples."""
        server = self.gateway if "_gateway_" in names[0] else self.worker
        address = server.metrics_address or server.address
        text = self.client.get(f"http://{address}/metrics").text
        found: dict[str, float] = {}
        for name in names:
            samples = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
            assert samples, f"no metric {name}"
            found[name] = sum(float(sample) for sample in samples)
        return found

    def value(self, name: str) -> float:
        return self.values((name,))[name]

    def held(self) -> dict[str, float]:
        """The gauges that are not zero."""
        values = self.values(GATEWAY_GAUGES) | self.values(WORKER_GAUGES)
        return {name: value for name, value in values.items() if value}

    def connect(self) -> socket.socket:
        host, port = self.gateway.address.split(":")
        return socket.create_connection((host, int(port)), PATIENCE_S)

    def ask(self, content: object, **fields: object) -> socket.socket:
        """Sends a chat request whole and gives the connection."""
        message = {"role": "user", "content": content}
        body = {"model": MODEL_NAME, "messages": [message], "thinking": {"type": "disabled"}}
        data = json.dumps(body | fields).encode()
        connection = self.connect()
        connection.sendall(head(len(data)) + data)
        return connection


def head(length: int) -> bytes:
    return (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\n"
        f"content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    ).encode()


def wait_until(claim: Callable[[], bool], what: str) -> float:
    """Seconds until the claim is true."""
    began = time.monotonic()
    while not claim():
        assert time.monotonic() < began + PATIENCE_S, f"never: {what}"
        time.sleep(0.001)
    return time.monotonic() - began


@contextlib.contextmanager
def upload(fleet: Fleet) -> Iterator[socket.socket]:
    """Half of a body has been sent."""
    with contextlib.closing(fleet.connect()) as connection:
        connection.sendall(head(2_000_000) + b'{"messages": [' + b" " * 1_000_000)
        wait_until(lambda: fleet.value("m3stack_gateway_held_bytes") >= 1_000_000, "held bytes")
        yield connection


@contextlib.contextmanager
def fetch(fleet: Fleet) -> Iterator[socket.socket]:
    """A picture is being fetched from a host that does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as origin:
        url = f"http://127.0.0.1:{origin.getsockname()[1]}/card.png"
        part = {"type": "image_url", "image_url": {"url": url}}
        with contextlib.closing(fleet.ask([part])) as connection:
            origin.settimeout(PATIENCE_S)
            asking, _ = origin.accept()
            with asking:
                yield connection
                # the gateway leaves, too
                asking.settimeout(PATIENCE_S)
                while asking.recv(65536):
                    pass


@contextlib.contextmanager
def decode(fleet: Fleet) -> Iterator[socket.socket]:
    """A long clip is being decoded."""
    url = f"data:video/mp4;base64,{base64.b64encode(CLIP.read_bytes()).decode()}"
    part = {"type": "video_url", "video_url": {"url": url, "fps": 1}}
    with contextlib.closing(fleet.ask([part])) as connection:
        name = "m3stack_gateway_video_processes"
        wait_until(lambda: fleet.value(name) > 0, "a decoder")
        yield connection


@contextlib.contextmanager
def queue(fleet: Fleet) -> Iterator[socket.socket]:
    """Another request runs, and this one waits for it; both leave."""
    with stream(fleet) as running, contextlib.closing(fleet.ask("And me?")) as connection:
        name = "m3stack_worker_waiting_requests"
        wait_until(lambda: fleet.value(name) == 1, "a request in the queue")
        connection.close()
        wait_until(lambda: fleet.value(name) == 0, "an empty queue")
        assert fleet.value("m3stack_worker_running_requests") == 1
        yield running


@contextlib.contextmanager
def prefill(fleet: Fleet) -> Iterator[socket.socket]:
    """A long prompt is being read."""
    with contextlib.closing(fleet.ask("A very long story. " * 4_000, stream=True)) as connection:
        name = "m3stack_worker_used_pages"
        wait_until(lambda: fleet.value(name) > 0, "pages of the prompt")
        yield connection


@contextlib.contextmanager
def stream(fleet: Fleet) -> Iterator[socket.socket]:
    """Tokens are coming."""
    wishes = {"stream": True, "max_tokens": 20_000, "ignore_eos": True}
    with contextlib.closing(fleet.ask("Talk for ever.", **wishes)) as connection:
        seen = b""
        while seen.count(b'"choices":') < 4:
            piece = connection.recv(65536)
            assert piece, seen
            seen += piece
        yield connection


PHASES = {phase.__name__: phase for phase in (upload, fetch, decode, queue, prefill, stream)}


def leave(fleet: Fleet, phase: str) -> float:
    """Leaves in that phase; seconds until every gauge is zero."""
    with PHASES[phase](fleet) as connection:
        assert fleet.held(), f"nothing is held in {phase}"
        # at once, as a client that is killed
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
        return wait_until(lambda: not fleet.held(), f"all is free after {phase}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        stack = Stack(Path(folder))
        try:
            with Fleet.start(stack) as fleet:
                for phase in PHASES:
                    seconds = [leave(fleet, phase) for _ in range(9)]
                    row = {"name": f"free_after_leaving_in_{phase}", "unit": "ms"}
                    row |= {"median": round(statistics.median(seconds) * 1e3, 1)}
                    row |= {"least": round(min(seconds) * 1e3, 1)}
                    print(json.dumps(row | {"most": round(max(seconds) * 1e3, 1)}), flush=True)
        finally:
            stack.close()


if __name__ == "__main__":
    main()
