"""What a request gets depends on itself alone, and what a step holds on nothing but the past."""

from __future__ import annotations

import random

import pytest

from m3stack.engine.budget import SchedulerLimits
from m3stack.types import Finished, Request
from tests.worker.engine.drive import Drive
from tests.worker.engine.history_model import PAGE, Stack, sampling

RULES = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5, "min_p": 0.02},
    {"temperature": 1.3, "top_p": 0.8, "repetition_penalty": 1.3},
    {"temperature": 1.0, "presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"temperature": 0.9, "logit_bias": {3: 4.0}, "banned_token_ids": frozenset({5, 6})},
    {"temperature": 1.0, "allowed_token_ids": frozenset(range(20)), "logprobs": True},
    {"temperature": 1.0, "ignore_eos": False, "min_tokens": 6},
    {"temperature": 1.0, "stop_token_ids": frozenset(range(0, 50, 3)), "min_tokens": 4},
]


def sampled(number: int) -> Request:
    """One of few beginnings, every rule of choice in turn, a seed of its own."""
    length, start = 5 + 7 * (number % 6), number % 3
    prompt = tuple((start * 31 + 7 * index) % 59 for index in range(length))
    rules = RULES[number % len(RULES)]
    return Request(f"r{number}", prompt, sampling(max_tokens=30, seed=number, **rules))


def outcome(drive: Drive, handle: int) -> tuple[list[int], object, int | None]:
    (end,) = drive.endings[handle]
    assert isinstance(end, Finished), end
    return drive.tokens[handle], end.reason, end.stop_token_id


def narrow(*, host_slots: int) -> Drive:
    limits = SchedulerLimits(max_batch_tokens=24, max_sequences=6, max_encode_patches=64)
    return Drive(Stack(num_pages=14, limits=limits, host_slots=host_slots))


@pytest.mark.parametrize("host_slots", [0, 40])
def test_choices_by_every_rule_outlive_neighbours_chunks_and_preemption(host_slots: int) -> None:
    requests = [sampled(number) for number in range(24)]
    drive = narrow(host_slots=host_slots)
    handles = [drive.add(request) for request in requests]
    drive.drain()
    drive.check_clean()
    preempted = {handle for plan in drive.plans for handle in plan.preempted}
    assert len({handle % len(RULES) for handle in preempted}) > 3, "hardly anybody was preempted"
    for handle, request in zip(handles, requests, strict=True):
        alone = Drive(Stack(num_pages=32))
        again = alone.add(request)
        alone.drain()
        assert outcome(drive, handle) == outcome(alone, again)
    assert {reason for _, reason, _ in (outcome(drive, handle) for handle in handles)} > {
        outcome(drive, 0)[1]
    }, "all ended the same way"


@pytest.mark.parametrize("rules", [{"temperature": 1.0}, {"temperature": 1.0, "logprobs": True}])
def test_answers_to_one_prompt_stand_on_the_same_pages(rules: dict[str, object]) -> None:
    prompt = tuple(7 * index % 59 for index in range(4 * PAGE + 3))
    drive = Drive(Stack(num_pages=32))
    for seed in range(4):
        drive.add(Request(f"r-{seed}", prompt, sampling(max_tokens=5, seed=seed, **rules)))
    shared: set[tuple[int, ...]] = set()
    together = 0
    while drive.stack.scheduler.has_work:
        plan = drive.step()
        together = max(together, len(plan.rows))
        shared |= {tuple(row.pages[:4]) for row in plan.rows if row.start >= 4 * PAGE}
    assert together == 4
    assert len(shared) == 1, "the prompt's whole pages are there more than once"
    drive.check_clean()


@pytest.mark.parametrize("seed", range(3))
def test_equal_pasts_give_equal_plans(seed: int) -> None:
    def plans() -> list[object]:
        rng = random.Random(seed)
        drive = narrow(host_slots=20)
        seen: list[object] = []
        added = 0
        while added < 20 or drive.stack.scheduler.has_work:
            if added < 20 and rng.random() < 0.5:
                drive.add(sampled(added))
                added += 1
            if rng.random() < 0.05 and added:
                drive.cancel(rng.randrange(added))
            if not drive.stack.scheduler.has_work:
                continue
            plan = drive.step()
            rows = [
                (row.handle, row.start, tuple(row.token_ids), tuple(row.pages), row.output_index)
                for row in plan.rows
            ]
            seen.append((rows, plan.admissions, plan.preempted, plan.copies, plan.encodes))
        assert any(plan.preempted for plan in drive.plans)
        return seen

    assert plans() == plans()
