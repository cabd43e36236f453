"""A worker without a model: says a fixed text, a few tokens a message, in a real worker's name."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from m3stack.worker.v1 import worker_pb2 as pb
from m3stack.worker.v1 import worker_pb2_grpc as pb_grpc
from tests.e2e.conftest import Server

TOKENS_PER_MESSAGE = 3
HEARTBEAT_S = 0.5

# what a request is answered with, given what the gateway has sent of it
Script = Callable[[pb.GenerateHeader], list[int]]


class ScriptedWorker(pb_grpc.WorkerServiceServicer):
    """Answers every request by a script, whatever it asks for."""

    def __init__(
        self,
        identity: pb.Identity,
        script: Script,
        *,
        tokens_per_message: int,
        interval_s: float,
    ) -> None:
        self.identity = identity
        self.script = script
        self.tokens_per_message = tokens_per_message
        self.interval_s = interval_s
        self.closed = threading.Event()

    def Watch(self, request: object, context: grpc.ServicerContext) -> Iterator[pb.WatchResponse]:
        state = pb.WORKER_STATE_READY
        yield pb.WatchResponse(identity=self.identity, state=state, load=pb.Load())
        while context.is_active() and not self.closed.wait(HEARTBEAT_S):
            yield pb.WatchResponse(state=state, load=pb.Load())

    def Generate(
        self, requests: Iterator[pb.GenerateRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        header = next(requests).header
        token_ids = self.script(header)
        yield pb.GenerateResponse(started=pb.Started())
        for begin in range(0, len(token_ids), self.tokens_per_message):
            piece = token_ids[begin : begin + self.tokens_per_message]
            if self.interval_s:
                self.closed.wait(self.interval_s)
            yield pb.GenerateResponse(tokens=pb.Tokens(token_ids=piece))
        usage = pb.Usage(
            prompt_tokens=len(header.prompt_token_ids), completion_tokens=len(token_ids)
        )
        yield pb.GenerateResponse(finished=pb.Finished(reason=pb.FINISH_REASON_STOP, usage=usage))


@contextlib.contextmanager
def scripted_worker(
    like: Server,
    script: list[int] | Script,
    *,
    tokens_per_message: int = TOKENS_PER_MESSAGE,
    interval_s: float = 0.0,
) -> Iterator[str]:
    """Serves the script under the identity of a real worker; gives its URL.

    Args:
        like: the worker whose identity is taken.
        script: what every answer says, or what makes an answer of a request.
        tokens_per_message: tokens that come together.
        interval_s: pause before each message.
    """
    with grpc.insecure_channel(like.address) as channel:
        watch = pb_grpc.WorkerServiceStub(channel).Watch(pb.WatchRequest(heartbeat_ms=1000))
        identity = next(iter(watch)).identity
        watch.cancel()
    identity.worker_id = "scripted"
    service = ScriptedWorker(
        identity,
        script if callable(script) else lambda _header: script,
        tokens_per_message=tokens_per_message,
        interval_s=interval_s,
    )
    server = grpc.server(ThreadPoolExecutor(8))
    pb_grpc.add_WorkerServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        service.closed.set()
        server.stop(grace=1).wait()
