"""What breaks while workers fetch from each other is computed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

import grpc
import pytest

from m3stack.engine.plan import FatalStepError
from m3stack.errors import ErrorKind, WorkerError
from m3stack.transfer.interface import Content, Holdings, TransferError, Wanted
from m3stack.types import Purpose, Request, Source, Stage
from m3stack.worker.v1 import worker_pb2 as pb
from m3stack.worker.v1 import worker_pb2_grpc as pb_grpc
from tests.worker.engine.history_model import (
    PAGE,
    Stack,
)
from tests.worker.rpc.worker_harness import Options, run, worker
from tests.worker.transfer.asking import (
    alone,
    answer,
    outcomes,
    picture,
    prefill,
    source_of,
    text,
)


def test_a_source_that_is_not_there_costs_a_computation_and_no_request() -> None:
    async def scenario() -> None:
        async with worker() as subject:
            tokens, end = await answer(subject, text(40), Source("127.0.0.1:1"))
            assert tokens == alone(text(40))
            assert end.usage.cached_tokens == 0
            assert outcomes(subject) == {"failed": 1}

    run(scenario)


def test_another_layout_is_refused_by_name_and_computed() -> None:
    async def scenario() -> None:
        options = Options(layout="of another model")
        async with worker(options=options) as first, worker() as second:
            await prefill(first, text(40))
            tokens, _ = await answer(second, text(40), source_of(first))
            assert tokens == alone(text(40))
            assert outcomes(second) == {"failed": 1}
            channel = grpc.aio.insecure_channel(first.target)
            stub = pb_grpc.TransferServiceStub(channel)
            request = pb.FetchRequest(kind=pb.CONTENT_KIND_PAGE, layout="of mine", keys=[bytes(32)])
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await stub.Fetch(request).read()
            await channel.close()
            assert "'of mine' is wanted, 'of another model' is here" in str(refusal.value.details())

    run(scenario)


class Flawed:
    """The real transport with a flaw at some content of every call."""

    def __init__(self, inner: object, *, at: int, flaw: str) -> None:
        self.inner, self.at, self.flaw = inner, at, flaw
        self.asked: list[int] = []

    async def fetch(
        self, source: Source, wanted: Wanted
    ) -> AsyncGenerator[Holdings | Content, None]:
        self.asked.append(len(wanted.keys))
        place = 0
        async for content in self.inner.fetch(source, wanted):  # type: ignore[attr-defined]
            if isinstance(content, Content):
                if place == self.at and self.flaw == "cut":
                    raise TransferError("cut")
                if place == self.at and self.flaw == "corrupt":
                    damaged = bytearray(content.data)
                    damaged[3] ^= 1
                    yield Content(content.index, bytes(damaged), content.sha256)
                    continue
                if place == self.at and self.flaw == "swapped":
                    continue
                place += 1
            yield content

    async def close(self) -> None:
        pass


def test_a_cut_transfer_goes_on_with_what_is_missing() -> None:
    async def scenario() -> None:
        async with worker() as first, worker() as second:
            await prefill(first, text(70))
            flawed = Flawed(second.transport, at=3, flaw="cut")
            second.puller._transport = flawed  # type: ignore[assignment]
            tokens, end = await answer(second, text(70), source_of(first))
            assert tokens == alone(text(70))
            assert end.usage.cached_tokens == 64
            # three came with each call
            assert flawed.asked == [8, 5, 2]
            assert outcomes(second) == {"whole": 1}

    run(scenario)


def test_a_damaged_page_is_not_taken_in() -> None:
    async def scenario() -> None:
        async with worker() as first, worker() as second:
            await prefill(first, text(70))
            flawed = Flawed(second.transport, at=0, flaw="corrupt")
            second.puller._transport = flawed  # type: ignore[assignment]
            tokens, end = await answer(second, text(70), source_of(first))
            assert tokens == alone(text(70))
            assert end.usage.cached_tokens == 0
            assert outcomes(second) == {"corrupt": 1}

    run(scenario)


def test_what_lies_behind_a_page_that_went_is_not_taken_in() -> None:
    async def scenario() -> None:
        async with worker() as first, worker() as second:
            await prefill(first, text(70))
            second.puller._transport = Flawed(  # type: ignore[assignment]
                second.transport, at=2, flaw="swapped"
            )
            tokens, end = await answer(second, text(70), source_of(first))
            assert tokens == alone(text(70))
            assert end.usage.cached_tokens == 2 * PAGE
            assert outcomes(second) == {"partial": 1}

    run(scenario)


def test_one_content_in_the_place_of_another_is_noticed() -> None:
    async def scenario() -> None:
        async with worker() as first, worker() as second:
            await prefill(first, text(70))

            class Swapping(Flawed):
                async def fetch(
                    self, source: Source, wanted: Wanted
                ) -> AsyncGenerator[Holdings | Content, None]:
                    held = [c async for c in self.inner.fetch(source, wanted)]  # type: ignore[attr-defined]
                    yield held[0]
                    # whole, with its own good hash, but it is the page behind
                    yield Content(0, held[2].data, held[2].sha256)

            second.puller._transport = Swapping(  # type: ignore[assignment]
                second.transport, at=0, flaw=""
            )
            tokens, end = await answer(second, text(70), source_of(first))
            assert tokens == alone(text(70))
            assert (end.usage.cached_tokens, outcomes(second)) == (0, {"corrupt": 1})

    run(scenario)


def test_a_silent_source_is_given_up() -> None:
    class Silent(pb_grpc.TransferServiceServicer):
        def __init__(self) -> None:
            self.calls = 0

        async def Fetch(self, request: pb.FetchRequest, context: object) -> None:
            self.calls += 1
            await asyncio.sleep(60)

    async def scenario() -> None:
        silent, server = Silent(), grpc.aio.server()
        pb_grpc.add_TransferServiceServicer_to_server(silent, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        impatient = Options(transfer_silence_s=2)
        async with worker(options=impatient) as subject, worker() as other:
            source = Source(f"127.0.0.1:{port}")
            many = [text(40, name=f"r{salt}", salt=salt) for salt in range(6)]
            answers = await asyncio.gather(*(answer(subject, each, source) for each in many))
            assert [tokens for tokens, _ in answers] == [alone(each) for each in many]
            # two had a place; all others were told that it is silent
            assert silent.calls == 2
            assert outcomes(subject) == {"failed": 6}
            # nobody who asks another one stands behind them
            await prefill(other, text(70))
            again = asyncio.create_task(answer(subject, text(41), source))
            tokens, _ = await answer(subject, text(70), source_of(other))
            assert tokens == alone(text(70))
            assert outcomes(subject)["whole"] == 1
            await again
            assert silent.calls == 2
        await server.stop(0)

    run(scenario)


@pytest.mark.parametrize("make", [lambda: text(70), picture], ids=["pages", "features"])
def test_what_cannot_be_taken_in_here_is_computed(make: Callable[[], Request]) -> None:
    async def scenario() -> None:
        async with worker() as first, worker() as second:
            await prefill(first, make())

            def out_of_memory(*arguments: object) -> None:
                raise RuntimeError("out of memory")

            second.store._port.write_page = out_of_memory  # type: ignore[method-assign]
            second.store._port.keep_features = out_of_memory  # type: ignore[method-assign]
            tokens, end = await answer(second, make(), source_of(first))
            assert tokens == alone(make())
            assert end.usage.cached_tokens == 0
            assert set(outcomes(second)) == {"failed"}

    run(scenario)


def test_nobody_waits_for_an_engine_that_a_transfer_has_ended() -> None:
    async def scenario() -> None:
        stack = Stack()
        async with worker() as first:
            await prefill(first, text(70))
            with contextlib.suppress(AssertionError):
                async with worker(stack) as second:

                    def broken(*arguments: object) -> None:
                        raise FatalStepError("a rank is gone")

                    second.store._port.write_page = broken  # type: ignore[method-assign]
                    with pytest.raises(WorkerError) as failure:
                        await asyncio.wait_for(answer(second, text(70), source_of(first)), 60)
                    assert failure.value.kind is ErrorKind.WORKER_UNAVAILABLE

    run(scenario)


def test_features_that_come_for_nobody_are_not_kept() -> None:
    async def scenario() -> None:
        async with worker() as first, worker() as second:
            await first.tokens(picture())
            second.runner.gate.clear()
            # its step holds the engine thread, so what comes has to wait for it
            running = asyncio.create_task(second.tokens(text(9, name="busy")))
            await second.until(second.runner.entered.is_set)
            asked = asyncio.Event()
            write = second.store.write_features

            async def told(key: bytes, content: bytes) -> None:
                asked.set()
                await write(key, content)

            second.store.write_features = told  # type: ignore[method-assign]
            leaving = asyncio.create_task(answer(second, picture(), source_of(first)))
            await asked.wait()
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await second.until(lambda: second.stack.media.num_pinned == 0)
            second.runner.gate.set()
            await running
            await second.store.epoch()
            assert second.stack.encoder._features == {}
            assert second.stack.media.booked_bytes == 0

    run(scenario)


def test_features_that_cannot_be_fetched_are_asked_of_the_client() -> None:
    async def scenario() -> None:
        async with worker() as first, worker() as second:
            stage = Stage(Purpose.PREFILL, features=source_of(first))
            await prefill(second, picture(), stage)
            assert second.stack.model.encode_calls == 1
            assert outcomes(second) == {"failed": 1}

    run(scenario)


def test_a_client_that_leaves_while_pages_come_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        async with worker() as first, worker() as second:
            await prefill(first, text(70))
            came, go_on = asyncio.Event(), asyncio.Event()

            class Halting(Flawed):
                async def fetch(
                    self, source: Source, wanted: Wanted
                ) -> AsyncGenerator[Holdings | Content, None]:
                    async for content in self.inner.fetch(source, wanted):  # type: ignore[attr-defined]
                        yield content
                        came.set()
                        await go_on.wait()

            second.puller._transport = Halting(  # type: ignore[assignment]
                second.transport, at=0, flaw=""
            )
            leaving = asyncio.create_task(answer(second, text(70), source_of(first)))
            await came.wait()
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await second.until(lambda: second.sessions.num_open == 0)
            second.puller._transport = second.transport
            assert (await answer(second, text(70), source_of(first)))[0] == alone(text(70))

    run(scenario)
