"""The leader's runner: every other rank is told to do the same, then it is done here."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from m3stack.cache.host import PageCopy
from m3stack.engine.encoder import FollowerBook
from m3stack.engine.plan import FatalStepError, StepPlan, StepResult
from m3stack.engine.runner import Runner
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
class Order:
    """Something that is done on every rank between two steps."""

    what: Any


Command = Begin | Forget | Execute | Order


def apply(command: Command, runner: Runner) -> None:
    """What a follower does with a command."""
    if isinstance(command, Begin):
        runner.begin(command.handle, command.request, stop_ids=command.stop_ids)
    elif isinstance(command, Forget):
        runner.forget(command.handle)
    elif isinstance(command, Order):
        assert isinstance(runner, FollowerRunner)
        runner.obey(command.what)
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
        try:
            result = self._inner.execute(plan)
        except Exception as error:
            # a rank that stopped half way through a step is out of step for good
            raise self._explain() or FatalStepError(
                f"a step failed on the leading rank: {type(error).__name__}: {error}"
            ) from error
        # a collective that was broken off has ended as well, with nothing in it
        lost = self._noticed()
        if lost is not None:
            raise lost
        return result


class FollowerRunner:
    """A follower's runner: what the leader evicted is forgotten here as well.

    Args:
        inner: of this rank, without a sampler.
        book: of its encoder.
        obey: carries an order out that is no step.
    """

    def __init__(self, inner: Runner, book: FollowerBook, obey: Callable[[Any], None]) -> None:
        self._inner = inner
        self._book = book
        self.obey = obey

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


def _compact(plan: StepPlan) -> StepPlan:
    """The same plan in fewer bytes: page tables of long sequences are most of it."""
    rows = tuple(
        replace(row, pages=array("I", row.pages), token_ids=array("I", row.token_ids))
        for row in plan.rows
    )
    return replace(plan, rows=rows)
