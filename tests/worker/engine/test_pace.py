"""Prompts beside decode get what the time of a step allows, learnt from steps as they end."""

from __future__ import annotations

import random

import pytest

from m3stack.engine.budget import SchedulerLimits, split_budget
from m3stack.engine.pace import Pace, PaceLimits
from m3stack.engine.plan import Row, StepPlan
from m3stack.engine.sequence import Sequence
from m3stack.types import Request
from tests.worker.engine.history_model import sampling

LIMITS = PaceLimits(slowdown=2.0, prompt_share=0.45, min_tokens=64)


def plan(num_decoding: int, prompt_tokens: int = 0) -> StepPlan:
    rows = [Row(handle, 50, (1,), (0,), 3) for handle in range(num_decoding)]
    if prompt_tokens:
        rows.append(Row(99, 0, range(prompt_tokens), (0,), None))
    return StepPlan(tuple(rows))


class Machine:
    """What steps take on a device that keeps to `base + slope * tokens`, with some noise."""

    def __init__(self, plain_ms: float, fixed_ms: float, token_us: float) -> None:
        self.plain_ms, self.fixed_ms, self.token_us = plain_ms, fixed_ms, token_us
        self._rng = random.Random(7)

    def seconds(self, prompt_tokens: int) -> float:
        ms = self.plain_ms
        if prompt_tokens:
            ms += self.fixed_ms + prompt_tokens * self.token_us / 1000
        noise = self._rng.uniform(0.97, 1.03)
        # now and then something else takes its time
        return ms * noise * (8 if self._rng.random() < 0.03 else 1) / 1000


def settle(pace: Pace, machine: Machine, *, most: int = 4096, steps: int = 60) -> list[int]:
    """Prompt tokens of steps one after the other, behind some without prompts."""
    for _ in range(12):
        pace.saw(plan(64), machine.seconds(0))
    counts: list[int] = []
    for _ in range(steps):
        counts.append(min(most, pace.prompt_tokens(64) or most))
        pace.saw(plan(64, counts[-1]), machine.seconds(counts[-1]))
    return counts


def test_a_long_step_grows_to_the_slowdown_and_no_further() -> None:
    machine = Machine(plain_ms=14, fixed_ms=0.5, token_us=12)
    late = settle(Pace(LIMITS), machine)[20:]
    # 27.5 ms are reached with 1,080 tokens
    assert 750 < min(late) <= max(late) < 1500
    assert sum(late) / len(late) == pytest.approx(0.94 * 1080, rel=0.12)


def test_a_short_step_is_stretched_until_prompts_have_their_share() -> None:
    # what the first prompt token adds is more than twice the step
    machine = Machine(plain_ms=4, fixed_ms=8, token_us=10)
    late = settle(Pace(LIMITS), machine)[20:]
    fair = 0.45 / 0.55 * 12_000 / 10
    assert sum(late) / len(late) == pytest.approx(0.94 * fair, rel=0.2)


def test_tokens_that_get_dearer_make_steps_smaller() -> None:
    pace = Pace(LIMITS)
    cheap = settle(pace, Machine(14, 0.5, 12))[20:]
    dear = settle(pace, Machine(14, 0.5, 48))[20:]
    assert max(dear) < 0.5 * min(cheap)


def test_nothing_is_bounded_before_there_is_something_to_go_by() -> None:
    pace = Pace(LIMITS)
    assert pace.prompt_tokens(8) is None
    pace.saw(plan(8), 0.01)
    assert pace.prompt_tokens(8) is None
    pace.saw(plan(0, 500), 0.01)
    assert pace.prompt_tokens(8) is None, "a prompt alone says nothing of steps beside decode"
    pace.saw(plan(8, 500), 1.0)
    assert pace.prompt_tokens(8) == LIMITS.min_tokens


def test_steps_of_no_duration_and_prompts_that_cost_nothing_are_survived() -> None:
    pace = Pace(LIMITS)
    for _ in range(5):
        pace.saw(plan(8), 0.01)
        pace.saw(plan(8, 300), 0.0)
        pace.saw(plan(8, 300), 0.005)
    tokens = pace.prompt_tokens(8)
    assert tokens is not None
    assert tokens > 10_000


def test_a_paced_step_still_gives_everyone_the_next_token() -> None:
    pace = Pace(LIMITS)
    pace.saw(plan(2), 0.01)
    pace.saw(plan(2, 500), 1.0)
    running: list[Sequence] = []
    for handle, (length, computed) in enumerate([(20, 19), (900, 0), (30, 29)]):
        sequence = Sequence(
            handle,
            Request(f"r{handle}", tuple(range(length)), sampling(max_tokens=5)),
            page_tokens=128,
            stop_ids=frozenset(),
            max_context_tokens=2000,
        )
        sequence.num_computed = computed
        running.append(sequence)
    limits = SchedulerLimits(512, 8, 1)
    assert split_budget(running, limits) == {0: 1, 1: 510, 2: 1}
    assert split_budget(running, limits, pace) == {0: 1, 1: LIMITS.min_tokens, 2: 1}
    # nobody waits for a token: nothing to be paced for
    assert split_budget(running[1:2], limits, pace) == {1: 512}
