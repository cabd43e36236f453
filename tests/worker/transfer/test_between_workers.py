"""Workers that fetch from each other, over real gRPC: equal tokens, and what breaks is computed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import grpc
import pytest

from m3stack.engine.plan import FatalStepError
from m3stack.errors import ErrorKind, WorkerError
from m3stack.rpc.tls import peer_credentials, server_credentials
from m3stack.rpc.transfer_client import GrpcTransport
from m3stack.rpc.transfer_service import TransferService
from m3stack.transfer.interface import Content, Holdings, TransferError, Wanted
from m3stack.types import Finished, Purpose, Request, Role, Source, Stage, Tokens
from m3stack.worker.v1 import worker_pb2 as pb
from m3stack.worker.v1 import worker_pb2_grpc as pb_grpc
from tests.worker.engine.history_model import (
    IMAGE_ID,
    PAGE,
    PATCH_FORMAT,
    VIDEO_ID,
    Stack,
    clip,
    greedy_alone,
    image,
    sampling,
)
from tests.worker.rpc.worker_harness import Options, Worker, run, worker

PREFILL = Stage(Purpose.PREFILL)
CERTIFICATES = Path(__file__).parents[2] / "data" / "tls"
# one that the server's certificate there is for
SERVER_NAME = "m3-worker.models.svc"


def text(length: int, *, name: str = "r", salt: int = 0, **changes: object) -> Request:
    prompt = tuple((index * 7 + salt * 13) % 59 for index in range(length))
    return Request(name, prompt, sampling(**changes))


def picture(seed: int = 1, *, name: str = "r") -> Request:
    prompt = [5] * 9 + [IMAGE_ID] * 12 + [6] * 7
    return Request(
        name,
        tuple(prompt),
        sampling(),
        PATCH_FORMAT,
        (image(seed, offset=9, num_tokens=12),),
    )


def film(seed: int = 2) -> Request:
    prompt = [5] * 3 + ([VIDEO_ID] * 6 + [6]) * 4 + [8] * 5
    item = clip(seed, offset=3, num_slices=4, tokens_per_slice=6)
    return Request("film", tuple(prompt), sampling(), PATCH_FORMAT, (item,))


def alone(request: Request) -> list[int]:
    patches = {item.media_hash: bytes(item.patches or b"") for item in request.media}
    return greedy_alone(request, patches)


def source_of(subject: Worker) -> Source:
    return Source(subject.target)


async def prefill(subject: Worker, request: Request, stage: Stage = PREFILL) -> Finished:
    """Computes a prompt for others; nothing but its end may be told."""
    events = [event async for event in subject.client.generate(request, stage=stage)]
    assert not any(isinstance(event, Tokens) for event in events)
    end = events[-1]
    assert isinstance(end, Finished)
    return end


async def answer(subject: Worker, request: Request, source: Source) -> tuple[list[int], Finished]:
    stage = Stage(pages=source)
    events = [event async for event in subject.client.generate(request, stage=stage)]
    end = events[-1]
    assert isinstance(end, Finished)
    return [t for e in events if isinstance(e, Tokens) for t in e.token_ids], end


def outcomes(subject: Worker) -> dict[str, float]:
    """Ended transfers by outcome."""
    found: dict[str, float] = {}
    for family in subject.metrics.registry.collect():
        for sample in family.samples:
            if sample.name == "m3stack_worker_transfers_total" and sample.value:
                found[sample.labels["outcome"]] = sample.value
    return found


@pytest.mark.parametrize("make", [lambda: text(70), picture, film], ids=["text", "image", "clip"])
def test_a_fetched_prompt_gives_the_tokens_of_a_computed_one(make: Callable[[], Request]) -> None:
    async def scenario() -> None:
        request = make()
        decode_only = Options(role=Role.DECODE)
        async with worker() as first, worker(options=decode_only) as second:
            await prefill(first, request)
            steps = second.stack.model.forwards
            tokens, end = await answer(second, request, source_of(first))
            assert tokens == alone(request)
            full_pages = (len(request.prompt_token_ids) - 1) // PAGE
            assert end.usage.cached_tokens == full_pages * PAGE
            # one step for what is left of the prompt, one a further token; the tower never ran
            assert second.stack.model.forwards - steps == request.sampling.max_tokens
            assert second.stack.model.encode_calls == 0
            assert set(outcomes(second)) == {"whole"}

    run(scenario)


def test_only_missing_pages_travel() -> None:
    async def scenario() -> None:
        async with worker() as first, worker() as second:
            await second.tokens(text(3 * PAGE + 1, max_tokens=1))
            await prefill(first, text(70))
            tokens, _ = await answer(second, text(70), source_of(first))
            assert tokens == alone(text(70))
            # 8 full pages of 70 tokens, of which 3 were there
            page_bytes = second.store.page_bytes
            value = second.metrics.registry.get_sample_value
            brought = value("m3stack_worker_transferred_bytes_total", {"kind": "pages"})
            assert brought == 5 * page_bytes

    run(scenario)


def test_a_flushed_source_or_target_is_asked_by_other_names() -> None:
    async def scenario() -> None:
        async with worker() as first, worker() as second:
            await first.admin.FlushPrefixCache(pb.FlushPrefixCacheRequest())
            await first.admin.FlushPrefixCache(pb.FlushPrefixCacheRequest())
            await second.admin.FlushPrefixCache(pb.FlushPrefixCacheRequest())
            await prefill(first, text(40))
            tokens, end = await answer(second, text(40), source_of(first))
            assert tokens == alone(text(40))
            assert end.usage.cached_tokens == 32
            assert outcomes(second) == {"whole": 1}

    run(scenario)


def test_pages_of_another_tenant_or_salt_are_not_found() -> None:
    async def scenario() -> None:
        async with worker() as first, worker() as second:
            mine = Request("mine", text(40).prompt_token_ids, sampling(), tenant="a")
            theirs = Request("theirs", text(40).prompt_token_ids, sampling(), tenant="b")
            await prefill(first, mine)
            _, end = await answer(second, theirs, source_of(first))
            assert end.usage.cached_tokens == 0
            assert outcomes(second) == {"failed": 1}

    run(scenario)


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


def test_a_pool_without_room_takes_what_fits_and_evicts_nothing_in_use() -> None:
    async def scenario() -> None:
        async with worker() as first, worker(Stack(num_pages=12)) as second:
            await prefill(first, text(80))
            second.runner.gate.clear()
            # 60 and 9 tokens: 8 pages, and one more as it goes on; it stands in its first step
            running = asyncio.create_task(second.tokens(text(60, name="old", salt=3)))
            await second.until(second.runner.entered.is_set)
            waiting = asyncio.create_task(answer(second, text(80), source_of(first)))
            second.runner.gate.set()
            assert await running == alone(text(60, salt=3))
            assert (await waiting)[0] == alone(text(80))

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


def test_pages_come_back_from_the_sources_host_memory() -> None:
    async def scenario() -> None:
        stack = Stack(num_pages=12, host_slots=32)
        async with worker(stack) as first, worker() as second:
            await prefill(first, text(70))
            # pushes the earlier pages out of the device
            await prefill(first, text(80, name="other", salt=5))
            tokens, end = await answer(second, text(70), source_of(first))
            assert tokens == alone(text(70))
            assert end.usage.cached_tokens == 64

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


@pytest.mark.parametrize(
    ("role", "purpose", "served"),
    [
        (Role.ALL, Purpose.ANSWER, True),
        (Role.ALL, Purpose.PREFILL, True),
        (Role.ALL, Purpose.ENCODE, False),
        (Role.PREFILL, Purpose.PREFILL, True),
        (Role.PREFILL, Purpose.ANSWER, False),
        (Role.DECODE, Purpose.ANSWER, True),
        (Role.DECODE, Purpose.PREFILL, False),
        (Role.ENCODE, Purpose.ENCODE, True),
        (Role.ENCODE, Purpose.ANSWER, False),
    ],
)
def test_a_role_serves_its_purposes_and_refuses_others_by_name(
    role: Role, purpose: Purpose, served: bool
) -> None:
    async def scenario() -> None:
        async with worker(options=Options(role=role)) as subject:
            call = subject.client.generate(text(20), stage=Stage(purpose))
            if served:
                assert isinstance([event async for event in call][-1], Finished)
                return
            with pytest.raises(WorkerError) as refusal:
                _ = [event async for event in call]
            assert refusal.value.kind is ErrorKind.INVALID_REQUEST
            assert refusal.value.param == "purpose"
            assert f"role {role.name.lower()}" in refusal.value.message

    run(scenario)


@pytest.mark.parametrize(
    "address",
    [
        *("", "host", "host:", ":1", "h\n:1", "é:1", "a" * 300 + ":1", "host:0", "host:65536"),
        # other kinds of address that a resolver knows
        *("unix:/run/m3.sock:1", "unix:m3:1", "dns:host:1", "dns:///host:1", "ipv4:10.0.0.1:1"),
        *("http://host:1", "[::1", "::1:1", "[host]:1"),
    ],
)
def test_an_address_that_is_none_is_refused(address: str) -> None:
    async def scenario() -> None:
        async with worker() as subject:
            with pytest.raises(WorkerError) as refusal:
                await answer(subject, text(20), Source(address))
            assert refusal.value.param == "pages_source.address"

    run(scenario)


def test_workers_with_certificates_fetch_by_tls_and_turn_others_away(tmp_path: Path) -> None:
    for side in ("server", "client"):
        (tmp_path / side).mkdir()
        for name, file in (("ca.crt", "ca"), ("tls.crt", side), ("tls.key", side)):
            given = CERTIFICATES / f"{file}{Path(name).suffix}"
            (tmp_path / side / name).write_bytes(given.read_bytes())

    async def scenario() -> None:
        async with worker() as first, worker() as second:
            await prefill(first, text(70))
            service = TransferService()
            service.open_for(first.store)
            server = grpc.aio.server()
            pb_grpc.add_TransferServiceServicer_to_server(service, server)
            port = server.add_secure_port("127.0.0.1:0", server_credentials(tmp_path / "server"))
            await server.start()
            source = Source(f"127.0.0.1:{port}", SERVER_NAME)
            # without a certificate of its own, nobody gets anything
            assert await second.puller.pages(text(70), source) == 0
            secure = GrpcTransport(peer_credentials(tmp_path / "client"))
            second.puller._transport = secure
            assert await second.puller.pages(text(70), source) == 64
            # the name that was asked for is the one that is checked
            await second.admin.FlushPrefixCache(pb.FlushPrefixCacheRequest())
            other = Source(f"127.0.0.1:{port}", "somebody.else")
            assert await second.puller.pages(text(70), other) == 0
            await secure.close()
            await server.stop(0)

    run(scenario)
