"""Patience with a source that is busy is for a whole transfer, not for each of its messages."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from m3stack.rpc.transfer_client import GrpcTransport
from m3stack.transfer.interface import Content, Holdings, TransferError
from m3stack.types import Source
from m3stack.worker.v1 import worker_pb2 as pb
from m3stack.worker.v1 import worker_pb2_grpc as pb_grpc
from tests.worker.rpc.worker_harness import run
from tests.worker.transfer.test_sources_and_sizes import BUSY, HELD, WANTED, piece

# what one message takes, and how long all of them together may: more than one, less than all
WAIT_S, PATIENCE_S = 2.0, 5.0


class Slow(pb_grpc.TransferServiceServicer):
    """Is busy for a while before each of its messages."""

    def __init__(self) -> None:
        self.said = 0

    async def Fetch(self, request: pb.FetchRequest, context: grpc.aio.ServicerContext) -> None:
        for message in (HELD, *(piece(0, b"0", offset=0), piece(0, b"1", offset=1)), BUSY):
            await context.write(BUSY)
            await asyncio.sleep(WAIT_S)
            await context.write(message)
            self.said += 1


async def fetched(place: Source, *, patience_s: float) -> list[Holdings | Content]:
    transport = GrpcTransport(progress_s=60, patience_s=patience_s)
    try:
        return [each async for each in transport.fetch(place, WANTED)]
    finally:
        await transport.close()


def test_a_source_that_is_busy_before_every_message_is_given_up() -> None:
    async def scenario() -> None:
        slow, server = Slow(), grpc.aio.server()
        pb_grpc.add_TransferServiceServicer_to_server(slow, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        with pytest.raises(TransferError, match="busy for 5 s") as given_up:
            await fetched(Source(f"127.0.0.1:{port}"), patience_s=PATIENCE_S)
        assert given_up.value.is_silent
        # no single message was waited for that long
        assert slow.said >= 2
        await server.stop(0)

    run(scenario)
