"""Random requests, cancels and faults: each request ends once, exact, and nothing is left."""

from __future__ import annotations

import random

import pytest

from m3stack.cache.host import CopyDirection
from m3stack.engine.pace import Pace, PaceLimits
from m3stack.engine.scheduler import SchedulerLimits
from m3stack.types import Failed, Finished, Request, Tokens
from tests.worker.engine.engine_harness import EngineHarness
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

NUM_PAGES = 40
OUTSTANDING = 24


def random_request(rng: random.Random, number: int) -> Request:
    max_tokens = rng.randint(1, 40)
    ignores_eos = rng.random() < 0.5
    rules = sampling(max_tokens=max_tokens, ignore_eos=ignores_eos)
    priority, tenant = rng.choice([-3, 0, 0, 0, 2]), rng.choice(["", "a", "b"])
    if rng.random() < 0.15:
        slices, width = rng.randint(1, 5), rng.randint(1, 4)
        item = clip(rng.randrange(6), offset=1, num_slices=slices, tokens_per_slice=width)
        prompt = (3, *([VIDEO_ID] * width + [5]) * slices)
        return Request(f"r{number}", prompt, rules, PATCH_FORMAT, (item,), priority, tenant)
    if rng.random() < 0.3:
        num_tokens = rng.randint(1, 30)
        prompt = (rng.randrange(59), *[IMAGE_ID] * num_tokens, rng.randrange(59))
        item = image(rng.randrange(12), offset=1, num_tokens=num_tokens)
        return Request(
            f"r{number}",
            prompt,
            rules,
            PATCH_FORMAT,
            (item,),
            priority,
            tenant,
        )
    # few different beginnings, so that prefixes are shared
    start = rng.randrange(4)
    prompt = tuple((start * 31 + 7 * index) % 59 for index in range(rng.randint(0, 60)))
    prompt += tuple(rng.randrange(59) for _ in range(rng.randint(1, 8)))
    return Request(f"r{number}", prompt, rules, priority=priority, tenant=tenant)


def random_faults(rng: random.Random, count: int, *, calls: int) -> list[BaseException | None]:
    """One in thirty of the runner's calls fails, never in two steps in a row.

    Args:
        calls: most calls that a step and the one behind it take.
    """
    faults: list[BaseException | None] = []
    while len(faults) < count:
        failing = rng.random() < 1 / 30
        faults += [RuntimeError("injected"), *[None] * calls] if failing else [None]
    return faults


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize(
    "count", [300, pytest.param(10_000, marks=(pytest.mark.soak, pytest.mark.timeout(1800)))]
)
def test_random_requests_with_cancels_and_faults_end_once_and_leave_nothing(
    count: int, is_ahead: bool
) -> None:
    rng = random.Random(count)
    stack = Stack(
        num_pages=NUM_PAGES,
        limits=SchedulerLimits(
            max_batch_tokens=40,
            max_sequences=8,
            max_encode_patches=50,
            max_mixed_tokens=24,
            growth_prefix_tokens=32,
            max_running_per_tenant=5,
            max_restored_pages=3,
        ),
        media_budget=1200,
        host_slots=30,
        segment_patches=2,
        # steps of a made-up runner take next to no time: what a step may hold is nearly random
        pace=Pace(PaceLimits(1.5, min_tokens=2)) if is_ahead else None,
    )
    assert stack.copier is not None
    copy_faults = random.Random(count + 1)
    stack.copier.should_fail = lambda copy: copy_faults.random() < 0.05
    with EngineHarness(stack, is_ahead=is_ahead) as harness:
        harness.runner.faults = random_faults(rng, 20 * count, calls=6 if is_ahead else 1)
        requests: dict[int, Request] = {}
        cancelled: set[int] = set()
        open_handles: set[int] = set()
        for number in range(count):
            request = random_request(rng, number)
            handle = harness.submit(request)
            requests[handle] = request
            open_handles.add(handle)
            if rng.random() < 0.2:
                victim = rng.choice(sorted(open_handles))
                harness.engine.cancel(victim)
                cancelled.add(victim)
                open_handles.discard(victim)
            while len(open_handles) > OUTSTANDING:
                oldest = min(open_handles)
                harness.ending(oldest)
                open_handles.discard(oldest)
        for handle in open_handles:
            harness.ending(handle)
        harness.wait_idle()
        check_endings(harness, requests, cancelled)
        assert ("launch behind" in harness.runner.calls) == is_ahead
        assert harness.engine.load.used_pages == 0
        assert stack.pages.num_available == NUM_PAGES
        assert stack.media.num_pinned == 0
        stack.pages.check([])
        stack.pages.check_unpinned()
        directions = {copy.direction for copy in stack.copier.made}
        assert directions == set(CopyDirection), "the host tier was not used"


def check_endings(
    harness: EngineHarness, requests: dict[int, Request], cancelled: set[int]
) -> None:
    outcomes = {Finished: 0, Failed: 0}
    for handle, request in requests.items():
        patches = {item.media_hash: bytes(item.patches or b"") for item in request.media}
        tokens = harness.tokens(handle)
        alone = greedy_alone(request, patches)
        ends = [e for e in harness.events[handle] if isinstance(e, Finished | Failed)]
        assert len(ends) == 1 or (handle in cancelled and not ends)
        for end in ends:
            outcomes[type(end)] += 1
        if ends and isinstance(ends[0], Finished):
            assert tokens == alone
        else:
            assert tokens == alone[: len(tokens)]
        kinds = [type(e) for e in harness.events[handle]]
        assert Tokens not in kinds or ends or handle in cancelled
    assert all(number > 0 for number in outcomes.values()), "the chaos was too tame"
