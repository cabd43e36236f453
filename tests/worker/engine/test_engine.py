"""The engine thread: every request ends exactly once, whatever breaks."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from m3stack.engine.budget import SchedulerLimits
from m3stack.engine.plan import FatalStepError
from m3stack.errors import ErrorKind, WorkerError
from m3stack.types import Failed, Finished, MediaSettled, Request, Started, Tokens
from tests.worker.engine.engine_harness import TIMEOUT_S, EngineHarness
from tests.worker.engine.history_model import (
    IMAGE_ID,
    PAGE,
    PATCH_FORMAT,
    Stack,
    greedy_alone,
    image,
    sampling,
)


def text(salt: int, *, length: int = 9, name: str = "r", **changes: object) -> Request:
    prompt = tuple((index * 7 + salt * 13) % 59 for index in range(length))
    return Request(name, prompt, sampling(**changes))


def picture(seed: int) -> Request:
    prompt = (1, *[IMAGE_ID] * 6, 2)
    return Request("p", prompt, sampling(), PATCH_FORMAT, (image(seed, offset=1, num_tokens=6),))


def test_requests_start_stream_and_finish_with_what_they_get_alone() -> None:
    requests = [text(salt, length=3 + 5 * salt, max_tokens=3 + salt) for salt in range(6)]
    with EngineHarness() as harness:
        handles = [harness.submit(request) for request in requests]
        for handle, request in zip(handles, requests, strict=True):
            ending = harness.ending(handle)
            assert isinstance(ending, Finished)
            assert harness.tokens(handle) == greedy_alone(request)
            kinds = harness.told(handle)
            assert kinds[0] is Started
            assert kinds[-1] is Finished
            assert set(kinds[1:-1]) == {Tokens}
            assert ending.usage.prompt_tokens == len(request.prompt_token_ids)
            assert ending.usage.completion_tokens == len(harness.tokens(handle))
        assert harness.engine.load.used_pages == 0
    assert harness.exits == [None]


def test_media_is_settled_once_encoded_and_computed_once_for_two() -> None:
    with EngineHarness() as harness:
        handles = [harness.submit(picture(3)) for _ in range(2)]
        expected = greedy_alone(
            picture(3), {m.media_hash: bytes(m.patches or b"") for m in picture(3).media}
        )
        for handle in handles:
            harness.ending(handle)
            assert harness.tokens(handle) == expected
            settled = [isinstance(event, MediaSettled) for event in harness.events[handle]]
            assert settled.count(True) == 1
        assert harness.stack.model.encoded_items == 1


def test_cancel_frees_pages_at_the_next_step_and_says_nothing_more() -> None:
    with EngineHarness() as harness:
        harness.runner.steps_left = 5
        victim = harness.submit(text(1, max_tokens=200))
        harness.wait_until(lambda: len(harness.tokens(victim)) == 5)
        harness.engine.cancel(victim)
        other = harness.submit(text(2))
        harness.runner.gate.set()
        harness.ending(other)
        seen = len(harness.events[victim])
        assert harness.engine.load.used_pages == 0
        assert harness.engine.load.running_requests == 0
        harness.engine.cancel(victim)
        harness.engine.cancel(12345)
        harness.ending(harness.submit(text(3)))
        assert len(harness.events[victim]) == seen
        assert Finished not in harness.told(victim)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_request_that_is_cancelled_in_a_step_is_free_before_its_end(is_ahead: bool) -> None:
    with EngineHarness(is_ahead=is_ahead) as harness:
        begun, go_on = threading.Event(), threading.Event()
        name = "collect" if is_ahead else "execute"
        compute = getattr(harness.runner, name)

        def slowly(step: object) -> object:
            begun.set()
            assert go_on.wait(TIMEOUT_S)
            return compute(step)

        setattr(harness.runner, name, slowly)
        victim = harness.submit(text(1, max_tokens=200))
        assert begun.wait(TIMEOUT_S)
        assert harness.engine.load.used_pages > 0

        harness.engine.cancel(victim)

        # the step still computes
        assert harness.engine.load.used_pages == 0
        assert harness.engine.load.running_requests == 0
        go_on.set()
        other = harness.submit(text(2))
        harness.ending(other)
        assert harness.tokens(other) == greedy_alone(text(2))
        assert harness.tokens(victim) == []
        assert Finished not in harness.told(victim)


def test_cancel_of_a_queued_request_leaves_the_queue() -> None:
    stack = Stack(limits=SchedulerLimits(16, 1, 64))
    with EngineHarness(stack) as harness:
        harness.runner.gate.clear()
        running = harness.submit(text(1, max_tokens=3))
        assert harness.runner.entered.wait(TIMEOUT_S)
        queued = harness.submit(text(2))
        harness.engine.cancel(queued)
        harness.runner.gate.set()
        harness.ending(running)
        harness.wait_idle()
        assert harness.events[queued] == []


def test_failed_step_fails_its_requests_and_the_engine_goes_on() -> None:
    with EngineHarness() as harness:
        harness.runner.faults = [None, RuntimeError("broken kernel")]
        victim = harness.submit(text(1))
        ending = harness.ending(victim)
        assert isinstance(ending, Failed)
        assert ending.kind is ErrorKind.INTERNAL
        assert "broken kernel" not in ending.message, "no internals to clients"
        good = text(2)
        handle = harness.submit(good)
        assert isinstance(harness.ending(handle), Finished)
        assert harness.tokens(handle) == greedy_alone(good)
        assert harness.engine.load.used_pages == 0


def test_three_failed_steps_in_a_row_end_the_engine_with_the_reason() -> None:
    with EngineHarness() as harness:
        harness.runner.faults = [RuntimeError(f"fault {number}") for number in range(3)]
        for salt in range(2):
            assert isinstance(harness.ending(harness.submit(text(salt))), Failed)
        harness.runner.gate.clear()
        running = harness.submit(text(7))
        assert harness.runner.entered.wait(TIMEOUT_S)
        in_inbox = harness.submit(text(8))
        harness.runner.gate.set()
        for handle in (running, in_inbox):
            ending = harness.ending(handle)
            assert isinstance(ending, Failed)
            assert ending.kind is ErrorKind.INTERNAL
        harness.wait_until(lambda: bool(harness.exits))
        assert str(harness.exits[0]) == "fault 2"
        with pytest.raises(WorkerError) as refused:
            harness.submit(text(9))
        assert refused.value.kind is ErrorKind.WORKER_UNAVAILABLE


def test_a_success_between_failures_counts_anew() -> None:
    with EngineHarness() as harness:
        fault = RuntimeError("now and then")
        harness.runner.faults = [fault, fault, None, fault, fault]
        for salt in range(5):
            harness.ending(harness.submit(text(salt, max_tokens=1)))
        assert isinstance(harness.ending(harness.submit(text(6))), Finished)


def test_lost_device_ends_the_engine_at_once() -> None:
    with EngineHarness() as harness:
        harness.runner.faults = [FatalStepError("device gone")]
        ending = harness.ending(harness.submit(text(1)))
        assert isinstance(ending, Failed)
        assert ending.kind is ErrorKind.INTERNAL
        harness.wait_until(lambda: bool(harness.exits))
        assert isinstance(harness.exits[0], FatalStepError)


def test_broken_picture_fails_its_request_only() -> None:
    with EngineHarness() as harness:
        harness.runner.gate.clear()
        filler = harness.submit(text(1))
        assert harness.runner.entered.wait(TIMEOUT_S)
        broken = picture(4)
        item = broken.media[0]
        # a patch row short: the model's check trips, as a real one's would
        short = dataclasses.replace(item, patches=bytearray(item.patches or b"")[:-1])
        bad = harness.submit(dataclasses.replace(broken, media=(short,)))
        good = harness.submit(picture(5))
        harness.runner.gate.set()
        ending = harness.ending(bad)
        assert isinstance(ending, Failed)
        assert "vision encoder" in ending.message
        assert isinstance(harness.ending(good), Finished)
        assert isinstance(harness.ending(filler), Finished)


def test_request_that_cannot_be_set_up_fails_alone() -> None:
    with EngineHarness() as harness:
        bad = harness.submit(text(1, name="unprepared"))
        good = harness.submit(text(2))
        assert isinstance(harness.ending(bad), Failed)
        assert isinstance(harness.ending(good), Finished)


def test_request_the_pool_can_never_hold_is_refused_with_numbers() -> None:
    with EngineHarness(Stack(num_pages=4)) as harness:
        ending = harness.ending(harness.submit(text(1, length=30, max_tokens=10)))
        assert isinstance(ending, Failed)
        assert ending.kind is ErrorKind.CONTEXT_TOO_LONG
        assert "40 tokens" in ending.message
        assert "has 4" in ending.message
        assert isinstance(harness.ending(harness.submit(text(2))), Finished)


def test_a_prompt_beyond_context_and_pool_is_refused_and_others_go_on() -> None:
    # what is left for its output is less than nothing, and must not make it look smaller
    pages_of_prompt = -(-10_050 // PAGE)
    with EngineHarness(Stack(num_pages=pages_of_prompt - 2)) as harness:
        ending = harness.ending(harness.submit(text(1, length=10_050, max_tokens=5)))
        assert isinstance(ending, Failed)
        assert ending.kind is ErrorKind.CONTEXT_TOO_LONG
        assert isinstance(harness.ending(harness.submit(text(2))), Finished)


def test_stop_ends_running_and_queued_requests() -> None:
    stack = Stack(limits=SchedulerLimits(16, 1, 64))
    with EngineHarness(stack) as harness:
        harness.runner.gate.clear()
        running = harness.submit(text(1, max_tokens=100))
        assert harness.runner.entered.wait(TIMEOUT_S)
        queued = harness.submit(text(2))
        harness.engine.stop()
        harness.runner.gate.set()
        for handle in (running, queued):
            ending = harness.ending(handle)
            assert isinstance(ending, Failed)
            assert ending.kind is ErrorKind.WORKER_UNAVAILABLE
    assert harness.exits == [None]


def test_forgotten_prefixes_are_computed_again() -> None:
    with EngineHarness() as harness:
        request = text(1, length=25)
        freed: list[int] = []
        cached = []
        for _ in range(3):
            ending = harness.ending(harness.submit(request))
            assert isinstance(ending, Finished)
            cached.append(ending.usage.cached_tokens)
            if len(cached) == 2:
                harness.engine.forget_prefixes(freed.append)
        assert cached == [0, 24, 0]
        assert freed == [4]


def test_metrics_tell_what_happened() -> None:
    with EngineHarness() as harness:
        for _ in range(2):
            harness.ending(harness.submit(text(1, length=20, max_tokens=4)))
        harness.wait_idle()

        def value(name: str, **labels: str) -> float | None:
            return harness.metrics.registry.get_sample_value(name, labels)

        assert value("m3stack_worker_requests_total", outcome="length") == 2
        assert value("m3stack_worker_prompt_tokens_total") == 40
        assert value("m3stack_worker_cached_prompt_tokens_total") == 16
        assert value("m3stack_worker_output_tokens_total") == 8
        assert value("m3stack_worker_time_to_first_token_seconds_count") == 2
        assert value("m3stack_worker_inter_token_seconds_count") == 6
        assert value("m3stack_worker_used_pages") == 0


def test_age_of_the_step_in_progress_is_visible_from_outside() -> None:
    with EngineHarness() as harness:
        assert harness.engine.step_age_s == 0
        harness.runner.gate.clear()
        handle = harness.submit(text(1))
        assert harness.runner.entered.wait(TIMEOUT_S)
        first = harness.engine.step_age_s
        assert harness.engine.step_age_s > first > 0
        harness.runner.gate.set()
        harness.ending(handle)
