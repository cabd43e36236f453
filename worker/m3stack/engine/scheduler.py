"""Which sequences run next, and how far: chunked prefill beside decode, paging, preemption.

Deterministic; knows no tensors, no clock, no callers. The rules, all in order of priority and age:

- Every running sequence that waits for its next token gets one row in every step.
- What is left of the step's token budget goes to prompts (`budget`).
- Pages are taken as tokens come. A sequence that cannot get a page takes those of later ones, last
  first; these wait again, and bring their pages back from where they went, or compute them anew
  where they are gone. The first sequence therefore always makes progress, and every request ends.
- The queue is strict: its head is admitted when there is room for all its known tokens beside
  what the running ones still need, and always when nothing runs. Passed over are only requests of
  a tenant that runs all it may, and those whose next page an earlier sequence is computing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from m3stack.cache.host import CopyDirection, PageCopy
from m3stack.cache.media import MediaLedger
from m3stack.cache.prefix import PrefixCache, Salt
from m3stack.engine.admission import MAX_PREEMPTIONS, Admissions
from m3stack.engine.budget import SchedulerLimits, split_budget
from m3stack.engine.encoding import EncodeDraft, EncodePlanner
from m3stack.engine.pace import Pace
from m3stack.engine.plan import Admission, Row, StepPlan, StepResult
from m3stack.engine.restoring import Fetched, Restorer
from m3stack.engine.sequence import Sequence, SequenceState
from m3stack.engine.waiting import WaitingQueue, order_key, order_of, promoted_order
from m3stack.errors import ErrorKind
from m3stack.types import Event, Failed, Finished, Tokens


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    rows: list[Row] = field(default_factory=list[Row])
    encodes: EncodeDraft = field(default_factory=EncodeDraft)
    admissions: list[Admission] = field(default_factory=list[Admission])
    preempted: list[int] = field(default_factory=list[int])
    restored_pages: int = 0


class Scheduler:
    """The queue and the running set; the engine thread owns it.

    Calls alternate: `plan`, then `commit` or `abandon` of that plan. While one plan is under way
    `plan_ahead` may give the next, which is under way as well once the first is committed.
    Sequences may be added and cancelled at any time between calls.

    Args:
        pace: bounds prompts beside decode by the time they take; None: by tokens alone.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pages: PrefixCache,
        media: MediaLedger,
        pace: Pace | None = None,
    ) -> None:
        self._limits = limits
        self._pace = pace
        self._pages = pages
        self._media = media
        self._encodes = EncodePlanner(media, limits.max_encode_patches)
        self._waiting = WaitingQueue()
        # in order
        self._running: list[Sequence] = []
        self._by_handle: dict[int, Sequence] = {}
        self._restorer = Restorer(pages)
        self._admissions = Admissions(limits, pages, self._waiting, self._running)
        self._tenants, self._underway = self._admissions.tenants, self._admissions.underway
        self._num_added = 0
        self._num_plans = 0
        self._num_under_way = 0

    @property
    def has_work(self) -> bool:
        return bool(self._by_handle)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_pending_prompt_tokens(self) -> int:
        """Prompt tokens that are accepted and not yet computed."""
        running = sum(max(0, s.num_prompt - s.num_computed) for s in self._running)
        return self._waiting.prompt_tokens + running

    @property
    def handles(self) -> tuple[int, ...]:
        """All sequences that have not ended."""
        return tuple(self._by_handle)

    def knows(self, handle: int) -> bool:
        """Whether a sequence was added and has not ended."""
        return handle in self._by_handle

    def fits(self, sequence: Sequence) -> bool:
        """Whether the pool could ever hold the sequence, alone."""
        return sequence.pages_at_most <= self._pages.num_pages

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence that `fits`."""
        assert self.fits(sequence)
        assert sequence.handle not in self._by_handle
        request = sequence.request
        sequence.order = order_of(self._num_plans, request.priority, self._num_added)
        salt = Salt(request.tenant, request.cache_salt)
        sequence.root_key = self._pages.root_key(salt, self._num_added)
        self._num_added += 1
        self._by_handle[sequence.handle] = sequence
        self._waiting.add(sequence)

    def cancel(self, handle: int) -> bool:
        """Ends a sequence and frees its pages; False if it has ended before.

        A step under way may still write to them: whoever executes steps does so in order.
        """
        sequence = self._by_handle.get(handle)
        if sequence is None:
            return False
        self._end(sequence)
        return True

    def plan(self) -> StepPlan:
        """What the next step computes; without rows if nothing can run."""
        assert not self._num_under_way
        self._num_plans += 1
        draft = _Draft()
        draft.admissions = self._admissions.admit(self._restorer)
        # copies: sequences behind the current one may be preempted on the way
        for sequence in tuple(self._running):
            if sequence.state is SequenceState.RUNNING and sequence.is_restoring:
                self._restore(draft, sequence)
        ready = [sequence for sequence in self._running if not sequence.is_restoring]
        shares = split_budget(ready, self._limits, self._pace)
        for sequence in ready:
            if sequence.state is SequenceState.RUNNING and shares[sequence.handle] > 0:
                self._plan_row(draft, sequence, shares[sequence.handle])
        plan = self._finished(draft)
        assert not (plan.is_empty and self._by_handle), "invariant: the first can always go on"
        if plan.is_empty:
            return plan
        self._num_under_way = 1
        return replace(plan, evicted_media=tuple(self._media.take_evicted()))

    def plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        """The step behind the one under way, as if that one ended nothing and nothing failed.

        Rows of sequences that did end are computed for nothing. Their tokens stand as
        `UNKNOWN_TOKEN` where the step under way chooses them.

        Returns:
            None where more than tokens is to be decided: who is admitted, who gives up pages, what
            comes from host memory, what is encoded.
        """
        assert self._num_under_way == 1
        is_certain = not plan.encodes and all(
            copy.direction is CopyDirection.TO_HOST for copy in plan.copies
        )
        is_settled = not any(sequence.is_restoring for sequence in self._running)
        if not (is_certain and is_settled) or self._admissions.may_admit():
            return None
        for row in plan.rows:
            foreseen = self._by_handle.get(row.handle)
            if foreseen is not None:
                foreseen.foresee(row.end, samples=row.output_index is not None)
        ready = [sequence for sequence in self._running if not sequence.has_all_output]
        shares = split_budget(ready, self._limits, self._pace)
        if not self._has_room(ready, shares):
            for sequence in self._running:
                sequence.unforesee()
            return None
        self._num_plans += 1
        draft = _Draft()
        for sequence in ready:
            if shares[sequence.handle] > 0:
                self._plan_row(draft, sequence, shares[sequence.handle])
        self._num_under_way = 2
        return replace(self._finished(draft), evicted_media=tuple(self._media.take_evicted()))

    def _finished(self, draft: _Draft) -> StepPlan:
        return StepPlan(
            rows=tuple(sorted(draft.rows, key=lambda row: len(row.token_ids) > 1)),
            encodes=tuple(draft.encodes.items.values()),
            admissions=tuple(draft.admissions),
            preempted=tuple(draft.preempted),
            copies=self._pages.take_copies(),
        )

    def _has_room(self, ready: list[Sequence], shares: dict[int, int]) -> bool:
        """Whether there is something to compute, and all it takes is pages that are available."""
        missing = 0
        for sequence in ready:
            end = sequence.num_computed + shares[sequence.handle]
            if shares[sequence.handle] > 0 and self._encodes.is_due(sequence, end):
                return False
            missing += max(0, -(-end // sequence.page_tokens) - len(sequence.pages))
        return any(shares.values()) and missing <= self._pages.num_available

    def commit(self, plan: StepPlan, result: StepResult) -> list[tuple[int, Event]]:
        """Takes over what a step gave; returns what requests are to be told, in order."""
        assert self._num_under_way
        self._num_under_way -= 1
        for row in plan.rows:
            if row.handle in self._by_handle:
                self._by_handle[row.handle].unforesee()
        broken = self._distrust(result.failed_copies)
        events: list[tuple[int, Event]] = []
        for row in plan.rows:
            sequence = self._by_handle.get(row.handle)
            # it may have ended while the step was under way
            if (
                sequence is None
                or row.handle in result.failures
                or not broken.isdisjoint(row.pages)
            ):
                continue
            sequence.num_computed = row.end
            if self._pages.keeps:
                for page, key in sequence.newly_full():
                    self._pages.register(page, key)
                    self._underway.computed(sequence, key)
            if row.output_index is not None:
                events.extend(self._accept(sequence, result))
        for handle, failure in result.failures.items():
            if handle in self._by_handle:
                self._end(self._by_handle[handle])
                events.append((handle, failure))
        return events

    def took(self, plan: StepPlan, seconds: float) -> None:
        """How long a committed step took; later ones may be shorter for it."""
        if self._pace is not None:
            self._pace.saw(plan, seconds)

    def abandon(self, plan: StepPlan, message: str) -> list[tuple[int, Event]]:
        """Ends every sequence of a plan that could not be executed."""
        assert self._num_under_way
        self._num_under_way -= 1
        # which copies were made is not known: what they moved is not to be relied on
        self._distrust(plan.copies)
        handles = dict.fromkeys(
            [row.handle for row in plan.rows] + [encode.handle for encode in plan.encodes]
        )
        live = [handle for handle in handles if handle in self._by_handle]
        for handle in live:
            self._end(self._by_handle[handle])
        return [(handle, Failed(ErrorKind.INTERNAL, message)) for handle in live]

    def check(self) -> None:
        """Raises AssertionError unless pages, states and lists agree."""
        self._pages.check([page for sequence in self._running for page in sequence.pages])
        listed = [*self._running, *self._waiting]
        assert {s.handle for s in listed} == set(self._by_handle)
        assert len(listed) == len(self._by_handle)
        assert all(s.state is SequenceState.RUNNING for s in self._running)
        assert all(s.state is SequenceState.WAITING and not s.pages for s in self._waiting)
        assert self._waiting.prompt_tokens == sum(s.num_prompt for s in self._waiting)
        for part in (self._running, list(self._waiting)):
            assert part == sorted(part, key=order_key)
        self._tenants.check(self._running)
        self._underway.check(self._running)
        if not listed:
            self._pages.check_unpinned()

    def _restore(self, draft: _Draft, sequence: Sequence) -> None:
        """Brings back what the caches have of a sequence, as far as the step's bound allows."""
        while sequence.is_restoring and draft.restored_pages < self._limits.max_restored_pages:
            fetched = self._restorer.fetch_next(sequence)
            if fetched is Fetched.COPIED:
                draft.restored_pages += 1
            elif fetched is Fetched.NO_PAGE:
                self._preempt_for(draft, sequence)
                if self._pages.num_available == 0:
                    return

    def _distrust(self, failed: Iterable[PageCopy]) -> frozenset[int]:
        """Forgets what failed copies should have moved; returns the pages left undefined."""
        broken = self._pages.distrust(tuple(failed))
        if broken:
            for sequence in self._running:
                for index, page in enumerate(sequence.pages):
                    if page in broken:
                        self._underway.withdraw(sequence)
                        self._restorer.stop(sequence)
                        self._pages.release(sequence.rewind(index))
                        break
        return broken

    def _plan_row(self, draft: _Draft, sequence: Sequence, share: int) -> None:
        start = sequence.num_computed
        end = self._encodes.up_to(draft.encodes, sequence, start + share)
        end = self._grow(draft, sequence, end)
        if end <= start:
            return
        samples = end == len(sequence.tokens)
        draft.rows.append(
            Row(
                handle=sequence.handle,
                start=start,
                token_ids=sequence.tokens[start:end],
                pages=sequence.pages,
                output_index=sequence.num_output if samples else None,
            )
        )

    def _grow(self, draft: _Draft, sequence: Sequence, end: int) -> int:
        """Takes pages for tokens before `end`; returns how far the pages reach."""
        size = sequence.page_tokens
        if end <= sequence.num_computed:
            return end
        missing = -(-end // size) - len(sequence.pages)
        has_room = len(sequence.pages) * size > sequence.num_computed
        if missing > 0 and self._pages.num_available == 0 and not has_room:
            self._preempt_for(draft, sequence)
        count = min(missing, self._pages.num_available)
        if count > 0:
            sequence.pages.extend(self._pages.take(count))
        return min(end, len(sequence.pages) * size)

    def _preempt_for(self, draft: _Draft, sequence: Sequence) -> None:
        """Preempts sequences later than `sequence`, last first, until a page is available."""
        while self._pages.num_available == 0 and self._running[-1] is not sequence:
            victim = self._running.pop()
            self._tenants.stopped(victim.request.tenant)
            self._underway.withdraw(victim)
            self._restorer.keep(victim)
            self._pages.release(victim.pages)
            victim.pages = []
            victim.restart()
            if victim.num_preemptions >= MAX_PREEMPTIONS:
                victim.order = promoted_order(victim.order)
            self._waiting.add(victim)
            draft.preempted.append(victim.handle)

    def _accept(self, sequence: Sequence, result: StepResult) -> list[tuple[int, Event]]:
        sampled = result.sampled[sequence.handle]
        ending = sequence.accept(sampled)
        events: list[tuple[int, Event]] = []
        if ending is None or ending[1] is None:
            logprobs = () if sampled.logprob is None else (sampled.logprob,)
            events.append((sequence.handle, Tokens((sampled.token_id,), logprobs)))
        if ending is not None:
            reason, stop_id = ending
            events.append((sequence.handle, Finished(reason, stop_id, sequence.usage())))
            self._end(sequence)
        return events

    def _end(self, sequence: Sequence) -> None:
        sequence.unforesee()
        del self._by_handle[sequence.handle]
        self._underway.withdraw(sequence)
        if sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
            self._tenants.stopped(sequence.request.tenant)
            self._pages.release(sequence.pages)
            sequence.pages = []
        else:
            self._waiting.remove(sequence)
        self._restorer.end(sequence)
        sequence.state = SequenceState.ENDED
