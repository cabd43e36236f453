"""Preemption through host memory: same tokens, nothing computed twice, no fault that shows."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m3stack.cache.host import CopyDirection, PageCopy
from m3stack.engine.plan import StepPlan
from m3stack.engine.scheduler import SchedulerLimits
from m3stack.types import Finished, Request
from tests.worker.engine.drive import Drive
from tests.worker.engine.history_model import PAGE, Stack, greedy_alone, sampling


def text(length: int, salt: int, **changes: object) -> Request:
    prompt = tuple((index * 7 + salt * 13) % 59 for index in range(length))
    return Request("r", prompt, sampling(**changes))


def copies(plans: list[StepPlan], direction: CopyDirection) -> int:
    return sum(copy.direction is direction for plan in plans for copy in plan.copies)


def computed_tokens(drive: Drive) -> int:
    return sum(plan.num_tokens for plan in drive.plans)


def run_all(drive: Drive, requests: list[Request]) -> None:
    handles = [drive.add(request) for request in requests]
    drive.drain()
    for handle, request in zip(handles, requests, strict=True):
        assert drive.tokens[handle] == greedy_alone(request)
    drive.check_clean()


@pytest.mark.parametrize("prefix", [True, False])
def test_preempted_requests_go_on_from_their_copies_without_computing_again(prefix: bool) -> None:
    requests = [text(10 + salt, salt, max_tokens=40) for salt in range(4)]
    drive = Drive(Stack(num_pages=10, prefix=prefix, host_slots=64))
    run_all(drive, requests)
    assert any(plan.preempted for plan in drive.plans)
    assert copies(drive.plans, CopyDirection.TO_DEVICE) > 0
    # every token but the last of each request, exactly once
    assert computed_tokens(drive) == sum(10 + salt + 40 - 1 for salt in range(4))


def test_without_a_host_tier_what_was_evicted_is_computed_again() -> None:
    requests = [text(10 + salt, salt, max_tokens=40) for salt in range(4)]
    drive = Drive(Stack(num_pages=10))
    run_all(drive, requests)
    assert computed_tokens(drive) > sum(10 + salt + 40 - 1 for salt in range(4))


@pytest.mark.parametrize(("restore_cost", "again"), [(0, 0), (5, 4), (7, 11)])
def test_cost_rule_computes_short_pages_again_and_restores_the_others(
    restore_cost: int, again: int
) -> None:
    # three preemptions, at 7, 4 and 0 tokens of a page of 8: those up to the cost are computed
    requests = [text(length, salt, max_tokens=40) for salt, length in enumerate((19, 16, 13, 9))]
    drive = Drive(Stack(num_pages=10, host_slots=64, restore_cost=restore_cost))
    run_all(drive, requests)
    once = sum(len(request.prompt_token_ids) + 39 for request in requests)
    assert computed_tokens(drive) - once == again


def test_evicted_prefixes_are_restored_for_later_requests() -> None:
    drive = Drive(Stack(num_pages=8, host_slots=32))
    first = text(4 * PAGE + 1, 0, max_tokens=1)
    run_all(drive, [first])
    run_all(drive, [text(7 * PAGE, 1, max_tokens=1)])
    before = len(drive.plans)
    handle = drive.add(first)
    drive.drain()
    (ending,) = drive.endings[handle]
    assert isinstance(ending, Finished)
    assert ending.usage.cached_tokens == 4 * PAGE
    assert drive.tokens[handle] == greedy_alone(first)
    admission = drive.plans[before].admissions[0]
    assert admission.cached_tokens == 4 * PAGE
    assert admission.host_tokens > 0
    assert computed_tokens(drive) == (4 * PAGE + 1) + 7 * PAGE + 1


def test_restores_are_spread_over_steps_and_decode_runs_in_each() -> None:
    bounds = SchedulerLimits(16, 4, 64, max_restored_pages=2)
    drive = Drive(Stack(num_pages=12, host_slots=64, limits=bounds))
    long = text(8 * PAGE + 1, 0, max_tokens=2)
    run_all(drive, [long])
    run_all(drive, [text(11 * PAGE, 1, max_tokens=1)])
    decoding = drive.add(text(3, 2, max_tokens=20))
    drive.step()
    start = len(drive.plans)
    handle = drive.add(long)
    while not drive.endings[handle]:
        plan = drive.step()
        assert decoding in [row.handle for row in plan.rows]
        restored = [c for c in plan.copies if c.direction is CopyDirection.TO_DEVICE]
        assert len(restored) <= 2
    assert sum(bool(plan.copies) for plan in drive.plans[start:]) >= 3
    drive.drain()
    assert drive.tokens[handle] == greedy_alone(long)


def test_cancel_while_waiting_to_resume_lets_copies_go() -> None:
    drive = Drive(Stack(num_pages=10, host_slots=8, prefix=False))
    handles = [drive.add(text(10, salt, max_tokens=60)) for salt in range(3)]
    while not any(plan.preempted for plan in drive.plans):
        drive.step()
    victim = next(h for h in handles if drive.sequences[h].num_preemptions)
    drive.cancel(victim)
    drive.drain()
    drive.check_clean()
    assert drive.stack.pages.num_host == 0, "without sharing nobody can use what is left"


def test_a_tier_that_always_fails_costs_time_and_nothing_else() -> None:
    for direction in CopyDirection:
        stack = Stack(num_pages=10, host_slots=64)
        assert stack.copier is not None
        stack.copier.should_fail = lambda copy, bad=direction: copy.direction is bad
        drive = Drive(stack)
        run_all(drive, [text(10 + salt, salt, max_tokens=40) for salt in range(4)])
        assert any(plan.copies for plan in drive.plans)


@given(
    seed=st.integers(0, 1 << 30),
    host_slots=st.integers(1, 30),
    failing=st.sampled_from([0.0, 0.2, 0.7]),
    prefix=st.booleans(),
    restored=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_workload_with_copy_faults_gives_what_each_request_gives_alone(
    seed: int, host_slots: int, failing: float, prefix: bool, restored: int
) -> None:
    rng = random.Random(seed)
    bounds = SchedulerLimits(rng.randint(6, 30), 5, 64, max_restored_pages=restored)
    stack = Stack(num_pages=12, limits=bounds, host_slots=host_slots, prefix=prefix)
    assert stack.copier is not None

    def should_fail(copy: PageCopy) -> bool:
        return rng.random() < failing

    stack.copier.should_fail = should_fail
    drive = Drive(stack)
    requests = [
        text(rng.randint(1, 50), rng.randint(0, 3), max_tokens=rng.randint(1, 40))
        for _ in range(rng.randint(2, 9))
    ]
    handles = []
    for request in requests:
        handles.append(drive.add(request))
        for _ in range(rng.randint(0, 8)):
            if stack.scheduler.has_work:
                drive.step()
        if rng.random() < 0.1:
            drive.cancel(rng.choice(handles))
    drive.drain()
    for handle, request in zip(handles, requests, strict=True):
        expected = greedy_alone(request)
        if drive.endings[handle] == ["cancelled"]:
            expected = expected[: len(drive.tokens[handle])]
        assert drive.tokens[handle] == expected
    drive.check_clean()


def test_a_failed_step_distrusts_the_copies_it_may_not_have_made() -> None:
    drive = Drive(Stack(num_pages=8, host_slots=32))
    first = text(4 * PAGE + 1, 0, max_tokens=3)
    run_all(drive, [first])
    run_all(drive, [text(7 * PAGE, 1, max_tokens=1)])
    drive.add(first)
    plan = drive.stack.scheduler.plan()
    assert any(copy.direction is CopyDirection.TO_DEVICE for copy in plan.copies)
    # the step breaks before anything is moved
    for handle, event in drive.stack.scheduler.abandon(plan, "broken"):
        drive.record(handle, event)
    handle = drive.add(first)
    drive.drain()
    assert drive.tokens[handle] == greedy_alone(first)
