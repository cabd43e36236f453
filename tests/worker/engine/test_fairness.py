"""Who goes first, for how long, and what it costs the others: in steps and tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m3stack.cache.prefix import page_chain
from m3stack.engine.admission import KEYS_A_STEP
from m3stack.engine.scheduler import SchedulerLimits
from m3stack.engine.sequence import WaitReason
from m3stack.engine.waiting import AGING_STEPS, MAX_PRIORITY
from m3stack.types import Request
from tests.worker.engine.drive import Drive
from tests.worker.engine.history_model import PAGE, Stack, greedy_alone, sampling


def text(
    length: int, salt: int = 0, *, priority: int = 0, tenant: str = "", **changes: object
) -> Request:
    prompt = tuple((index * 7 + salt * 13) % 59 for index in range(length))
    return Request("r", prompt, sampling(**changes), priority=priority, tenant=tenant)


def bounds(batch: int = 16, sequences: int = 4, **changes: int) -> SchedulerLimits:
    return SchedulerLimits(
        max_batch_tokens=batch, max_sequences=sequences, max_encode_patches=64, **changes
    )


def admitted(drive: Drive) -> list[int]:
    return [a.handle for plan in drive.plans for a in plan.admissions if a.is_first]


def test_higher_priority_leaves_the_queue_first_and_equals_keep_their_order() -> None:
    drive = Drive(Stack(limits=bounds(sequences=1)))
    drive.add(text(3, max_tokens=2))
    drive.step()
    handles = [drive.add(text(3, salt, priority=p)) for salt, p in enumerate([0, 2, -1, 2, 1])]
    drive.drain()
    assert admitted(drive)[1:] == [handles[i] for i in (1, 3, 4, 0, 2)]


def test_low_priority_waits_a_bounded_number_of_steps_behind_endless_high_ones() -> None:
    drive = Drive(Stack(limits=bounds(sequences=1)))
    drive.add(text(3, priority=1, max_tokens=2))
    low = drive.add(text(3, 1, priority=0, max_tokens=1))
    steps = 0
    while not drive.endings[low]:
        # there is always a more urgent request waiting
        if drive.stack.scheduler.num_waiting < 2:
            drive.add(text(3, steps, priority=1, max_tokens=2))
        drive.step()
        steps += 1
        assert steps <= AGING_STEPS + 6, "starved"
    assert steps > AGING_STEPS // 2, "priority did not count at all"


@given(
    arrivals=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(1, 20),
            st.integers(1, 12),
            st.integers(-MAX_PRIORITY, MAX_PRIORITY),
            st.integers(0, 2),
        ),
        min_size=2,
        max_size=25,
    ),
    cap=st.integers(0, 2),
    num_pages=st.integers(8, 20),
    host_slots=st.sampled_from([0, 20]),
)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_nobody_is_passed_by_a_request_that_stands_behind_it(
    arrivals: list[tuple[int, int, int, int, int]], cap: int, num_pages: int, host_slots: int
) -> None:
    limits = bounds(batch=12, max_running_per_tenant=cap)
    drive = Drive(Stack(num_pages=num_pages, limits=limits, host_slots=host_slots))
    came: dict[int, tuple[int, int]] = {}
    tenants: dict[int, str] = {}
    for salt, (pause, length, max_tokens, priority, tenant) in enumerate(arrivals):
        for _ in range(pause):
            if drive.stack.scheduler.has_work:
                drive.step()
                check_tenants(drive, tenants, cap)
        request = text(length, salt, priority=priority, tenant=f"t{tenant}", max_tokens=max_tokens)
        handle = drive.add(request)
        came[handle] = (len(drive.plans), priority)
        tenants[handle] = request.tenant
    while drive.stack.scheduler.has_work:
        drive.step()
        check_tenants(drive, tenants, cap)
    drive.check_clean()
    order = admitted(drive)
    assert sorted(order) == sorted(came)
    left: dict[int, int] = {}
    for step, plan in enumerate(drive.plans):
        for admission in plan.admissions:
            left.setdefault(admission.handle, step)
    for place, handle in enumerate(order):
        for later in order[place + 1 :]:
            if came[later][0] > left[handle]:
                continue
            may_pass = {WaitReason.TENANT, WaitReason.PREFIX} & set(
                drive.sequences[later].wait_steps
            )
            # aging: `handle` stands before `later` unless it came too late for its priority
            lead = (came[handle][1] - came[later][1]) * AGING_STEPS
            assert came[handle][0] - came[later][0] <= lead or may_pass


def check_tenants(drive: Drive, tenants: dict[int, str], cap: int) -> None:
    running = [tenants[h] for h, s in drive.sequences.items() if h in tenants and s.pages]
    assert not cap or all(running.count(tenant) <= cap for tenant in set(running))


def test_a_tenant_at_its_limit_lets_others_pass_and_nobody_else() -> None:
    drive = Drive(Stack(limits=bounds(sequences=3, max_running_per_tenant=2)))
    many = [drive.add(text(3, salt, tenant="many", max_tokens=30)) for salt in range(5)]
    other = drive.add(text(3, 9, tenant="other", max_tokens=30))
    plan = drive.step()
    assert [row.handle for row in plan.rows] == [many[0], many[1], other]
    drive.drain()
    drive.check_clean()


def test_a_step_with_waiting_decoders_holds_no_more_than_its_bound() -> None:
    drive = Drive(Stack(num_pages=64, limits=bounds(batch=64, max_mixed_tokens=12)))
    decoding = [drive.add(text(3, salt, max_tokens=40)) for salt in range(3)]
    drive.step()
    long = drive.add(text(200, 7, max_tokens=1))
    while drive.sequences[long].num_uncomputed > 1:
        plan = drive.step()
        rows = {row.handle: len(row.token_ids) for row in plan.rows}
        if all(drive.sequences[handle].num_output < 40 for handle in decoding):
            assert all(rows[handle] == 1 for handle in decoding), "decode was starved"
            assert plan.num_tokens <= 12
            # and the prompt gets all the rest
            assert rows[long] == min(9, 200 - drive.sequences[long].num_computed + rows[long])
    drive.drain()
    assert max(plan.num_tokens for plan in drive.plans) <= 64


def test_prompts_alone_use_the_whole_step_and_grow_with_what_is_computed() -> None:
    limits = bounds(batch=16, growth_prefix_tokens=48, max_growth=3)
    drive = Drive(Stack(num_pages=64, limits=limits))
    request = text(300, max_tokens=1)
    handle = drive.add(request)
    sizes = []
    while not drive.endings[handle]:
        start = drive.sequences[handle].num_computed
        (row,) = drive.step().rows
        sizes.append((start, row.end - row.start))
    assert sizes[:5] == [(0, 16), (16, 16), (32, 16), (48, 32), (80, 32)]
    assert max(size for _, size in sizes) == 48
    assert drive.tokens[handle] == greedy_alone(request)


def test_growth_stops_while_somebody_decodes() -> None:
    limits = bounds(batch=16, growth_prefix_tokens=16, max_growth=4)
    drive = Drive(Stack(num_pages=64, limits=limits))
    drive.add(text(3, max_tokens=60))
    drive.step()
    drive.add(text(200, 3, max_tokens=1))
    for _ in range(8):
        assert drive.step().num_tokens <= 16
    drive.drain()


def test_requests_with_one_prompt_that_arrive_together_compute_it_once() -> None:
    prompt = 5 * PAGE + 3
    drive = Drive(Stack(num_pages=64, limits=bounds(batch=16, sequences=8)))
    requests = [text(prompt, 0, temperature=1.0, seed=seed, max_tokens=4) for seed in range(8)]
    handles = [drive.add(request) for request in requests]
    drive.drain()
    tokens = sum(plan.num_tokens for plan in drive.plans)
    # the prompt once, then for each of the others its last page, then 3 of 4 output tokens each
    assert tokens == prompt + 7 * 3 + 8 * 3
    assert len({tuple(drive.tokens[handle]) for handle in handles}) > 1
    # and no output differs from that of a request that comes alone
    for handle, request in zip(handles, requests, strict=True):
        alone = Drive(Stack(num_pages=64))
        again = alone.add(request)
        alone.drain()
        assert alone.tokens[again] == drive.tokens[handle]


def test_whoever_waits_for_a_prefix_goes_on_when_its_owner_is_gone() -> None:
    drive = Drive(Stack(num_pages=64))
    owner = drive.add(text(100, max_tokens=1))
    drive.step()
    follower = drive.add(text(100, max_tokens=2))
    for _ in range(2):
        drive.step()
    assert WaitReason.PREFIX in drive.sequences[follower].wait_steps
    drive.cancel(owner)
    drive.drain()
    assert drive.tokens[follower] == greedy_alone(text(100, max_tokens=2))
    drive.check_clean()


def test_an_urgent_request_never_waits_for_the_prefix_of_a_less_urgent_one() -> None:
    drive = Drive(Stack(num_pages=64))
    drive.add(text(100, priority=-1, max_tokens=1))
    drive.step()
    urgent = drive.add(text(100, priority=1, max_tokens=1))
    drive.step()
    assert drive.sequences[urgent].pages, "it runs at once"
    drive.drain()


def test_tenants_and_salts_never_share_pages() -> None:
    variants = [("", ""), ("a", ""), ("", "a"), ("a", "b"), ("b", "a"), ("a", "")]
    drive = Drive(Stack(num_pages=64))
    cached = []
    for tenant, salt in variants:
        prompt = tuple(range(3 * PAGE + 1))
        handle = drive.add(
            Request("r", prompt, sampling(max_tokens=1), tenant=tenant, cache_salt=salt)
        )
        drive.drain()
        cached.append(drive.sequences[handle].cached_tokens)
    assert cached == [0, 0, 0, 0, 0, 3 * PAGE]


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_long_prompt_is_looked_at_a_part_a_step_while_others_run(
    is_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def counted(parent: bytes, token_ids: Sequence[int], page_tokens: int) -> list[bytes]:
        made.append(len(token_ids) // page_tokens)
        return page_chain(parent, token_ids, page_tokens)

    monkeypatch.setattr("m3stack.engine.sequence.page_chain", counted)
    stack = Stack(num_pages=4 * KEYS_A_STEP, limits=bounds(batch=64, sequences=4))
    scheduler, runner = stack.scheduler, stack.runner
    drive = Drive(stack, max_context=1 << 20)
    running = drive.add(text(3, max_tokens=40))
    drive.step()
    made.clear()
    length = PAGE * (3 * KEYS_A_STEP + 10)
    # they share no prefix: each has all its keys to be made
    waiting = [drive.add(text(length, salt, max_tokens=1)) for salt in (1, 2)]
    steps = 0
    while not drive.sequences[waiting[0]].pages:
        made.clear()
        if is_ahead:
            # the running one goes on, and nobody is waited for
            plan = scheduler.plan()
            following = scheduler.plan_ahead(plan)
            step = runner.launch(plan)
            runner.sample(step)
            behind = runner.launch(following, step) if following is not None else None
            scheduler.commit(plan, runner.collect(step))
            if following is not None and behind is not None:
                runner.sample(behind)
                scheduler.commit(following, runner.collect(behind))
        else:
            drive.step()
        steps += 1
        # and the last page of a prompt that is admitted, and one that became full
        assert sum(made) <= (2 if is_ahead else 1) * (KEYS_A_STEP + 2)
    assert steps == (3 if is_ahead else 4)
    assert drive.sequences[waiting[0]].wait_steps[WaitReason.KEYS] > 0
    assert drive.sequences[running].num_output > steps


def test_a_long_prompt_starts_at_once_where_nobody_runs() -> None:
    drive = Drive(Stack(num_pages=4 * KEYS_A_STEP, limits=bounds(batch=64)), max_context=1 << 20)
    handle = drive.add(text(PAGE * 2 * KEYS_A_STEP, max_tokens=1))
    drive.step()
    assert drive.sequences[handle].pages
