"""Clients that leave, lie and dawdle, while runner and host tier fail: nothing is left of any."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable

import grpc
import pytest

from m3stack.engine.plan import StepPlan, StepResult
from m3stack.engine.scheduler import SchedulerLimits
from m3stack.errors import ErrorKind, WorkerError
from m3stack.rpc import convert
from m3stack.types import Finished, Request, Tokens
from m3stack.worker.v1 import worker_pb2 as pb
from tests.worker.engine.history_model import (
    IMAGE_ID,
    PATCH_FORMAT,
    VIDEO_ID,
    Stack,
    clip,
    greedy_alone,
    image,
    sampling,
)
from tests.worker.rpc.worker_harness import LIMITS, Options, Worker, run, worker

AT_ONCE = 12
NUM_PAGES = 40


def random_request(rng: random.Random, number: int) -> Request:
    rules = sampling(max_tokens=rng.randint(1, 30))
    kind = rng.randrange(4)
    if kind == 0:
        width = rng.randint(1, 20)
        item = image(rng.randrange(9), offset=1, num_tokens=width)
        return Request(f"r{number}", (1, *[IMAGE_ID] * width, 2), rules, PATCH_FORMAT, (item,))
    if kind == 1:
        slices = rng.randint(1, 5)
        item = clip(rng.randrange(5), offset=1, num_slices=slices, tokens_per_slice=2)
        prompt = (3, *[VIDEO_ID, VIDEO_ID, 5] * slices)
        return Request(f"r{number}", prompt, rules, PATCH_FORMAT, (item,))
    salt = rng.randrange(5)
    prompt = tuple((index * 7 + salt * 13) % 59 for index in range(rng.randint(1, 90)))
    tenant = rng.choice(["", "a"])
    return Request(f"r{number}", prompt, rules, priority=rng.randint(-2, 2), tenant=tenant)


def expected(request: Request) -> list[int]:
    return greedy_alone(request, {m.media_hash: bytes(m.patches or b"") for m in request.media})


class Outcomes:
    """How the requests of a run ended."""

    def __init__(self) -> None:
        self.finished = 0
        self.failed = 0
        self.left = 0
        self.refused = 0


async def to_the_end(
    subject: Worker, request: Request, rng: random.Random, outcomes: Outcomes
) -> None:
    """Reads all; what came is right, and there is one end."""
    tokens: list[int] = []
    ends = 0
    failure: WorkerError | None = None
    try:
        async for event in subject.client.generate(request):
            assert not ends, "an event after the end"
            if isinstance(event, Tokens):
                tokens.extend(event.token_ids)
            ends += isinstance(event, Finished)
    except WorkerError as error:
        failure = error
    if failure is None:
        assert ends == 1
        assert tokens == expected(request)
        outcomes.finished += 1
        return
    assert ends == 0
    assert failure.kind is ErrorKind.INTERNAL
    assert tokens == expected(request)[: len(tokens)]
    outcomes.failed += 1


async def leaving_early(
    subject: Worker, request: Request, rng: random.Random, outcomes: Outcomes
) -> None:
    """Goes after a few events."""
    left = rng.randint(0, 6)
    events = subject.client.generate(request)
    # an injected fault may come first
    with contextlib.suppress(WorkerError):
        async for _ in events:
            left -= 1
            if left < 0:
                break
    await events.aclose()
    outcomes.left += 1


async def breaking_the_upload(
    subject: Worker, request: Request, rng: random.Random, outcomes: Outcomes
) -> None:
    """Announces media, sends rubbish or half of it, and closes or goes."""
    call = subject.stub.Generate()
    outcomes.refused += 1
    try:
        header = convert.header_to_proto(request, LIMITS.fingerprint)
        await call.write(pb.GenerateRequest(header=header))
        response = await call.read()
        if request.media and isinstance(response, pb.GenerateResponse):
            chunk = pb.MediaChunk(item_index=rng.randrange(2), data=b"x" * rng.randint(1, 50))
            await call.write(pb.GenerateRequest(chunk=chunk))
        if rng.random() < 0.5:
            await call.done_writing()
            while isinstance(await call.read(), pb.GenerateResponse):
                pass
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
    finally:
        call.cancel()


async def asking_nonsense(
    subject: Worker, request: Request, rng: random.Random, outcomes: Outcomes
) -> None:
    """Sends a header that must be refused."""
    header = convert.header_to_proto(request, LIMITS.fingerprint)
    header.sampling.ClearField(rng.choice(["seed", "top_p", "max_tokens"]))
    call = subject.stub.Generate()
    # it may be refused while it is still being written
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(pb.GenerateRequest(header=header))
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    outcomes.refused += 1


async def operating(
    subject: Worker, request: Request, rng: random.Random, outcomes: Outcomes
) -> None:
    """Flushes, and explains whatever there is."""
    await subject.admin.FlushPrefixCache(pb.FlushPrefixCacheRequest())
    try:
        name = f"r{rng.randrange(100)}"
        await subject.admin.Explain(pb.ExplainRequest(request_id=name))
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            raise


Client = Callable[[Worker, Request, random.Random, Outcomes], Awaitable[None]]
CLIENTS: list[Client] = [
    *[to_the_end] * 6,
    *[leaving_early] * 3,
    breaking_the_upload,
    asking_nonsense,
    operating,
]


def fail_now_and_then(subject: Worker, rng: random.Random) -> None:
    """One step in fifty raises, never three in a row; one page copy in twenty fails."""
    execute = subject.runner.execute
    in_a_row = 0

    def faulty(plan: StepPlan) -> StepResult:
        nonlocal in_a_row
        in_a_row = in_a_row + 1 if rng.random() < 0.02 and in_a_row < 2 else 0
        if in_a_row:
            raise RuntimeError("injected")
        return execute(plan)

    subject.runner.execute = faulty  # type: ignore[method-assign]
    assert subject.stack.copier is not None
    subject.stack.copier.should_fail = lambda copy: rng.random() < 0.05


@pytest.mark.parametrize(
    "count", [150, pytest.param(5000, marks=(pytest.mark.soak, pytest.mark.timeout(1800)))]
)
def test_clients_of_every_sort_leave_nothing_behind(count: int) -> None:
    async def scenario() -> None:
        rng = random.Random(count)
        stack = Stack(
            num_pages=NUM_PAGES,
            limits=SchedulerLimits(40, 8, 50, max_running_per_tenant=6, max_restored_pages=3),
            media_budget=1200,
            host_slots=30,
            segment_patches=2,
        )
        outcomes = Outcomes()
        async with worker(stack, Options(max_waiting_requests=100)) as subject:
            fail_now_and_then(subject, random.Random(count + 1))
            places = asyncio.Semaphore(AT_ONCE)

            async def visit(number: int) -> None:
                async with places:
                    own = random.Random(number)
                    client = rng.choice(CLIENTS)
                    await client(subject, random_request(rng, number), own, outcomes)

            await asyncio.gather(*(visit(number) for number in range(count)))
            await subject.until(lambda: subject.sessions.num_open == 0)
            await subject.until(lambda: not subject.engine.load.running_requests)
        stack.pages.check([])
        stack.pages.check_unpinned()
        assert stack.pages.num_available == NUM_PAGES
        assert min(vars(outcomes).values()) > 0, "the chaos was too tame"

    run(scenario, timeout_s=1700 if count > 1000 else 280)
