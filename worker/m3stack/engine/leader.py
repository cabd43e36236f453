"""The leader's runner: every other rank is told to do the same, then it is done here."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from m3stack.cache.host import PageCopy
from m3stack.engine.encoder import FollowerBook
from m3stack.engine.inputs import TokenFeed
from m3stack.engine.plan import FatalStepError, StepPlan, StepResult
from m3stack.engine.runner import FedRunner, Launched, Runner
from m3stack.engine.sequence import UNKNOWN_TOKEN
from m3stack.parallel import Mesh
from m3stack.types import Request


@dataclass(frozen=True, slots=True)
class Begin:
    """`Runner.begin` on every rank."""

    handle: int
    request: Request
    stop_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Forget:
    """`Runner.forget` on every rank."""

    handle: int


@dataclass(frozen=True, slots=True)
class Execute:
    """`Runner.execute` on every rank."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class Launch:
    """`AheadRunner.launch` on every rank; followers never wait for what a step gives.

    Attributes:
        fed: whose tokens the leading rank hands on before the step, in order; empty where the plan
            knows all of its tokens.
    """

    plan: StepPlan
    fed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """Something that is done on every rank between two steps."""

    what: Any


Command = Begin | Forget | Execute | Launch | Order


def apply(command: Command, runner: Runner) -> None:
    """What a follower does with a command."""
    if isinstance(command, Begin):
        runner.begin(command.handle, command.request, stop_ids=command.stop_ids)
    elif isinstance(command, Forget):
        runner.forget(command.handle)
    elif isinstance(command, Order):
        assert isinstance(runner, FollowerRunner)
        runner.obey(command.what)
    elif isinstance(command, Launch):
        assert isinstance(runner, FollowerRunner)
        runner.launch(command.plan, command.fed)
    else:
        runner.execute(command.plan)


class LeaderRunner:
    """A runner whose every call happens on all ranks, in the same order.

    Args:
        inner: of this rank.
        send: gives a command to all other ranks; raises FatalStepError if one is gone.
        explain: what is wrong with the other ranks, if anything; asked after a failure.
        noticed: the same if it is known already; what a step gave is worth nothing then.
    """

    def __init__(
        self,
        inner: Runner,
        *,
        send: Callable[[Command], None],
        explain: Callable[[], FatalStepError | None],
        noticed: Callable[[], FatalStepError | None],
    ) -> None:
        self._inner = inner
        self._send = send
        self._explain = explain
        self._noticed = noticed

    def begin(self, handle: int, request: Request, *, stop_ids: frozenset[int]) -> None:
        self._send(Begin(handle, request, stop_ids))
        self._inner.begin(handle, request, stop_ids=stop_ids)

    def forget(self, handle: int) -> None:
        self._send(Forget(handle))
        self._inner.forget(handle)

    def execute(self, plan: StepPlan) -> StepResult:
        self._send(Execute(_compact(plan)))
        with self._in_step():
            result = self._inner.execute(plan)
        self._check_noticed()
        return result

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """A rank that stopped half way through a step is out of step for good."""
        try:
            yield
        except Exception as error:
            raise self._explain() or FatalStepError(
                f"a step failed on the leading rank: {type(error).__name__}: {error}"
            ) from error

    def _check_noticed(self) -> None:
        # a collective that was broken off has ended as well, with nothing in it
        lost = self._noticed()
        if lost is not None:
            raise lost


class AheadLeader(LeaderRunner):
    """A leader whose steps are queued one behind another, on every rank.

    The others hear of step n+1 while n is under way. What n chooses is known to the leading rank,
    which hands it on from device to device, in the order of the steps: no host waits for it.

    Args:
        inner: of this rank.
        mesh: all ranks.
        send, explain, noticed: as for `LeaderRunner`.
    """

    def __init__(
        self,
        inner: FedRunner,
        mesh: Mesh,
        *,
        send: Callable[[Command], None],
        explain: Callable[[], FatalStepError | None],
        noticed: Callable[[], FatalStepError | None],
    ) -> None:
        super().__init__(inner, send=send, explain=explain, noticed=noticed)
        self._ahead = inner
        self._mesh = mesh

    @torch.inference_mode()
    def launch(self, plan: StepPlan, after: Launched | None = None) -> Launched:
        feed = after.feed if after is not None and _has_unknown(plan) else None
        fed = () if feed is None else tuple(feed.place_of)
        self._send(Launch(_compact(plan), fed))
        with self._in_step():
            if feed is not None:
                feed = TokenFeed(self._mesh.broadcast(feed.chosen_S), feed.place_of)
            return self._ahead.launch_fed(plan, feed)

    def sample(self, step: Launched) -> None:
        # what fails here is this rank's own, and leaves the others in step
        with self._unless_lost():
            self._ahead.sample(step)

    def collect(self, step: Launched) -> StepResult:
        with self._unless_lost():
            result = self._ahead.collect(step)
        self._check_noticed()
        return result

    @contextmanager
    def _unless_lost(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            lost = self._explain()
            if lost is None:
                raise
            raise lost from error


class FollowerRunner:
    """A follower's runner: what the leader evicted is forgotten here as well.

    Args:
        inner: of this rank, without a sampler.
        book: of its encoder.
        obey: carries an order out that is no step.
        mesh: all ranks.
        device: of this rank.
    """

    def __init__(
        self,
        inner: FedRunner,
        book: FollowerBook,
        obey: Callable[[Any], None],
        *,
        mesh: Mesh,
        device: torch.device,
    ) -> None:
        self._inner = inner
        self._book = book
        self._mesh = mesh
        self._device = device
        self.obey = obey

    @torch.inference_mode()
    def launch(self, plan: StepPlan, fed: tuple[int, ...]) -> None:
        """Queues a step, with the tokens that the leading rank hands on for those handles."""
        self._book.forget(plan.evicted_media)
        feed = None
        if fed:
            chosen_S = torch.empty(len(fed), dtype=torch.int64, device=self._device)
            places = {handle: place for place, handle in enumerate(fed)}
            feed = TokenFeed(self._mesh.broadcast(chosen_S), places)
        self._inner.launch_fed(plan, feed)

    def begin(self, handle: int, request: Request, *, stop_ids: frozenset[int]) -> None:
        self._inner.begin(handle, request, stop_ids=stop_ids)

    def forget(self, handle: int) -> None:
        self._inner.forget(handle)

    def execute(self, plan: StepPlan) -> StepResult:
        self._book.forget(plan.evicted_media)
        return self._inner.execute(plan)


class GroupPeers:
    """Peers over a group of processes that all execute the same plans.

    Args:
        group: its back end must move plain objects.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def union(
        self, copies: tuple[PageCopy, ...], failed: tuple[PageCopy, ...]
    ) -> tuple[PageCopy, ...]:
        everywhere = {copy for part in self._gather(failed) for copy in part}
        return tuple(copy for copy in copies if copy in everywhere)

    def agree(self, what: list[int]) -> None:
        parts = self._gather(what)
        if any(part != what for part in parts):
            raise FatalStepError(f"the ranks differ in which media they could encode: {parts}")

    def _gather(self, mine: object) -> list[Any]:
        parts: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(parts, mine, group=self._group)
        return parts


def _has_unknown(plan: StepPlan) -> bool:
    """Whether the step before chooses tokens of a plan."""
    return any(row.token_ids[-1] == UNKNOWN_TOKEN for row in plan.rows)


def _compact(plan: StepPlan) -> StepPlan:
    """The same plan in fewer bytes: page tables of long sequences are most of it."""
    rows = tuple(
        replace(row, pages=array("I", row.pages), token_ids=array("i", row.token_ids))
        for row in plan.rows
    )
    return replace(plan, rows=rows)
