"""Prompts beside decode get what the time of a step allows, learnt from steps as they end."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from m3stack.engine.budget import SchedulerLimits, split_budget
from m3stack.engine.pace import MOST_GROWTH, PREFIX_TOKENS, PROBE_UP, Pace, PaceLimits
from m3stack.engine.plan import Row, StepPlan
from m3stack.engine.sequence import Sequence
from m3stack.gpu_steps import GPU_SLOWDOWN
from m3stack.types import Request
from tests.worker.engine.history_model import sampling

LIMITS = PaceLimits(slowdown=2.0, prompt_share=0.45, min_tokens=64)
# how far a step may go beyond its bound where steps have no noise; among 2,100 devices and prompts
# drawn at random, ends of the ranges preferred, the most was 1.24
TOLERANCE = 1.4


def plan(num_decoding: int, prompt_tokens: int = 0, prefix_tokens: int = 0) -> StepPlan:
    rows = [Row(handle, 50, (1,), (0,), 3) for handle in range(num_decoding)]
    if prompt_tokens:
        rows.append(Row(99, prefix_tokens, range(prompt_tokens), (0,), None))
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
    assert 550 < min(late) <= max(late) < 1400
    assert sum(late) / len(late) == pytest.approx(0.98 * 1080, rel=0.12)


@pytest.mark.parametrize(
    ("fixed_ms", "least_ms"),
    [
        # a share of the whole step
        (3.0, 0.45 / 0.55 * (4.0 + 3.0)),
        # what the first prompt token adds is twice the step: it has to be worth it
        (8.0, 2.0 * 8.0),
    ],
)
def test_a_short_step_is_stretched_until_prompts_have_their_share(
    fixed_ms: float, least_ms: float
) -> None:
    machine = Machine(plain_ms=4, fixed_ms=fixed_ms, token_us=10)
    late = settle(Pace(LIMITS), machine, steps=120)[60:]
    assert sum(late) / len(late) == pytest.approx(0.98 * least_ms / 0.010, rel=0.2)


def test_tokens_that_get_dearer_make_steps_smaller() -> None:
    pace = Pace(LIMITS)
    cheap = settle(pace, Machine(14, 0.5, 12))[20:]
    dear = settle(pace, Machine(14, 0.5, 48))[20:]
    assert max(dear) < 0.5 * min(cheap)


def test_nothing_is_bounded_before_there_is_something_to_go_by() -> None:
    pace = Pace(LIMITS)
    assert pace.prompt_tokens(8) is None
    pace.saw(plan(0, 500), 0.01)
    assert pace.prompt_tokens(8) is None, "a prompt alone says nothing of steps beside decode"
    pace.saw(plan(8), 0.01)
    assert pace.prompt_tokens(8) == LIMITS.min_tokens, "the first step is a small one"
    pace.saw(plan(8, 500), 1.0)
    assert pace.prompt_tokens(8) == LIMITS.min_tokens


def test_steps_of_no_duration_and_prompts_that_cost_nothing_are_survived() -> None:
    pace = Pace(LIMITS)
    for _ in range(5):
        pace.saw(plan(8), 0.01)
        pace.saw(plan(8, 300), 0.0)
        pace.saw(plan(8, 300), 0.005)
    assert pace.prompt_tokens(8) == MOST_GROWTH * 300, "a multiple of what was seen"


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


@dataclass(frozen=True)
class Gpu:
    """What steps take in the mean, on a device like the one that was measured.

    A step of 64 rows takes 12 ms; behind 0, 491,520 and 983,040 tokens a prompt adds 1.0, 2.9 and
    4.0 ms and 9.8, 12.7 and 17.0 us a token (`docs/bench/agentic-h200.md`, from its medians).
    """

    plain_ms: float
    fixed_ms: float
    token_us: float
    dearer: float
    noise: float

    def mean_ms(self, tokens: int, prefix_tokens: int) -> float:
        return self.base_ms(prefix_tokens) + tokens * self.slope_ms(prefix_tokens)

    def base_ms(self, prefix_tokens: int) -> float:
        return self.plain_ms + self.fixed_ms * (1 + 3 * prefix_tokens / (1 << 20))

    def slope_ms(self, prefix_tokens: int) -> float:
        return self.token_us / 1000 * (1 + self.dearer * prefix_tokens / (1 << 20))

    def most_ms(self, prefix_tokens: int, limits: PaceLimits, slowdown: float) -> float:
        """Of a step that keeps to the slowdown, or gives the prompt its due and no more.

        Behind the longest of the prefixes that are learnt from together: there, a prompt's due is
        the most.
        """
        prefix_tokens = min(PREFIX_TOKENS << (prefix_tokens // PREFIX_TOKENS).bit_length(), 1 << 20)
        share = self.base_ms(prefix_tokens) / (1 - limits.prompt_share)
        least = self.mean_ms(int(PROBE_UP * limits.min_tokens), prefix_tokens)
        worth = self.base_ms(prefix_tokens) + limits.worth * (
            self.base_ms(prefix_tokens) - self.plain_ms
        )
        return max(slowdown * self.plain_ms, share, worth, least)


@given(
    gpu=st.builds(
        Gpu,
        plain_ms=st.floats(6, 40),
        fixed_ms=st.floats(0.2, 3),
        token_us=st.floats(4, 20),
        dearer=st.floats(0, 1),
        noise=st.floats(0, 0.02),
    ),
    prompts=st.lists(
        st.tuples(st.integers(0, 983_040), st.integers(2_000, 60_000)), min_size=1, max_size=4
    ),
    seed=st.integers(0, 1 << 20),
    is_ahead=st.booleans(),
)
@example(
    # a quarter too long by a line through three small steps
    gpu=Gpu(plain_ms=6.0, fixed_ms=1.5, token_us=10.0, dearer=1.0, noise=0.01953125),
    prompts=[(218_135, 2000)],
    seed=0,
    is_ahead=True,
)
@example(
    # behind a short prefix a prompt's due is less than behind a longer one, which was seen before
    gpu=Gpu(plain_ms=6, fixed_ms=3, token_us=20, dearer=0, noise=0),
    prompts=[(41_113, 2000), (0, 4000)],
    seed=0,
    is_ahead=False,
)
@example(
    # the same, and nothing was seen behind prefixes of about its length
    gpu=Gpu(plain_ms=6, fixed_ms=1.8, token_us=4, dearer=0.35, noise=0),
    prompts=[(678_413, 8468), (187_582, 5931)],
    seed=0,
    is_ahead=False,
)
@example(
    # steps behind both ends of what is learnt from together: the line through them is the flattest
    gpu=Gpu(plain_ms=6, fixed_ms=3, token_us=20, dearer=0.7021093419436442, noise=0),
    prompts=[(111_216, 44_929), (11_023, 7477)],
    seed=0,
    is_ahead=True,
)
@example(
    gpu=Gpu(19.532965976607304, 1.5639304101978808, 14.296952197693187, 0.48935061082033504, 0),
    prompts=[(864_139, 49_424), (621_061, 33_747)],
    seed=0,
    is_ahead=True,
)
@example(
    # the most of 2,100: a few small steps behind the far end, and the rest behind the near one
    gpu=Gpu(18.055298524288055, 2.8951532507957465, 19.16753722478944, 0.8527030952237202, 0),
    prompts=[(105_685, 5535), (0, 54_394), (471_552, 2000), (225_711, 50_447)],
    seed=61_558,
    is_ahead=True,
)
@settings(max_examples=40, deadline=None)
def test_no_step_is_planned_far_beyond_its_bound_unless_the_prompt_needs_it(
    gpu: Gpu, prompts: list[tuple[int, int]], seed: int, is_ahead: bool
) -> None:
    limits, rng = PaceLimits(GPU_SLOWDOWN), random.Random(seed)
    pace = Pace(limits)

    def seconds(mean_ms: float) -> float:
        return mean_ms * rng.gauss(1, gpu.noise) / 1000

    for _ in range(12):
        pace.saw(plan(64), seconds(gpu.plain_ms))
    for prefix, length in prompts:
        end, under_way = prefix + length, []
        while prefix < end:
            most = pace.prompt_tokens(64, prefix_tokens=prefix)
            assert most is not None
            tokens = min(most, 1984, end - prefix)
            mean_ms = gpu.mean_ms(tokens, prefix)
            # what is learnt is as wrong as steps are noisy, and as prefixes are unlike that are
            # learnt from together
            most_ms = gpu.most_ms(prefix, limits, GPU_SLOWDOWN)
            assert mean_ms <= most_ms * (TOLERANCE + 5 * gpu.noise)
            under_way.append((plan(64, tokens, prefix), seconds(mean_ms)))
            prefix += tokens
            # planned ahead, a step is decided on before the one under way has ended
            if len(under_way) > is_ahead:
                pace.saw(*under_way.pop(0))


@pytest.mark.parametrize(
    ("prefix", "length", "least_share", "longest"),
    [
        # tokens get dearer, and so does that a prompt is there at all
        (0, 60_000, 0.43, 2.3),
        (491_520, 60_000, 0.39, 2.3),
        (900_000, 60_000, 0.36, 2.3),
        (0, 1_048_576, 0.40, 2.3),
    ],
)
def test_what_a_worker_ships_with_shares_time_between_a_long_prompt_and_decode(
    prefix: int, length: int, least_share: float, longest: float
) -> None:
    gpu, rng = Gpu(12.0, 1.0, 9.8, 0.7, 0.02), random.Random(3)
    pace = Pace(PaceLimits(GPU_SLOWDOWN))
    for _ in range(12):
        pace.saw(plan(64), gpu.plain_ms / 1000)
    for_prompt_ms, end, steps_ms = 0.0, prefix + length, list[float]()
    while prefix < end:
        tokens = min(pace.prompt_tokens(64, prefix_tokens=prefix) or 1984, 1984)
        mean_ms = gpu.mean_ms(tokens, prefix)
        for_prompt_ms += tokens * gpu.slope_ms(prefix)
        steps_ms.append(mean_ms)
        pace.saw(plan(64, tokens, prefix), mean_ms * rng.gauss(1, gpu.noise) / 1000)
        prefix += tokens
    assert for_prompt_ms / sum(steps_ms) > least_share
    assert sorted(steps_ms)[int(0.99 * len(steps_ms))] < longest * gpu.plain_ms


def test_a_prompt_behind_a_longer_prefix_begins_with_care() -> None:
    pace = Pace(LIMITS)
    near = settle(pace, Machine(14, 0.5, 12))[-1]
    far = pace.prompt_tokens(64, prefix_tokens=900_000)
    assert far is not None
    assert far < near / 2


def test_a_prompt_behind_a_shorter_prefix_begins_with_care() -> None:
    # behind a long prefix a prompt adds 8 ms by being there, and its tokens are worth twice that
    pace, machine = Pace(LIMITS), Machine(4, 8, 10)
    for _ in range(12):
        pace.saw(plan(64), machine.seconds(0))
    for _ in range(40):
        tokens = pace.prompt_tokens(64, prefix_tokens=900_000)
        assert tokens is not None
        pace.saw(plan(64, tokens, 900_000), machine.seconds(tokens))
    far = pace.prompt_tokens(64, prefix_tokens=900_000)
    near = pace.prompt_tokens(64, prefix_tokens=0)
    assert far is not None
    assert near is not None
    # behind a short one it may add next to nothing: then they are worth much less
    assert near <= max(LIMITS.min_tokens, far / 8)


def test_tokens_that_get_dear_and_cheap_again_are_learnt_both_times() -> None:
    pace = Pace(LIMITS)
    cheap = settle(pace, Machine(14, 0.5, 12))[20:]
    settle(pace, Machine(14, 0.5, 48), steps=6)
    again = settle(pace, Machine(14, 0.5, 12))[30:]
    assert sum(again) > 0.8 * sum(cheap) * len(again) / len(cheap)
