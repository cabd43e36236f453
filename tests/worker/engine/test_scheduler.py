"""The scheduler's promises, over a model that notices every wrong page."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m3stack.engine.plan import Sampled, StepResult
from m3stack.engine.scheduler import MAX_PREEMPTIONS, SchedulerLimits
from m3stack.engine.sequence import WaitReason
from m3stack.errors import ErrorKind
from m3stack.types import Failed, Finished, FinishReason, Request
from tests.worker.engine.drive import Drive
from tests.worker.engine.history_model import (
    EOS_ID,
    IMAGE_ID,
    PAGE,
    PATCH_FORMAT,
    Stack,
    greedy_alone,
    image,
    sampling,
)


def text(prompt: list[int], **changes: object) -> Request:
    return Request("r", tuple(prompt), sampling(**changes))


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(index * 7 + salt * 13) % 59 for index in range(length)]


def limits(batch: int = 16, sequences: int = 4, patches: int = 64) -> SchedulerLimits:
    return SchedulerLimits(
        max_batch_tokens=batch, max_sequences=sequences, max_encode_patches=patches
    )


@pytest.mark.parametrize("chunk", [2, 7, 8, 9, 64])
def test_tokens_do_not_depend_on_chunk_size(chunk: int) -> None:
    request = text(prompt_of(45), max_tokens=12)
    drive = Drive(Stack(limits=limits(batch=chunk, sequences=1)))
    handle = drive.add(request)
    drive.drain()
    assert drive.tokens[handle] == greedy_alone(request)
    drive.check_clean()


def test_decode_rows_run_in_every_step_while_a_long_prompt_prefills() -> None:
    drive = Drive(Stack(num_pages=64))
    short = [drive.add(text(prompt_of(3, salt), max_tokens=30)) for salt in range(3)]
    drive.step()
    long = drive.add(text(prompt_of(200), max_tokens=1))
    while drive.sequences[long].num_uncomputed > 1:
        plan = drive.step()
        rows = {row.handle: row for row in plan.rows}
        assert all(handle in rows for handle in short), "a decode row is missing"
        assert len(rows[long].token_ids) == min(13, 200 - rows[long].start)
    drive.drain()
    drive.check_clean()


def test_short_prompt_behind_a_long_one_starts_within_its_share() -> None:
    drive = Drive(Stack(num_pages=64))
    drive.add(text(prompt_of(300), max_tokens=2))
    drive.step()
    short = drive.add(text(prompt_of(8, 1), max_tokens=1))
    steps = 0
    while not drive.endings[short]:
        plan = drive.step()
        steps += 1
        assert sum(len(row.token_ids) for row in plan.rows if row.handle != short) >= 8
    assert steps == 1
    drive.drain()


def test_oldest_prompt_gets_half_the_budget_among_many() -> None:
    drive = Drive(Stack(num_pages=64))
    old = drive.add(text(prompt_of(100), max_tokens=1))
    for salt in range(3):
        drive.add(text(prompt_of(60, salt + 1), max_tokens=1))
    while drive.sequences[old].num_uncomputed > 1 and not drive.endings[old]:
        plan = drive.step()
        rows = {row.handle: len(row.token_ids) for row in plan.rows}
        left = drive.sequences[old].num_uncomputed
        assert rows[old] >= min(6, left or 1)
    drive.drain()


def test_pages_are_taken_as_tokens_come() -> None:
    drive = Drive(Stack(num_pages=16))
    handle = drive.add(text(prompt_of(4), max_tokens=100))
    drive.step()
    assert len(drive.sequences[handle].pages) == 1
    drive.drain()
    assert len(drive.tokens[handle]) == 100


def test_two_requests_share_a_pool_that_holds_either_worst_case_once() -> None:
    # worst case of each is 13 of 16 pages; both run at once because neither reserves it
    drive = Drive(Stack(num_pages=16))
    for salt in range(2):
        drive.add(text(prompt_of(4, salt), max_tokens=100))
    drive.step()
    assert drive.stack.scheduler.num_running == 2
    drive.drain()
    assert all(len(tokens) == 100 for tokens in drive.tokens.values())
    assert any(plan.preempted for plan in drive.plans)
    drive.check_clean()


@pytest.mark.parametrize("prefix", [True, False])
def test_preempted_requests_give_what_they_give_alone(prefix: bool) -> None:
    requests = [text(prompt_of(10 + salt, salt), max_tokens=40) for salt in range(4)]
    drive = Drive(Stack(num_pages=10, prefix=prefix))
    handles = [drive.add(request) for request in requests]
    drive.drain()
    assert any(plan.preempted for plan in drive.plans)
    for handle, request in zip(handles, requests, strict=True):
        assert drive.tokens[handle] == greedy_alone(request)
    drive.check_clean()


def test_preemption_takes_the_newest_and_no_more_than_needed() -> None:
    # three sequences grow in step; at the 17th token each wants its third of six pages
    drive = Drive(Stack(num_pages=6, prefix=False))
    handles = [drive.add(text(prompt_of(7, salt), max_tokens=12)) for salt in range(3)]
    drive.drain()
    assert [plan.preempted for plan in drive.plans if plan.preempted] == [(handles[2],)]


def test_newcomers_leave_the_pages_that_running_prompts_still_need() -> None:
    drive = Drive(Stack(num_pages=6, prefix=False, limits=limits(batch=9)))
    drive.add(text(prompt_of(40), max_tokens=2))
    drive.step()
    drive.add(text(prompt_of(16, 1), max_tokens=2))
    drive.drain()
    assert not any(plan.preempted for plan in drive.plans)


def test_a_request_preempted_often_waits_until_nothing_can_preempt_it() -> None:
    drive = Drive(Stack(num_pages=8, prefix=False))
    older = drive.add(text(prompt_of(8), max_tokens=40))
    drive.step()
    often = drive.add(text(prompt_of(8, 1), max_tokens=20))
    drive.sequences[often].num_preemptions = MAX_PREEMPTIONS
    # together they may come to need 6 + 4 pages
    while not drive.endings[older]:
        plan = drive.step()
        assert [row.handle for row in plan.rows] == [older]
    drive.drain()
    assert len(drive.tokens[often]) == 20


def test_preemptions_of_a_request_are_bounded() -> None:
    drive = Drive(Stack(num_pages=12, prefix=False, limits=limits(batch=9, sequences=8)))
    for salt in range(24):
        drive.add(text(prompt_of(1 + salt % 20, salt), max_tokens=1 + (salt * 17) % 60))
    drive.drain()
    counts = [sequence.num_preemptions for sequence in drive.sequences.values()]
    assert max(counts) > 0
    assert max(counts) <= MAX_PREEMPTIONS
    drive.check_clean()


def test_a_request_the_pool_can_never_hold_is_told_from_one_that_just_fits() -> None:
    drive = Drive(Stack(num_pages=4))
    handle = drive.add(text(prompt_of(20), max_tokens=13))
    drive.drain()
    assert len(drive.tokens[handle]) == 13
    with pytest.raises(AssertionError):
        drive.add(text(prompt_of(20), max_tokens=14))


def test_context_limit_ends_with_length() -> None:
    drive = Drive(Stack(), max_context=24)
    handle = drive.add(text(prompt_of(20), max_tokens=100))
    drive.drain()
    (ending,) = drive.endings[handle]
    assert isinstance(ending, Finished)
    assert ending.reason is FinishReason.LENGTH
    assert len(drive.tokens[handle]) == 4


def test_stop_id_is_reported_and_is_not_part_of_the_output() -> None:
    request = text(prompt_of(9), max_tokens=20)
    output = greedy_alone(request)
    stop = next(token for token in output if output.index(token) > 2)
    drive = Drive(Stack())
    handle = drive.add(text(prompt_of(9), max_tokens=20, stop_token_ids=frozenset({stop})))
    drive.drain()
    (ending,) = drive.endings[handle]
    assert isinstance(ending, Finished)
    assert (ending.reason, ending.stop_token_id) == (FinishReason.STOP, stop)
    assert drive.tokens[handle] == output[: output.index(stop)]
    assert ending.usage.completion_tokens == output.index(stop)


def test_model_eos_ends_unless_ignored_and_min_tokens_postpones_it() -> None:
    plain = text([3], max_tokens=6, logit_bias={EOS_ID: 100.0})
    drive = Drive(Stack())
    ends = drive.add(Request("a", (3,), sampling(logit_bias={EOS_ID: 100.0}, ignore_eos=False)))
    ignores = drive.add(plain)
    late = drive.add(
        Request("b", (3,), sampling(logit_bias={EOS_ID: 100.0}, ignore_eos=False, min_tokens=4))
    )
    drive.drain()
    assert drive.tokens[ends] == []
    assert drive.tokens[ignores] == [EOS_ID] * 6
    assert len(drive.tokens[late]) == 4
    assert EOS_ID not in drive.tokens[late]


def test_failed_step_ends_the_requests_in_it_and_no_other() -> None:
    drive = Drive(Stack(limits=limits(batch=16, sequences=2)))
    first = [drive.add(text(prompt_of(5, salt), max_tokens=5)) for salt in range(2)]
    waiting = drive.add(text(prompt_of(5, 5), max_tokens=5))
    plan = drive.stack.scheduler.plan()
    events = drive.stack.scheduler.abandon(plan, "broken")
    assert [handle for handle, _ in events] == first
    assert all(event == Failed(ErrorKind.INTERNAL, "broken") for _, event in events)
    drive.check()
    drive.drain()
    assert drive.tokens[waiting] == greedy_alone(text(prompt_of(5, 5), max_tokens=5))


def test_single_failures_of_a_step_leave_the_others_alone() -> None:
    drive = Drive(Stack())
    handles = [drive.add(text(prompt_of(3, salt), max_tokens=2)) for salt in range(2)]
    plan = drive.stack.scheduler.plan()
    result = StepResult(
        sampled={handles[1]: Sampled(4)}, failures={handles[0]: Failed(ErrorKind.INTERNAL, "bad")}
    )
    events = drive.stack.scheduler.commit(plan, result)
    assert (handles[0], Failed(ErrorKind.INTERNAL, "bad")) in events
    assert drive.stack.scheduler.handles == (handles[1],)
    drive.check()


def test_cancel_in_every_state_returns_all_pages() -> None:
    for state in ("waiting", "prefill", "decode", "preempted"):
        drive = Drive(Stack(num_pages=10, limits=limits(sequences=2), prefix=False))
        victims = [drive.add(text(prompt_of(30, salt), max_tokens=45)) for salt in range(2)]
        other = drive.add(text(prompt_of(5), max_tokens=3))
        victim = victims[1]
        if state == "prefill":
            drive.step()
            assert 0 < drive.sequences[victim].num_computed < 30
        while state == "decode" and not drive.tokens[victim]:
            drive.step()
        while state == "preempted" and not drive.sequences[victim].num_preemptions:
            drive.step()
        drive.cancel(victim)
        drive.cancel(victim)
        assert not drive.sequences[victim].pages
        drive.drain()
        assert drive.endings[victim] == ["cancelled"]
        assert len(drive.tokens[other]) == 3
        drive.check_clean()


def test_shared_prefix_is_computed_once_and_reported() -> None:
    shared = prompt_of(5 * PAGE)
    drive = Drive(Stack())
    first = drive.add(text([*shared, 1, 2], max_tokens=2))
    drive.drain()
    second = drive.add(text([*shared, 3, 4], max_tokens=2))
    plan = drive.step()
    assert plan.rows[0].start == 5 * PAGE
    assert plan.num_tokens == 2
    drive.drain()
    endings = [drive.endings[handle][0] for handle in (first, second)]
    assert [e.usage.cached_tokens for e in endings if isinstance(e, Finished)] == [0, 5 * PAGE]
    assert drive.tokens[second] == greedy_alone(text([*shared, 3, 4], max_tokens=2))


def test_whole_prompt_in_cache_still_computes_its_last_page() -> None:
    request = text(prompt_of(4 * PAGE), max_tokens=3)
    drive = Drive(Stack())
    drive.add(request)
    drive.drain()
    again = drive.add(request)
    plan = drive.step()
    assert plan.rows[0].start == 3 * PAGE
    drive.drain()
    assert drive.tokens[again] == greedy_alone(request)


def test_output_pages_serve_the_next_turn() -> None:
    drive = Drive(Stack())
    first = drive.add(text(prompt_of(10), max_tokens=20))
    drive.drain()
    turn = prompt_of(10) + drive.tokens[first] + [1, 2, 3]
    drive.add(text(turn, max_tokens=1))
    plan = drive.step()
    # 29 tokens were computed: the last one sampled never was
    assert plan.rows[0].start == 29 // PAGE * PAGE


def picture_request(seed: int, *, num_tokens: int = 20, max_tokens: int = 4) -> Request:
    prompt = [1, 2, 3] + [IMAGE_ID] * num_tokens + [4, 5]
    item = image(seed, offset=3, num_tokens=num_tokens)
    return Request("p", tuple(prompt), sampling(max_tokens=max_tokens), PATCH_FORMAT, (item,))


def patches_of(*requests: Request) -> Mapping[bytes, bytes]:
    return {
        item.media_hash: bytes(item.patches)
        for request in requests
        for item in request.media
        if item.patches is not None
    }


def test_different_pictures_under_equal_ids_never_share_pages() -> None:
    red, blue = picture_request(1), picture_request(2)
    patches = dict(patches_of(red, blue))
    expected = [greedy_alone(request, patches) for request in (red, blue, red)]
    drive = Drive(Stack())
    cached = []
    for request, tokens in zip((red, blue, red), expected, strict=True):
        handle = drive.add(request)
        drive.drain()
        assert drive.tokens[handle] == tokens
        (ending,) = drive.endings[handle]
        assert isinstance(ending, Finished)
        cached.append(ending.usage.cached_tokens)
        assert ending.usage.image_tokens == 20
    assert cached == [0, 0, 24]
    assert drive.stack.model.encoded_items == 2


def test_encode_budget_delays_prompts_and_never_stops_them() -> None:
    prompt: list[int] = []
    items = []
    for seed in range(4):
        prompt.append(seed)
        items.append(image(seed, offset=len(prompt), num_tokens=10))
        prompt.extend([IMAGE_ID] * 10)
    prompt.append(9)
    request = Request("p", tuple(prompt), sampling(max_tokens=2), PATCH_FORMAT, tuple(items))
    expected = greedy_alone(request, dict(patches_of(request)))
    # every item costs 40 patches: one over the budget of 30 may run, alone
    drive = Drive(Stack(limits=limits(batch=64, patches=30)))
    handle = drive.add(request)
    drive.drain()
    assert [len(plan.encodes) for plan in drive.plans][:4] == [1, 1, 1, 1]
    assert drive.tokens[handle] == expected


def test_preempted_picture_is_not_encoded_twice() -> None:
    requests = [picture_request(seed, max_tokens=60) for seed in range(3)]
    patches = dict(patches_of(*requests))
    expected = [greedy_alone(request, patches) for request in requests]
    drive = Drive(Stack(num_pages=16, prefix=False))
    handles = [drive.add(request) for request in requests]
    drive.drain()
    assert any(plan.preempted for plan in drive.plans)
    assert [drive.tokens[handle] for handle in handles] == expected
    assert drive.stack.model.encoded_items == 3
    drive.check_clean()


@st.composite
def workloads(draw: st.DrawFn) -> list[tuple[int, int, int, int]]:
    """(arrival step, prompt length, max tokens, what to do: 0 text, 1 shared text, 2 picture)."""
    entry = st.tuples(st.integers(0, 30), st.integers(1, 50), st.integers(1, 40), st.integers(0, 2))
    return sorted(draw(st.lists(entry, min_size=1, max_size=12)))


@given(
    workload=workloads(),
    num_pages=st.integers(12, 24),
    batch=st.integers(5, 40),
    cancels=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 11)), max_size=5),
    prefix=st.booleans(),
    host_slots=st.sampled_from([0, 1, 5, 60]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_workload_ends_each_request_once_exact_and_leaves_nothing_behind(
    workload: list[tuple[int, int, int, int]],
    num_pages: int,
    batch: int,
    cancels: list[tuple[int, int]],
    prefix: bool,
    host_slots: int,
) -> None:
    stack = Stack(
        num_pages=num_pages, limits=limits(batch=batch), prefix=prefix, host_slots=host_slots
    )
    drive = Drive(stack)
    waiting = list(workload)
    expected: dict[int, list[int]] = {}
    step = 0
    while waiting or drive.stack.scheduler.has_work:
        while waiting and waiting[0][0] <= step:
            _, length, max_tokens, kind = waiting.pop(0)
            request = workload_request(len(expected), length, max_tokens, kind)
            expected[drive.add(request)] = greedy_alone(request, dict(patches_of(request)))
        for at, handle in cancels:
            if at == step and handle in drive.sequences:
                drive.cancel(handle)
        if drive.stack.scheduler.has_work:
            drive.step()
        step += 1
        assert step < 3000, "no progress"
    drive.check_clean()
    for handle, tokens in drive.tokens.items():
        if drive.endings[handle] == ["cancelled"]:
            assert tokens == expected[handle][: len(tokens)]
        else:
            assert tokens == expected[handle]
    assert all(s.num_preemptions <= MAX_PREEMPTIONS for s in drive.sequences.values())
    check_first_come_first_served(drive)


def check_first_come_first_served(drive: Drive) -> None:
    """Nobody without a reason to wait was passed over."""
    admitted = [a.handle for plan in drive.plans for a in plan.admissions if a.is_first]
    for place, handle in enumerate(admitted):
        for later in admitted[place + 1 :]:
            assert later > handle or WaitReason.PREFIX in drive.sequences[later].wait_steps


def workload_request(index: int, length: int, max_tokens: int, kind: int) -> Request:
    if kind == 2:
        return picture_request(index % 3, num_tokens=1 + length % 20, max_tokens=max_tokens)
    salt = 0 if kind == 1 else index
    return text(prompt_of(length, salt), max_tokens=max_tokens, ignore_eos=index % 2 == 0)
