"""Both clients against a worker on the loopback interface."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

import pytest

import m3stack.client
from m3stack.client import AsyncWorkerClient, WorkerClient, default_sampling
from m3stack.errors import ErrorKind, WorkerError
from m3stack.types import Event, Finished, Request, Started, Tokens, WorkerState
from tests.worker.engine.history_model import Stack, sampling
from tests.worker.rpc.test_server import expected, picture, text
from tests.worker.rpc.worker_harness import LIMITS, Options, Worker, run, tokens_of, worker


async def blocking(subject: Worker, use: Callable[[WorkerClient], list[Event]]) -> list[Event]:
    """Uses the blocking client on a thread, as plain programs do."""

    def act() -> list[Event]:
        with WorkerClient(subject.target) as client:
            return use(client)

    return await asyncio.to_thread(act)


async def through(which: str, subject: Worker, request: Request) -> list[Event]:
    """Events of a request through one of the two clients."""
    if which == "async":
        return [event async for event in subject.client.generate(request)]
    return await blocking(subject, lambda client: list(client.generate(request)))


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    # the pictures of the tests have a few hundred bytes; they shall come in many chunks
    monkeypatch.setattr(m3stack.client, "CHUNK_BYTES", 50)


def test_both_clients_give_the_same_events() -> None:
    async def scenario() -> None:
        async with worker(Stack(prefix=False)) as subject:
            for request in (text(3), picture(4)):
                first = await through("async", subject, request)
                second = await through("blocking", subject, request)
                assert isinstance(first[0], Started)
                assert isinstance(first[-1], Finished)
                assert first[-1] == second[-1]
                assert tokens_of(first) == tokens_of(second) == expected(request)

    run(scenario)


def test_held_media_need_no_patches_and_unheld_ones_do() -> None:
    async def scenario() -> None:
        async with worker() as subject:
            bare = dataclasses.replace(
                picture(4), media=(dataclasses.replace(picture(4).media[0], patches=None),)
            )
            for attempt in ("async", "blocking"):
                with pytest.raises(WorkerError) as refused:
                    await through(attempt, subject, bare)
                assert refused.value.kind is ErrorKind.MEDIA_REJECTED
                assert refused.value.param == "media[0]"
            await subject.tokens(picture(4))
            assert await subject.tokens(bare) == expected(picture(4))
            events = await blocking(subject, lambda client: list(client.generate(bare)))
            assert tokens_of(events) == expected(picture(4))

    run(scenario)


def test_refusals_carry_kind_message_and_field() -> None:
    async def scenario() -> None:
        async with worker() as subject:
            bad = dataclasses.replace(text(), sampling=sampling(top_p=0.0))
            for attempt in ("async", "blocking"):
                with pytest.raises(WorkerError) as refused:
                    await through(attempt, subject, bad)
                assert refused.value.kind is ErrorKind.INVALID_REQUEST
                assert refused.value.param == "sampling.top_p"
                assert refused.value.message == "sampling.top_p is 0, expected above 0 to 1"

    run(scenario)


def test_other_model_is_refused_by_fingerprint() -> None:
    async def scenario() -> None:
        async with worker() as subject:
            with pytest.raises(WorkerError) as refused:
                async for _ in subject.client.generate(text(), fingerprint=b"x" * 32):
                    pass
            assert refused.value.param == "fingerprint"
            events = [
                e async for e in subject.client.generate(text(), fingerprint=LIMITS.fingerprint)
            ]
            assert tokens_of(events) == expected(text())

    run(scenario)


def test_leaving_the_loop_cancels_the_request() -> None:
    async def scenario() -> None:
        async with worker() as subject:

            def first_token(client: WorkerClient) -> list[Event]:
                events = client.generate(text(max_tokens=180))
                for event in events:
                    if isinstance(event, Tokens):
                        events.close()
                        return [event]
                raise AssertionError("no token came")

            subject.runner.steps_left = 3
            await blocking(subject, first_token)
            await subject.until(lambda: subject.sessions.num_open == 0)
            subject.runner.steps_left = 0
            subject.runner.gate.set()
            await subject.until(lambda: subject.engine.load.used_pages == 0)
            assert subject.engine.load.steps <= 4

    run(scenario)


def test_upload_refused_under_way_gives_the_workers_reason() -> None:
    async def scenario() -> None:
        async with worker(options=Options(upload_timeout_s=100)) as subject:
            good = picture(4)
            item = good.media[0]
            # claims a size that the patches do not have
            short = dataclasses.replace(item, patches=bytes(item.patches or b"")[:120])
            request = dataclasses.replace(good, media=(short,))
            with pytest.raises(WorkerError) as refused:
                await subject.tokens(request)
            assert refused.value.kind is ErrorKind.MEDIA_REJECTED
            assert "ends at 120 of 288 bytes" in refused.value.message

    run(scenario)


def test_info_and_readiness() -> None:
    async def scenario() -> None:
        async with worker(options=Options(state=WorkerState.LOADING)) as subject:
            info = await subject.client.info()
            assert info.worker_id == "w"
            with pytest.raises(WorkerError) as late:
                await subject.client.wait_ready(0.05)
            assert late.value.kind is ErrorKind.DEADLINE_EXCEEDED
            waiting = asyncio.create_task(subject.client.wait_ready(20))
            subject.board.set_state(WorkerState.READY)
            await waiting

    run(scenario)


def test_worker_that_is_not_there_is_named_unavailable() -> None:
    async def scenario() -> None:
        async with AsyncWorkerClient("127.0.0.1:1") as client:
            with pytest.raises(WorkerError) as lost:
                await client.info()
            assert lost.value.kind is ErrorKind.WORKER_UNAVAILABLE
            with pytest.raises(WorkerError) as lost:
                async for _ in client.generate(text()):
                    pass
            assert lost.value.kind is ErrorKind.WORKER_UNAVAILABLE

    run(scenario)


def test_default_sampling_is_greedy_and_knows_its_fields() -> None:
    assert default_sampling(5).temperature == 0
    assert default_sampling(5, top_k=3).top_k == 3
    with pytest.raises(TypeError, match="unknown sampling fields: topk"):
        default_sampling(5, topk=3)
