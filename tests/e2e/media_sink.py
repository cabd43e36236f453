"""A worker of its own process that takes all media it is told of and throws it away.

    python -m tests.e2e.media_sink ADDRESS    # of the worker in whose name it answers

Prints its own address, and ends with its input.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from m3stack.worker.v1 import worker_pb2 as pb
from m3stack.worker.v1 import worker_pb2_grpc as pb_grpc
from tests.e2e.conftest import Server
from tests.e2e.scripted_worker import ScriptedWorker

CALLS = 64


class MediaSink(ScriptedWorker):
    """Asks for every item of every request."""

    def Generate(
        self, requests: Iterator[pb.GenerateRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        first = next(requests)
        items = first.header.media
        if items:
            needs = pb.MediaNeeds(item_indices=range(len(items)))
            yield pb.GenerateResponse(needs=needs)
        left = sum(item.patch_bytes for item in items)
        while left > 0:
            left -= len(next(requests).chunk.data)
        yield from super().Generate(iter([first]), context)


@contextlib.contextmanager
def media_sink(like: Server) -> Iterator[str]:
    """A sink in another process, in the name of a worker; gives its URL."""
    command = [sys.executable, "-m", "tests.e2e.media_sink", like.address]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield f"http://{process.stdout.readline().strip()}"
        finally:
            process.stdin.close()


def main() -> None:
    with grpc.insecure_channel(sys.argv[1]) as channel:
        watch = pb_grpc.WorkerServiceStub(channel).Watch(pb.WatchRequest(heartbeat_ms=1000))
        identity = next(iter(watch)).identity
        watch.cancel()
    identity.worker_id = "sink"
    service = MediaSink(identity, lambda _header: [1, 2, 3], tokens_per_message=3, interval_s=0.0)
    server = grpc.server(ThreadPoolExecutor(CALLS))
    pb_grpc.add_WorkerServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"127.0.0.1:{port}", flush=True)
    sys.stdin.read()
    service.closed.set()
    server.stop(grace=1).wait()


if __name__ == "__main__":
    main()
