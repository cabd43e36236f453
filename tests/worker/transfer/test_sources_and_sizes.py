"""What a source may be, announce, and take its time for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
import pytest

from m3stack.errors import WorkerError
from m3stack.rpc.source_addresses import AllowedSources
from m3stack.rpc.transfer_client import GrpcTransport
from m3stack.transfer.interface import Content, ContentKind, Holdings, TransferError, Wanted
from m3stack.types import Source
from m3stack.worker.v1 import worker_pb2 as pb
from m3stack.worker.v1 import worker_pb2_grpc as pb_grpc
from tests.worker.rpc.worker_harness import Options, run, worker
from tests.worker.transfer.asking import (
    alone,
    answer,
    outcomes,
    prefill,
    source_of,
    text,
)

BUSY = pb.FetchResponse(busy=pb.Busy())
HELD = pb.FetchResponse(holdings=pb.Holdings(epoch=1, indices=[0, 1]))
WANTED = Wanted(ContentKind.PAGE, "any", 1, (bytes(32), bytes(32)), (4, 4))


def piece(index: int, data: bytes, *, total: int = 4, offset: int = 0) -> pb.FetchResponse:
    return pb.FetchResponse(
        piece=pb.Piece(index=index, offset=offset, data=data, total_bytes=total)
    )


class Told(pb_grpc.TransferServiceServicer):
    """Says what it was told to, the last message for ever if it is to."""

    def __init__(self, messages: Sequence[pb.FetchResponse], *, for_ever: bool) -> None:
        self.messages, self.for_ever = messages, for_ever

    async def Fetch(self, request: pb.FetchRequest, context: grpc.aio.ServicerContext) -> None:
        for message in self.messages:
            await context.write(message)
        while self.for_ever:
            await context.write(self.messages[-1])
            await asyncio.sleep(0.001)


@asynccontextmanager
async def source(*messages: pb.FetchResponse, for_ever: bool = False) -> AsyncIterator[Source]:
    server = grpc.aio.server()
    told = Told(messages, for_ever=for_ever)
    pb_grpc.add_TransferServiceServicer_to_server(told, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield Source(f"127.0.0.1:{port}")
    await server.stop(0)


async def fetched(place: Source, *, patience_s: float = 60) -> list[Holdings | Content]:
    transport = GrpcTransport(progress_s=60, patience_s=patience_s)
    try:
        return [each async for each in transport.fetch(place, WANTED)]
    finally:
        await transport.close()


@pytest.mark.parametrize(
    ("sent", "complaint"),
    [
        # far below any fixed bound, far above what was asked for
        (piece(0, b"0123", total=300 << 20), "314572800 bytes is announced where 4 are expected"),
        (piece(0, b"01", total=2), "2 bytes is announced where 4 are expected"),
        (piece(2, b"0123"), "what was not asked for"),
        (HELD, "what was not asked for"),
    ],
)
def test_contents_of_another_size_or_place_are_refused_before_room_is_made(
    sent: pb.FetchResponse, complaint: str
) -> None:
    async def scenario() -> None:
        async with source(HELD, sent) as place:
            with pytest.raises(TransferError, match=complaint) as refused:
                await fetched(place)
            assert refused.value.is_final

    run(scenario)


def test_a_content_comes_once() -> None:
    async def scenario() -> None:
        async with source(HELD, piece(1, b"0123"), piece(1, b"0123")) as place:
            with pytest.raises(TransferError, match="what was not asked for"):
                await fetched(place)

    run(scenario)


def test_signs_of_life_may_stand_between_any_two_messages() -> None:
    async def scenario() -> None:
        halves = piece(0, b"01"), piece(0, b"23", offset=2)
        said = [BUSY, BUSY, HELD, BUSY, halves[0], BUSY, halves[1], BUSY, piece(1, b"4567"), BUSY]
        async with source(*said) as place:
            _, first, second = await fetched(place)
            assert isinstance(first, Content)
            assert isinstance(second, Content)
            assert (first.data, second.data) == (b"0123", b"4567")

    run(scenario)


def test_a_source_that_is_only_ever_busy_is_given_up() -> None:
    async def scenario() -> None:
        async with source(BUSY, for_ever=True) as place:
            with pytest.raises(TransferError, match=r"busy for 0\.05 s") as given_up:
                await fetched(place, patience_s=0.05)
            assert given_up.value.is_silent

    run(scenario)


def test_a_source_in_a_long_step_says_that_it_lives() -> None:
    async def scenario() -> None:
        async with worker(options=Options(transfer_sign_s=0.01)) as first, worker() as second:
            await prefill(first, text(70))
            first.runner.gate.clear()
            first.runner.entered.clear()
            running = asyncio.create_task(first.tokens(text(9, name="long", salt=4)))
            await first.until(first.runner.entered.is_set)
            async with grpc.aio.insecure_channel(first.target) as channel:
                layout = first.store.page_layout
                request = pb.FetchRequest(
                    kind=pb.CONTENT_KIND_PAGE, layout=layout, epoch=1, keys=[bytes(32)]
                )
                call = pb_grpc.TransferServiceStub(channel).Fetch(request)
                assert [(await call.read()).WhichOneof("body") for _ in range(3)] == ["busy"] * 3
                call.cancel()
            waiting = asyncio.create_task(answer(second, text(70), source_of(first)))
            first.runner.gate.set()
            tokens, _ = await waiting
            assert tokens == alone(text(70))
            assert outcomes(second) == {"whole": 1}
            await running

    run(scenario)


def test_a_worker_without_a_prefix_cache_fetches_no_pages() -> None:
    async def scenario() -> None:
        async with worker() as first, worker(options=Options(keeps_pages=False)) as second:
            await prefill(first, text(70))
            tokens, end = await answer(second, text(70), source_of(first))
            assert tokens == alone(text(70))
            assert end.usage.cached_tokens == 0
            assert outcomes(second) == {}

    run(scenario)


ALLOWED = "10.1.0.0/16, fd00::/8, *.models.svc, Worker-1, 192.168.0.7"


@pytest.mark.parametrize(
    ("address", "is_allowed"),
    [
        ("10.1.2.3:50051", True),
        ("10.2.0.1:50051", False),
        ("[fd00::1]:50051", True),
        ("[fe80::1]:50051", False),
        ("m3-0.m3.models.svc:50051", True),
        ("M3-0.models.SVC.:50051", True),
        ("models.svc:50051", False),
        ("evil-models.svc:50051", False),
        ("worker-1:1", True),
        ("worker-2:1", False),
        ("192.168.0.7:1", True),
        ("192.168.0.8:1", False),
        # numbers that are no address are a name
        ("10.1.2:1", False),
    ],
)
def test_sources_are_those_that_the_settings_allow(address: str, is_allowed: bool) -> None:
    assert (AllowedSources(ALLOWED).refusal(address) is None) is is_allowed
    assert AllowedSources().refusal(address) is None


def test_a_request_that_names_another_source_is_refused() -> None:
    async def scenario() -> None:
        async with (
            worker() as first,
            worker(options=Options(allowed_sources="10.0.0.0/8")) as second,
        ):
            with pytest.raises(WorkerError, match=r"one of allowed_sources \(10") as refusal:
                await answer(second, text(20), source_of(first))
            assert refusal.value.param == "pages_source.address"

    run(scenario)


@pytest.mark.parametrize("name", ["unix", "dns", "vsock", "ipv4"])
def test_a_host_that_is_called_like_another_kind_of_address_is_a_host(name: str) -> None:
    async def scenario() -> None:
        transport = GrpcTransport(progress_s=60)
        channel = transport._connect(Source(f"{name}:1"))
        assert channel._channel.target == f"dns:///{name}:1".encode()  # type: ignore[attr-defined]
        await channel.close()

    run(scenario)
