"""Steps queued one behind another give what steps one by one give."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m3stack.engine.scheduler import SchedulerLimits
from m3stack.engine.sequence import UNKNOWN_TOKEN
from m3stack.errors import ErrorKind
from m3stack.types import Constraint, ConstraintKind, Failed, Finished, Request
from tests.worker.engine.drive import Drive
from tests.worker.engine.engine_harness import EngineHarness
from tests.worker.engine.history_model import (
    IMAGE_ID,
    PATCH_FORMAT,
    Stack,
    greedy_alone,
    image,
    sampling,
)
from tests.worker.engine.test_constraints import text_of


def text(salt: int, *, length: int = 12, **changes: object) -> Request:
    prompt = tuple((index * 7 + salt * 13) % 59 for index in range(length))
    return Request(f"r{salt}", prompt, sampling(**({"max_tokens": 30} | changes)))


def limits() -> SchedulerLimits:
    return SchedulerLimits(max_batch_tokens=24, max_sequences=6, max_encode_patches=64)


def one_by_one(requests: list[Request], stack: Stack) -> list[list[int]]:
    drive = Drive(stack)
    handles = [drive.add(request) for request in requests]
    drive.drain()
    stack.constraints.close()
    return [drive.tokens[handle] for handle in handles]


def ahead(requests: list[Request], stack: Stack) -> tuple[list[list[int]], list[str]]:
    with EngineHarness(stack, is_ahead=True) as harness:
        handles = [harness.submit(request) for request in requests]
        for handle in handles:
            assert isinstance(harness.ending(handle), Finished)
        harness.wait_idle()
        assert harness.engine.load.used_pages == 0
        return [harness.tokens(handle) for handle in handles], harness.runner.calls


def mixed_requests() -> list[Request]:
    picture = image(3, offset=1, num_tokens=9)
    return [
        text(1, max_tokens=40),
        text(2, ignore_eos=False),
        text(3, temperature=1.0, seed=5, top_p=0.9, top_k=20),
        text(4, repetition_penalty=1.4, frequency_penalty=0.5, temperature=0.7),
        Request("p", (1, *[IMAGE_ID] * 9, 2), sampling(max_tokens=9), PATCH_FORMAT, (picture,)),
        text(5, length=70, max_tokens=3),
        text(6, min_tokens=8, ignore_eos=False, logprobs=True, top_logprobs=3),
        Request(
            "c",
            (4, 5),
            sampling(max_tokens=60, ignore_eos=False),
            constraint=Constraint(ConstraintKind.REGEX, "([a-d][0-9]){3,9}"),
        ),
        text(7, max_tokens=1),
    ]


@pytest.mark.parametrize("num_pages", [200, 16])
def test_tokens_equal_those_of_steps_one_by_one(num_pages: int) -> None:
    requests = mixed_requests()
    expected = one_by_one(requests, Stack(num_pages=num_pages, limits=limits()))
    tokens, calls = ahead(requests, Stack(num_pages=num_pages, limits=limits()))
    assert tokens == expected
    assert re.fullmatch("([a-d][0-9]){3,9}", text_of(tokens[7]))
    assert calls.count("launch behind") > 10, "hardly any step was queued behind another"


def test_a_step_is_queued_before_the_one_before_it_is_waited_for() -> None:
    _, calls = ahead([text(1, max_tokens=5)], Stack())
    assert calls == [
        *("launch", "sample"),
        *("launch behind", "collect", "sample") * 4,
        "collect",
    ]


def test_a_request_that_stops_leaves_a_row_behind_that_nobody_sees() -> None:
    stop = greedy_alone(text(1))[4]
    ends = text(1, stop_token_ids=frozenset({stop}))
    tokens, calls = ahead([ends], Stack())
    assert tokens == [greedy_alone(ends)]
    launched = sum(call.startswith("launch") for call in calls)
    assert launched == len(tokens[0]) + 2, "the row behind was not computed"


def test_pages_of_ended_rows_are_reused_only_behind_them() -> None:
    # pages are so scarce that the next step takes those of a request that has just stopped
    stop = [greedy_alone(text(salt))[6] for salt in range(12)]
    requests = [text(salt, length=15, stop_token_ids=frozenset({stop[salt]})) for salt in range(12)]
    tokens, _ = ahead(requests, Stack(num_pages=9, limits=limits(), prefix=False))
    assert tokens == [greedy_alone(request) for request in requests]


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 25), st.booleans()), min_size=1, max_size=8
    ),
    num_pages=st.integers(9, 40),
    host_slots=st.sampled_from([0, 12]),
)
def test_any_mixture_equals_each_alone(
    shapes: list[tuple[int, int, bool]], num_pages: int, host_slots: int
) -> None:
    requests = [
        text(salt, length=length, max_tokens=most, ignore_eos=ignores)
        for salt, (length, most, ignores) in enumerate(shapes)
    ]
    stack = Stack(num_pages=num_pages, limits=limits(), host_slots=host_slots)
    tokens, _ = ahead(requests, stack)
    assert tokens == [greedy_alone(request) for request in requests]


def test_cancel_under_way_frees_everything_and_the_others_go_on() -> None:
    with EngineHarness(Stack(limits=limits()), is_ahead=True) as harness:
        victim = harness.submit(text(1, max_tokens=150))
        other = harness.submit(text(2, max_tokens=60))
        harness.wait_until(lambda: len(harness.tokens(victim)) > 3)
        harness.engine.cancel(victim)
        harness.ending(other)
        harness.wait_idle()
        assert harness.tokens(other) == greedy_alone(text(2, max_tokens=60))
        assert harness.engine.load.used_pages == 0
        assert Finished not in harness.told(victim)


@pytest.mark.parametrize("call", range(9))
def test_a_fault_anywhere_fails_requests_once_and_the_engine_goes_on(call: int) -> None:
    with EngineHarness(Stack(limits=limits()), is_ahead=True) as harness:
        harness.runner.faults = [*[None] * call, RuntimeError("broken")]
        victim = harness.submit(text(1))
        ending = harness.ending(victim)
        assert isinstance(ending, Failed)
        assert ending.kind is ErrorKind.INTERNAL
        good = harness.submit(text(2))
        assert isinstance(harness.ending(good), Finished)
        assert harness.tokens(good) == greedy_alone(text(2))
        assert harness.tokens(victim) == greedy_alone(text(1))[: len(harness.tokens(victim))]


def test_what_is_foreseen_can_be_taken_back() -> None:
    drive = Drive(Stack(num_pages=40))
    handle = drive.add(text(1))
    drive.step()
    sequence = drive.sequences[handle]
    before = (list(sequence.tokens), sequence.num_computed)
    sequence.foresee(sequence.num_computed + 1, samples=True)
    assert sequence.tokens[-1] == UNKNOWN_TOKEN
    sequence.unforesee()
    sequence.unforesee()
    assert (sequence.tokens, sequence.num_computed) == before
