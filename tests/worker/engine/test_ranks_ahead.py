"""A rank that follows takes the tokens of the step before from the leading one, a step behind."""

from __future__ import annotations

import pickle
from collections import deque

import pytest
import torch
from torch import Tensor

from m3stack.engine.encoder import Encoder, FollowerBook
from m3stack.engine.inputs import InputBuilder, TokenFeed
from m3stack.engine.leader import AheadLeader, Command, FollowerRunner, Launch, apply
from m3stack.engine.plan import FatalStepError, StepPlan, StepResult
from m3stack.engine.runner import Launched, ModelRunner
from m3stack.errors import ErrorKind
from m3stack.types import Failed, Finished
from tests.worker.engine.engine_harness import EngineHarness
from tests.worker.engine.history_model import CPU, PAGE, Stack, greedy_alone
from tests.worker.engine.test_steps_ahead import limits, mixed_requests, one_by_one, text


class TwoRanks:
    """A leader's stack, and a follower in the same process that does everything a command later."""

    def __init__(self, stack: Stack) -> None:
        self.pool = Stack(num_pages=stack.pool.num_pages).pool
        self.commands: list[Command] = []
        self._pending: deque[bytes] = deque()
        self._given: deque[Tensor] = deque()
        book = FollowerBook()
        encoder = Encoder(
            stack.model.encode_media, book, CPU, segment_patches=stack.segment_patches
        )
        inner = ModelRunner(
            stack.model.forward,
            self.pool.layers,
            encoder=encoder,
            inputs=InputBuilder(PAGE, CPU),
            sampler=None,
        )
        self._follower = FollowerRunner(inner, book, print, mesh=_Follows(self._given), device=CPU)
        stack.runner = AheadLeader(
            stack.runner,
            _Leads(self._given),
            send=self._send,
            explain=lambda: None,
            noticed=lambda: None,
        )

    def catch_up(self) -> None:
        while self._pending:
            apply(pickle.loads(self._pending.popleft()), self._follower)
        assert not self._given, "tokens were handed on that nobody took"

    def _send(self, command: Command) -> None:
        # the leading rank is never waited for, and never waits
        while self._pending:
            apply(pickle.loads(self._pending.popleft()), self._follower)
        self.commands.append(command)
        self._pending.append(pickle.dumps(command))


class _Leads:
    rank, size = 0, 2

    def __init__(self, given: deque[Tensor]) -> None:
        self._given = given

    def broadcast(self, x: Tensor) -> Tensor:
        self._given.append(x.clone())
        return x


class _Follows:
    rank, size = 1, 2

    def __init__(self, given: deque[Tensor]) -> None:
        self._given = given

    def broadcast(self, x: Tensor) -> Tensor:
        return x.copy_(self._given.popleft())


@pytest.mark.parametrize("num_pages", [200, 16])
def test_every_rank_computes_the_same_and_tokens_are_those_of_one(num_pages: int) -> None:
    requests = mixed_requests()
    expected = one_by_one(requests, Stack(num_pages=num_pages, limits=limits()))
    stack = Stack(num_pages=num_pages, limits=limits())
    ranks = TwoRanks(stack)
    with EngineHarness(stack, is_ahead=True) as harness:
        handles = [harness.submit(request) for request in requests]
        for handle in handles:
            assert isinstance(harness.ending(handle), Finished)
        harness.wait_idle()
        tokens = [harness.tokens(handle) for handle in handles]
    assert tokens == expected
    ranks.catch_up()
    launches = [command for command in ranks.commands if isinstance(command, Launch)]
    assert sum(bool(launch.fed) for launch in launches) > 10, "hardly any step was fed"
    for ours, theirs in zip(stack.pool.layers, ranks.pool.layers, strict=True):
        torch.testing.assert_close(theirs.k_PGBD, ours.k_PGBD, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(theirs.v_PGBD, ours.v_PGBD, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("call", range(9))
def test_what_fails_on_the_leading_rank_alone_leaves_the_others_in_step(call: int) -> None:
    stack = Stack(limits=limits())
    ranks = TwoRanks(stack)
    with EngineHarness(stack, is_ahead=True) as harness:
        harness.runner.faults = [*[None] * call, RuntimeError("broken")]
        victim = harness.submit(text(1))
        ending = harness.ending(victim)
        assert isinstance(ending, Failed)
        assert ending.kind is ErrorKind.INTERNAL
        good = harness.submit(text(2))
        assert isinstance(harness.ending(good), Finished)
        assert harness.tokens(good) == greedy_alone(text(2))
    ranks.catch_up()


def test_cancels_reach_every_rank_behind_the_step_under_way() -> None:
    stack = Stack(limits=limits())
    ranks = TwoRanks(stack)
    with EngineHarness(stack, is_ahead=True) as harness:
        for salt in range(6):
            victim = harness.submit(text(salt, max_tokens=150))
            other = harness.submit(text(salt + 10, max_tokens=20))
            harness.wait_until(lambda victim=victim: len(harness.tokens(victim)) > 3)
            harness.engine.cancel(victim)
            harness.ending(other)
            assert harness.tokens(other) == greedy_alone(text(salt + 10, max_tokens=20))
        harness.wait_idle()
        assert harness.engine.load.used_pages == 0
    ranks.catch_up()


class Breaks:
    """A runner whose steps fail in the middle, or end with nothing in them."""

    def __init__(self, failure: Exception | None) -> None:
        self._failure = failure

    def launch_fed(self, plan: StepPlan, feed: TokenFeed | None) -> Launched:
        if self._failure is not None:
            raise self._failure
        return Launched(plan, [], None, {}, (), ())

    def collect(self, step: Launched) -> StepResult:
        return StepResult({}, {}, (), ())


def test_a_step_that_fails_half_way_ends_the_worker() -> None:
    leader = AheadLeader(
        Breaks(ValueError("no")),
        _Leads(deque()),
        send=lambda command: None,
        explain=lambda: None,
        noticed=lambda: None,
    )
    with pytest.raises(FatalStepError, match="failed on the leading rank: ValueError: no"):
        leader.launch(StepPlan(()))


def test_what_a_step_gave_without_a_rank_is_not_taken() -> None:
    known: list[FatalStepError] = []
    leader = AheadLeader(
        Breaks(None),
        _Leads(deque()),
        send=lambda command: None,
        explain=lambda: None,
        noticed=lambda: known[0] if known else None,
    )
    step = leader.launch(StepPlan(()))
    assert leader.collect(step) == StepResult({}, {}, (), ())
    known.append(FatalStepError("rank 3 ended"))
    with pytest.raises(FatalStepError, match="rank 3 ended"):
        leader.collect(step)
