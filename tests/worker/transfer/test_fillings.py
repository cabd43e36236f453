"""Every filling of the transfer interface does what it says: gRPC, and one that maps memory."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest

from m3stack.rpc.transfer_client import GrpcTransport
from m3stack.rpc.transfer_service import MAX_TRANSFERS, TransferService
from m3stack.transfer.handing_out import KEY_BYTES
from m3stack.transfer.interface import (
    Content,
    ContentKind,
    Holdings,
    Outlet,
    TransferError,
    Transport,
    Wanted,
    content_hash,
)
from m3stack.transfer.keys import chain
from m3stack.types import Request, Source, Stage
from m3stack.worker.v1 import worker_pb2_grpc as pb_grpc
from tests.worker.engine.history_model import PAGE
from tests.worker.rpc.worker_harness import TIMEOUT_S, Worker, run, tokens_of, worker
from tests.worker.transfer.asking import (
    alone,
    film,
    outcomes,
    picture,
    prefill,
    text,
)
from tests.worker.transfer.mapped_filling import MappedOutlet, MappedTransport

SILENCE_S = 0.3


@dataclass(slots=True)
class Pair:
    """A worker that hands out, one that fetches, and the filling between them."""

    source: Worker
    target: Worker
    address: Source
    transport: Transport
    # calls that the source has not ended; None where that is not known
    num_calls: Callable[[], int] | None


@asynccontextmanager
async def pair(filling: str, folder: Path) -> AsyncIterator[Pair]:
    async with worker() as source, worker() as target:
        if filling == "grpc":
            transport = patient(filling)
            yield Pair(source, target, Source(source.target), transport, None)
            await transport.close()
            return
        outlet = MappedOutlet(folder)
        outlet.open_for(source.store)
        transport = patient(filling)
        target.puller._transport = transport
        try:
            address = await outlet.listen()
            yield Pair(source, target, address, transport, lambda: outlet.num_calls)
        finally:
            await transport.close()
            await outlet.close()
        assert list(folder.iterdir()) == []


every_filling = pytest.mark.parametrize("filling", ["grpc", "mapped"])


async def wanted_pages(subject: Worker, request: Request, **changes: object) -> Wanted:
    epoch = await subject.store.epoch()
    keys = chain(request, page_tokens=PAGE, epoch=epoch)
    sizes = (subject.store.page_bytes,) * len(keys)
    wanted = Wanted(ContentKind.PAGE, subject.store.page_layout, epoch, keys, sizes)
    return replace(wanted, **changes)  # type: ignore[arg-type]


async def all_of(pair: Pair, wanted: Wanted) -> tuple[Holdings, list[Content]]:
    async with aclosing(pair.transport.fetch(pair.address, wanted)) as fetched:
        held, *rest = [each async for each in fetched]
    assert isinstance(held, Holdings)
    return held, [each for each in rest if isinstance(each, Content)]


async def failure_of(transport: Transport, address: Source, wanted: Wanted) -> TransferError:
    async def fetch() -> None:
        async with aclosing(transport.fetch(address, wanted)) as fetched:
            async for _ in fetched:
                pass

    with pytest.raises(TransferError) as raised:
        await fetch()
    return raised.value


@every_filling
@pytest.mark.parametrize("make", [lambda: text(70), picture, film], ids=["text", "image", "clip"])
def test_an_answer_is_the_same_whichever_way_its_prompt_comes(
    make: Callable[[], Request], filling: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with pair(filling, tmp_path) as both:
            await prefill(both.source, make())
            forwards = both.target.stack.model.forwards
            stage = Stage(pages=both.address, features=both.address)
            events = [event async for event in both.target.client.generate(make(), stage=stage)]
            assert tokens_of(events) == alone(make())
            # fetched, not computed
            assert both.target.stack.model.forwards - forwards == make().sampling.max_tokens
            assert both.target.stack.model.encode_calls == 0
            assert set(outcomes(both.target)) == {"whole"}

    run(scenario)


@every_filling
def test_what_is_held_comes_first_then_each_content_with_its_hash(
    filling: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with pair(filling, tmp_path) as both:
            await prefill(both.source, text(5 * PAGE + 1))
            wanted = await wanted_pages(both.source, text(8 * PAGE + 1))
            held, contents = await all_of(both, wanted)
            assert held.indices == (0, 1, 2, 3, 4)
            assert [content.index for content in contents] == [0, 1, 2, 3, 4]
            # read when the fetch has long ended
            for content in contents:
                assert len(content.data) == both.source.store.page_bytes
                assert content.sha256 == content_hash(wanted.keys[content.index], content.data)

            other = await wanted_pages(both.source, text(3 * PAGE, salt=1))
            assert await all_of(both, other) == (Holdings(wanted.epoch, ()), [])
            # another epoch is named, and nothing is held under the one that was asked for
            late = replace(wanted, epoch=wanted.epoch + 7)
            assert await all_of(both, late) == (Holdings(wanted.epoch, ()), [])

    run(scenario)


@every_filling
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layout": "another"}, "the layouts differ"),
        ({"keys": (b"short",), "sizes": (1,)}, f"{KEY_BYTES} bytes"),
        ({"keys": (), "sizes": ()}, "keys must be there"),
    ],
    ids=["layout", "keys", "none"],
)
def test_what_makes_no_sense_is_refused_for_good(
    change: dict[str, object], reason: str, filling: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with pair(filling, tmp_path) as both:
            wanted = await wanted_pages(both.source, text(3 * PAGE), **change)
            error = await failure_of(both.transport, both.address, wanted)
            assert (error.is_final, error.is_silent) == (True, False)
            assert reason in str(error)

    run(scenario)


@every_filling
def test_a_content_of_another_size_is_not_taken_in(filling: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with pair(filling, tmp_path) as both:
            await prefill(both.source, text(3 * PAGE + 1))
            sizes = (both.source.store.page_bytes + 1,) * 3
            wanted = replace(await wanted_pages(both.source, text(3 * PAGE + 1)), sizes=sizes)
            assert (await failure_of(both.transport, both.address, wanted)).is_final

    run(scenario)


def patient(filling: str, silence_s: float = TIMEOUT_S) -> Transport:
    """What waits for a source for so long."""
    if filling == "grpc":
        return GrpcTransport(progress_s=silence_s, patience_s=silence_s)
    return MappedTransport(silence_s)


def any_pages() -> Wanted:
    return Wanted(ContentKind.PAGE, "any", 0, (bytes(KEY_BYTES),), (1,))


@every_filling
def test_a_source_that_gives_no_sign_is_called_silent(filling: str) -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            address = Source("127.0.0.1:{1}".format(*mute.getsockname()))
            transport = patient(filling, SILENCE_S)
            error = await failure_of(transport, address, any_pages())
            assert (error.is_final, error.is_silent) == (True, True)
            await transport.close()

    run(scenario)


@every_filling
def test_a_source_that_is_gone_may_come_back(filling: str) -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = Source("127.0.0.1:{1}".format(*server.getsockname()))
        transport = patient(filling)
        error = await failure_of(transport, address, any_pages())
        assert (error.is_final, error.is_silent) == (False, False)
        await transport.close()

    run(scenario)


@every_filling
def test_a_fetch_that_is_left_early_holds_nothing(filling: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with pair(filling, tmp_path) as both:
            await prefill(both.source, text(6 * PAGE + 1))
            wanted = await wanted_pages(both.source, text(6 * PAGE + 1))
            # more than gRPC has places for: one that was kept would leave the last ones none
            for _ in range(MAX_TRANSFERS + 1):
                async with aclosing(both.transport.fetch(both.address, wanted)) as fetched:
                    await anext(fetched)
                    await anext(fetched)
            if both.num_calls is not None:
                num_calls = both.num_calls
                await both.source.until(lambda: num_calls() == 0)
            # others are served, many at once
            found = await asyncio.gather(*(all_of(both, wanted) for _ in range(12)))
            assert {len(contents) for _, contents in found} == {6}
            both.source.stack.pages.check_unpinned()

    run(scenario)


@asynccontextmanager
async def unopened(filling: str, folder: Path) -> AsyncIterator[tuple[Outlet, Source]]:
    """A source that nothing has been given to hand out."""
    if filling == "mapped":
        outlet = MappedOutlet(folder)
        yield outlet, await outlet.listen()
        return
    service = TransferService()
    server = grpc.aio.server()
    pb_grpc.add_TransferServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield service, Source(f"127.0.0.1:{port}")
    await server.stop(None)


@every_filling
def test_a_worker_that_has_nothing_to_give_says_whether_it_ever_will(
    filling: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with unopened(filling, tmp_path) as (outlet, address):
            transport = patient(filling)
            error = await failure_of(transport, address, any_pages())
            assert (error.is_final, error.is_silent) == (False, False)
            assert "still loading" in str(error)

            outlet.refuse("pages in host memory cannot be handed out")
            error = await failure_of(transport, address, any_pages())
            assert (error.is_final, error.is_silent) == (True, False)
            assert "host memory" in str(error)

            # one that stops may come back
            await outlet.close()
            error = await failure_of(transport, address, any_pages())
            assert (error.is_final, error.is_silent) == (False, False)
            await transport.close()

    run(scenario)
