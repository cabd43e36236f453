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

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from m3stack.cache.host import PageCopy
from m3stack.cache.media import MediaLedger
from m3stack.cache.prefix import PrefixCache, Salt
from m3stack.engine.budget import SchedulerLimits, split_budget
from m3stack.engine.plan import Admission, EncodeItem, Row, StepPlan, StepResult
from m3stack.engine.restoring import Fetched, Restorer
from m3stack.engine.sequence import Sequence, SequenceState, WaitReason
from m3stack.engine.underway import PagesUnderway
from m3stack.engine.waiting import (
    TenantCaps,
    WaitingQueue,
    order_key,
    order_of,
    promoted_order,
)
from m3stack.errors import ErrorKind
from m3stack.types import Event, Failed, Finished, Tokens

# a sequence preempted that often runs again only when nothing can preempt it any more
MAX_PREEMPTIONS = 3


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    rows: list[Row] = field(default_factory=list[Row])
    encodes: dict[bytes, EncodeItem] = field(default_factory=dict[bytes, EncodeItem])
    encode_patches: int = 0
    admissions: list[Admission] = field(default_factory=list[Admission])
    preempted: list[int] = field(default_factory=list[int])
    restored_pages: int = 0


@dataclass(frozen=True, slots=True)
class _Blocked:
    """A head of the queue that did not fit, and the pages there were for it.

    Looking for its prefix again is work that grows with its length: only more room is a reason.
    """

    handle: int
    room: int

    def covers(self, state: _Blocked) -> bool:
        return self.handle == state.handle and state.room <= self.room


class Scheduler:
    """The queue and the running set; the engine thread owns it.

    Calls alternate: `plan`, then `commit` or `abandon` of that plan. Sequences are added and
    cancelled in between, never while a plan is being executed.
    """

    def __init__(self, limits: SchedulerLimits, pages: PrefixCache, media: MediaLedger) -> None:
        self._limits = limits
        self._pages = pages
        self._media = media
        self._waiting = WaitingQueue()
        # in order
        self._running: list[Sequence] = []
        self._by_handle: dict[int, Sequence] = {}
        self._tenants = TenantCaps(limits.max_running_per_tenant)
        self._underway = PagesUnderway(pages)
        self._restorer = Restorer(pages)
        self._blocked: _Blocked | None = None
        self._num_added = 0
        self._num_plans = 0
        self._is_executing = False

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

    def fits(self, sequence: Sequence) -> bool:
        """Whether the pool could ever hold the sequence, alone."""
        return sequence.pages_at_most <= self._pages.num_pages

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence that `fits`."""
        assert not self._is_executing
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
        """Ends a sequence and frees its pages; False if it has ended before."""
        assert not self._is_executing
        sequence = self._by_handle.get(handle)
        if sequence is None:
            return False
        self._end(sequence)
        return True

    def plan(self) -> StepPlan:
        """What the next step computes; without rows if nothing can run."""
        assert not self._is_executing
        self._num_plans += 1
        draft = _Draft()
        self._admit(draft)
        # copies: sequences behind the current one may be preempted on the way
        for sequence in tuple(self._running):
            if sequence.state is SequenceState.RUNNING and sequence.is_restoring:
                self._restore(draft, sequence)
        ready = [sequence for sequence in self._running if not sequence.is_restoring]
        shares = split_budget(ready, self._limits)
        for sequence in ready:
            if sequence.state is SequenceState.RUNNING and shares[sequence.handle] > 0:
                self._plan_row(draft, sequence, shares[sequence.handle])
        plan = StepPlan(
            rows=tuple(sorted(draft.rows, key=lambda row: len(row.token_ids) > 1)),
            encodes=tuple(draft.encodes.values()),
            admissions=tuple(draft.admissions),
            preempted=tuple(draft.preempted),
            copies=self._pages.take_copies(),
        )
        assert not (plan.is_empty and self._by_handle), "invariant: the first can always go on"
        if plan.is_empty:
            return plan
        self._is_executing = True
        return replace(plan, evicted_media=tuple(self._media.take_evicted()))

    def commit(self, plan: StepPlan, result: StepResult) -> list[tuple[int, Event]]:
        """Takes over what a step gave; returns what requests are to be told, in order."""
        assert self._is_executing
        self._is_executing = False
        broken = self._distrust(result.failed_copies)
        events: list[tuple[int, Event]] = []
        for row in plan.rows:
            sequence = self._by_handle[row.handle]
            if row.handle in result.failures or not broken.isdisjoint(row.pages):
                continue
            sequence.num_computed = row.end
            if self._pages.keeps:
                for page, key in sequence.newly_full():
                    self._pages.register(page, key)
                    self._underway.computed(sequence, key)
            if row.output_index is not None:
                events.extend(self._accept(sequence, result))
        for handle, failure in result.failures.items():
            self._end(self._by_handle[handle])
            events.append((handle, failure))
        return events

    def abandon(self, plan: StepPlan, message: str) -> list[tuple[int, Event]]:
        """Ends every sequence of a plan that could not be executed."""
        assert self._is_executing
        self._is_executing = False
        # which copies were made is not known: what they moved is not to be relied on
        self._distrust(plan.copies)
        handles = dict.fromkeys(
            [row.handle for row in plan.rows] + [encode.handle for encode in plan.encodes]
        )
        for handle in handles:
            self._end(self._by_handle[handle])
        return [(handle, Failed(ErrorKind.INTERNAL, message)) for handle in handles]

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

    def _admit(self, draft: _Draft) -> None:
        index = 0
        while index < len(self._waiting) and len(self._running) < self._limits.max_sequences:
            sequence = self._waiting[index]
            if not self._tenants.allows(sequence.request.tenant):
                sequence.waited_for(WaitReason.TENANT)
                index += 1
            elif self._underway.holds_back(sequence):
                sequence.waited_for(WaitReason.PREFIX)
                index += 1
            elif not self._try_start(draft, sequence):
                sequence.waited_for(WaitReason.PAGES)
                return
        if index < len(self._waiting):
            self._waiting[index].waited_for(WaitReason.SEQUENCES)

    def _try_start(self, draft: _Draft, sequence: Sequence) -> bool:
        headroom = self._headroom(sequence)
        state = _Blocked(sequence.handle, self._pages.num_available - headroom)
        if self._running and self._blocked is not None and self._blocked.covers(state):
            return False
        keys = sequence.matchable_keys() if self._pages.keeps else []
        matched = self._pages.match(keys)
        missing = sequence.pages_for_tokens - len(matched)
        if self._running and missing > self._pages.num_available - headroom:
            self._pages.release(matched)
            self._blocked = state
            return False
        known = len(matched) + self._pages.known_length(keys[len(matched) :])
        is_first = sequence.cached_tokens is None
        self._waiting.remove(sequence)
        sequence.start(matched, known_pages=known)
        self._restorer.begin(sequence, keys[len(matched) : known])
        insort(self._running, sequence, key=order_key)
        self._tenants.started(sequence.request.tenant)
        self._underway.announce(sequence, known)
        size = sequence.page_tokens
        draft.admissions.append(
            Admission(sequence.handle, known * size, (known - len(matched)) * size, is_first)
        )
        return True

    def _headroom(self, newcomer: Sequence) -> int:
        """Pages that must stay available for the running sequences if `newcomer` joins them."""
        if newcomer.num_preemptions >= MAX_PREEMPTIONS:
            own_growth = newcomer.pages_at_most - newcomer.pages_for_tokens
            return own_growth + sum(s.pages_at_most - len(s.pages) for s in self._running)
        promised = sum(s.pages_for_tokens - len(s.pages) for s in self._running)
        return promised + len(self._running)

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
        end = self._encode_up_to(draft, sequence, start + share)
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

    def _encode_up_to(self, draft: _Draft, sequence: Sequence, end: int) -> int:
        """Plans the encoding of media before `end`; returns how far features will reach."""
        for item in sequence.media:
            if item.first >= end:
                break
            if item.end <= sequence.num_computed:
                continue
            planned = draft.encodes.get(item.key)
            done = self._media.encoded_parts(item.key, len(item.part_patches))
            if planned is not None:
                done = planned.first_part + planned.num_parts
            while done < len(item.part_patches) and item.reach(done) < end:
                total = draft.encode_patches + item.part_patches[done]
                if draft.encodes and total > self._limits.max_encode_patches:
                    return max(item.reach(done), sequence.num_computed)
                planned = draft.encodes.get(item.key)
                draft.encodes[item.key] = (
                    EncodeItem(sequence.handle, item.key, done, 1)
                    if planned is None
                    else replace(planned, num_parts=planned.num_parts + 1)
                )
                draft.encode_patches = total
                done += 1
        return end

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
