"""Workers that fetch from each other, over real gRPC: what travels, and equal tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from m3stack.types import Request, Role
from m3stack.worker.v1 import worker_pb2 as pb
from tests.worker.engine.history_model import (
    PAGE,
    Stack,
    sampling,
)
from tests.worker.rpc.worker_harness import Options, run, worker
from tests.worker.transfer.asking import (
    alone,
    answer,
    film,
    outcomes,
    picture,
    prefill,
    source_of,
    text,
)


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
