"""Two workers under load that fetch from each other while everything breaks: right or computed."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncGenerator

import pytest

from m3stack.engine.scheduler import SchedulerLimits
from m3stack.rpc.transfer_client import GrpcTransport
from m3stack.transfer.interface import Content, Holdings, TransferError, Wanted
from m3stack.types import Finished, Purpose, Source, Stage, Tokens
from m3stack.worker.v1 import worker_pb2 as pb
from tests.worker.engine.history_model import Stack
from tests.worker.rpc.test_rpc_chaos import expected, random_request
from tests.worker.rpc.worker_harness import Worker, run, worker

AT_ONCE = 8
DEAD = Source("127.0.0.1:1")


class Faulty:
    """The real transport with faults drawn at random."""

    def __init__(self, inner: GrpcTransport, rng: random.Random) -> None:
        self.inner, self.rng = inner, rng
        self.good = 0
        self.cuts = 0
        self.damages = 0

    async def fetch(
        self, source: Source, wanted: Wanted
    ) -> AsyncGenerator[Holdings | Content, None]:
        async for content in self.inner.fetch(source, wanted):
            draw = self.rng.random()
            if draw < 0.08:
                self.cuts += 1
                raise TransferError("cut")
            if isinstance(content, Content) and draw < 0.16:
                self.damages += 1
                data = bytearray(content.data)
                data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
                yield Content(content.index, bytes(data), content.sha256)
                continue
            self.good += isinstance(content, Content)
            yield content

    async def close(self) -> None:
        await self.inner.close()


async def one(rng: random.Random, number: int, pair: tuple[Worker, Worker]) -> None:
    """A request somewhere, perhaps computed elsewhere before; its client may leave."""
    first, second = rng.sample(pair, 2)
    request = random_request(rng, number)
    if rng.random() < 0.7:
        ahead = dataclasses.replace(request, request_id=f"{request.request_id}-prefill")
        stage = Stage(Purpose.PREFILL, pages=rng.choice([None, Source(second.target)]))
        events = [event async for event in first.client.generate(ahead, stage=stage)]
        assert isinstance(events[-1], Finished)
        assert not any(isinstance(event, Tokens) for event in events)
    if rng.random() < 0.05:
        await first.admin.FlushPrefixCache(pb.FlushPrefixCacheRequest())
    source = rng.choice([Source(first.target)] * 8 + [DEAD])
    features = rng.choice([None, source])
    events = second.client.generate(request, stage=Stage(pages=source, features=features))
    left = rng.choice([None, None, None, rng.randint(0, 4)])
    tokens: list[int] = []
    async for event in events:
        if isinstance(event, Tokens):
            tokens.extend(event.token_ids)
        if left is not None and len(tokens) > left:
            break
    await events.aclose()
    whole = expected(request)
    assert tokens == (whole if left is None else whole[: len(tokens)])


@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_breaks_every_answer_is_right_and_nothing_is_left(seed: int) -> None:
    rng = random.Random(seed)
    limits = SchedulerLimits(max_batch_tokens=24, max_sequences=4, max_encode_patches=64)

    def stack(host_slots: int) -> Stack:
        # too few pages for what runs: preemptions, evictions, and half of them with a host tier
        return Stack(num_pages=26, limits=limits, media_budget=400, host_slots=host_slots)

    async def scenario() -> None:
        async with worker(stack(0)) as first, worker(stack(12)) as second:
            faulty = [Faulty(each.transport, rng) for each in (first, second)]
            for each, transport in zip((first, second), faulty, strict=True):
                each.puller._transport = transport
            places = asyncio.Semaphore(AT_ONCE)

            async def bounded(number: int) -> None:
                async with places:
                    await one(rng, number, (first, second))

            await asyncio.gather(*(bounded(number) for number in range(60)))
            # all of it happened
            assert sum(each.good for each in faulty) > 30
            assert sum(each.cuts for each in faulty) > 3
            assert sum(each.damages for each in faulty) > 3
            await first.until(lambda: first.engine.load.running_requests == 0)
            await second.until(lambda: second.engine.load.running_requests == 0)
            for each in (first, second):
                each.stack.pages.check([])
                each.stack.pages.check_unpinned()

    run(scenario, timeout_s=100)
