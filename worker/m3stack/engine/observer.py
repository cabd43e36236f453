"""Watches the engine: turns what it plans, does and says into metrics and accounts."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass

from m3stack.cache.host import CopyDirection
from m3stack.engine.account import Account, AccountBook, Entry, Phase, Totals
from m3stack.engine.pace import is_prompt
from m3stack.engine.plan import EncodeItem, StepPlan
from m3stack.engine.sequence import Sequence
from m3stack.telemetry import WorkerMetrics
from m3stack.types import Event, Failed, Finished, Started, Tokens

_log = logging.getLogger(__name__)

# a step with a few prompt tokens says how long a step takes, not how many tokens one could hold
_MIN_RATE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Moments of a step on the engine's clock: before plan, execution, commit, and after."""

    planned_at: float
    executed_at: float
    committed_at: float
    ended_at: float


@dataclass(slots=True)
class _Watched:
    """A request that has not ended."""

    sequence: Sequence
    account: Account
    submitted_at: float
    last_token_at: float | None = None


class Observer:
    """Metrics and accounts of one engine; lives on its thread.

    Args:
        metrics: told of everything that is counted.
        page_bytes: what one page copy moves.
        clock: seconds, monotonic.
    """

    def __init__(
        self, metrics: WorkerMetrics, *, page_bytes: int, clock: Callable[[], float]
    ) -> None:
        self._metrics = metrics
        self._page_bytes = page_bytes
        self._clock = clock
        self._totals = Totals()
        self._book = AccountBook()
        self._watched: dict[int, _Watched] = {}
        self._prompt_tokens_per_s = 0.0

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens computed in a second of late, while there were some; 0: none yet."""
        return self._prompt_tokens_per_s

    def accepted(self, sequence: Sequence, *, submitted_at: float, upload_s: float) -> None:
        """A request has reached the engine, after spending some time on its upload."""
        account = Account(
            sequence.request.request_id,
            began_at=submitted_at - upload_s,
            prompt_tokens=sequence.num_prompt,
        )
        if upload_s:
            account.add(Entry(Phase.UPLOAD, 0.0, upload_s))
        account.open(Phase.QUEUE, submitted_at, self._totals)
        self._book.begin(sequence.handle, account)
        self._watched[sequence.handle] = _Watched(sequence, account, submitted_at)

    def planned(self, plan: StepPlan) -> list[tuple[int, Event]]:
        """Notes who comes and goes with a step; returns what newcomers are told."""
        if not (plan.admissions or plan.preempted):
            return []
        now = self._clock()
        started: list[tuple[int, Event]] = []
        for admission in plan.admissions:
            watched = self._watched[admission.handle]
            account = watched.account
            waits = watched.sequence.wait_steps
            reasons = ", ".join(
                f"{reason.value} ({steps} steps)" for reason, steps in waits.items()
            )
            account.close(now, self._totals, f"waited for {reasons}" if reasons else "")
            waits.clear()
            if admission.host_tokens or not admission.is_first:
                note = f"{admission.cached_tokens} tokens were cached, {admission.host_tokens} "
                account.open(Phase.RESTORE, now, self._totals, note + "of them in host memory")
            if not admission.is_first:
                continue
            account.cached_tokens = admission.cached_tokens
            queue_s = now - watched.submitted_at
            self._metrics.request_started(
                queue_s,
                prompt_tokens=watched.sequence.num_prompt,
                cached_tokens=admission.cached_tokens,
                host_tokens=admission.host_tokens,
            )
            event = Started(queue_ms=int(queue_s * 1000), cached_tokens=admission.cached_tokens)
            started.append((admission.handle, event))
        for handle in plan.preempted:
            account = self._watched[handle].account
            account.preemptions += 1
            account.open(Phase.PREEMPTED, now, self._totals)
        return started

    def step_done(self, plan: StepPlan, times: StepTimes) -> None:
        """Counts a step that was executed, well or not; its events are told later."""
        metrics, totals = self._metrics, self._totals
        duration_s = times.committed_at - times.executed_at
        prompts = [row for row in plan.rows if is_prompt(row)]
        num_tokens = plan.num_tokens
        metrics.step_done(
            duration_s,
            num_tokens=num_tokens,
            num_sequences=len(plan.rows),
            is_decode=not (prompts or plan.encodes or plan.copies),
        )
        metrics.phases(
            plan_s=times.executed_at - times.planned_at,
            execute_s=duration_s,
            commit_s=times.ended_at - times.committed_at,
        )
        metrics.preempted(len(plan.preempted))
        if plan.copies:
            out = sum(c.direction is CopyDirection.TO_HOST for c in plan.copies)
            metrics.pages_copied(
                offloaded_bytes=out * self._page_bytes,
                restored_bytes=(len(plan.copies) - out) * self._page_bytes,
            )
        for encode in plan.encodes:
            note = f"parts {encode.first_part} to {encode.first_part + encode.num_parts - 1}"
            self._add(encode.handle, Phase.ENCODE, times, Totals(1, duration_s, num_tokens), note)
        if plan.encodes:
            metrics.media_encoded(
                num_parts=sum(encode.num_parts for encode in plan.encodes),
                num_patches=sum(map(self._num_patches, plan.encodes)),
            )
        for row in prompts:
            tokens = row.end - row.start
            self._add(
                row.handle, Phase.PREFILL, times, Totals(1, duration_s, num_tokens), "", tokens
            )
        prompt_tokens = sum(row.end - row.start for row in prompts)
        if prompt_tokens >= _MIN_RATE_TOKENS and duration_s > 0:
            rate, before = prompt_tokens / duration_s, self._prompt_tokens_per_s
            self._prompt_tokens_per_s = rate if not before else before + (rate - before) / 8
        # phases that end with this step do not hold it
        totals.steps += 1
        totals.steps_s += duration_s
        totals.tokens += num_tokens
        if prompts:
            totals.mixed_steps += 1
            totals.mixed_s += duration_s

    def told(self, handle: int, event: Event, now: float) -> None:
        """Notes what a request is told."""
        if isinstance(event, Tokens):
            watched = self._watched[handle]
            is_first = watched.last_token_at is None
            since = watched.submitted_at if watched.last_token_at is None else watched.last_token_at
            self._metrics.token_made(now - since, is_first=is_first)
            watched.last_token_at = now
            account = watched.account
            if account.phase is not Phase.DECODE:
                account.open(Phase.DECODE, now, self._totals)
            account.output_tokens += 1
            account.entries[-1].tokens += 1
        elif isinstance(event, Finished):
            self.ended(handle, event.reason.name.lower(), now)
        elif isinstance(event, Failed):
            self.ended(handle, event.kind.name.lower(), now)

    def ended(self, handle: int, outcome: str, now: float) -> None:
        """A request has ended; `outcome` is one of `telemetry.OUTCOMES`."""
        self._metrics.request_ended(outcome)
        watched = self._watched.pop(handle)
        account = watched.account
        account.close(now, self._totals)
        self._book.end(handle, outcome)
        _log.debug(
            "request_ended request_id=%s outcome=%s seconds=%.3f prompt=%d cached=%d output=%d "
            "preemptions=%d",
            account.request_id,
            outcome,
            account.since_begin(now),
            account.prompt_tokens,
            account.cached_tokens,
            account.output_tokens,
            account.preemptions,
        )

    def explain(self, request_id: str) -> Account | None:
        """A copy of the account of the latest request of that id, as of now."""
        account = self._book.find(request_id)
        if account is None:
            return None
        account = copy.deepcopy(account)
        if account.outcome == "running":
            account.close(self._clock(), self._totals)
        return account

    def _num_patches(self, encode: EncodeItem) -> int:
        """Patches of what a step encodes; 0 if its request has ended meanwhile."""
        watched = self._watched.get(encode.handle)
        media = () if watched is None else watched.sequence.media
        for item in media:
            if item.key == encode.key:
                end = encode.first_part + encode.num_parts
                return sum(item.part_patches[encode.first_part : end])
        return 0

    def _add(
        self,
        handle: int,
        phase: Phase,
        times: StepTimes,
        work: Totals,
        note: str,
        tokens: int = 0,
    ) -> None:
        watched = self._watched.get(handle)
        if watched is None:
            return
        account = watched.account
        account.close(times.executed_at, self._totals)
        start_s = account.since_begin(times.executed_at)
        duration_s = times.committed_at - times.executed_at
        account.add(Entry(phase, start_s, duration_s, tokens, work, note))
