"""A gateway that is killed in the middle of an upload leaves no decoder, no file and no call."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx

from m3stack.local_ports import free_port
from m3stack.worker.v1 import worker_pb2 as pb
from m3stack.worker.v1 import worker_pb2_grpc as pb_grpc
from tests.e2e import media
from tests.e2e.conftest import Server, Stack, wait_for
from tests.e2e.scripted_worker import ScriptedWorker

PATIENCE_S = 100.0


class Reluctant(ScriptedWorker):
    """Asks for all media and then reads none of it."""

    def __init__(self, identity: pb.Identity) -> None:
        super().__init__(identity, lambda _header: [1], tokens_per_message=1, interval_s=0.0)
        self.ended = threading.Event()

    def Generate(
        self, requests: Iterator[pb.GenerateRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        header = next(requests).header
        context.add_callback(self.ended.set)
        yield pb.GenerateResponse(needs=pb.MediaNeeds(item_indices=range(len(header.media))))
        self.ended.wait(PATIENCE_S)


@contextlib.contextmanager
def reluctant(like: Server) -> Iterator[tuple[str, Reluctant]]:
    with grpc.insecure_channel(like.address) as channel:
        watch = pb_grpc.WorkerServiceStub(channel).Watch(pb.WatchRequest(heartbeat_ms=1000))
        identity = next(iter(watch)).identity
        watch.cancel()
    identity.worker_id = "reluctant"
    service = Reluctant(identity)
    server = grpc.server(ThreadPoolExecutor(4))
    pb_grpc.add_WorkerServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", service
    finally:
        service.closed.set()
        server.stop(grace=1).wait()


def decoders(pid: int) -> list[int]:
    """Children of a process that are FFmpeg by now."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    children = " ".join(task.read_text() for task in tasks).split()
    return [int(child) for child in children if state(int(child))[0] == "ffmpeg"]


def state(pid: int) -> tuple[str, str]:
    """Name and state of a process; empty if there is none."""
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")
    except (FileNotFoundError, ProcessLookupError):
        return "", ""
    return name.split("(", 1)[1], rest[0]


def ours_in_shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "m3stack" in name}


def test_a_gateway_killed_in_mid_upload_leaves_nothing(
    stack: Stack, worker: Server, tmp_path: Path
) -> None:
    clip = media.clip(tmp_path, size="1280x720", seconds=10)
    body = {"messages": [{"role": "user", "content": [media.video_part(clip)]}], "max_tokens": 1}
    files, shared = set(tmp_path.iterdir()), ours_in_shared_memory()
    with reluctant(worker) as (url, service):
        flags = ("--workers", url, "--set", "max_video_processes=1")
        gateway = stack.start("gateway", f"127.0.0.1:{free_port()}", "", *flags)
        wait_for(gateway, "/ready")

        def ask() -> None:
            with contextlib.suppress(httpx.TransportError):
                httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)

        asking = threading.Thread(target=ask)
        asking.start()
        deadline = time.monotonic() + PATIENCE_S
        while not (found := decoders(gateway.process.pid)):
            assert time.monotonic() < deadline, "no decoder"
            time.sleep(0.01)
        # one that would find out by itself, by a broken pipe, proves nothing
        os.kill(found[0], signal.SIGSTOP)

        gateway.kill()

        while state(found[0])[1] not in ("", "Z"):
            assert time.monotonic() < deadline, "the decoder outlives its gateway"
            time.sleep(0.01)
        assert service.ended.wait(PATIENCE_S), "the worker's call goes on"
        asking.join(PATIENCE_S)
    assert ours_in_shared_memory() == shared
    logs = {path for path in tmp_path.iterdir() if path.suffix == ".log"}
    assert set(tmp_path.iterdir()) - logs == files
