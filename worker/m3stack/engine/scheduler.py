"""Which sequences run next, and how far: chunked prefill beside decode, paging, preemption.

Deterministic; knows no tensors, no clock, no callers. The rules, all in order of arrival:

- Every running sequence that waits for its next token gets one row in every step.
- What is left of the step's token budget goes to prompts: at least half of it to the oldest
  prompt, the rest to the shortest others first.
- Pages are taken as tokens come. A sequence that cannot get a page takes those of newer sequences,
  newest first; these go back to the head of the queue and recompute later. The oldest sequence
  therefore always makes progress, and every request ends.
- The queue is strict: its head is admitted when there is room for all its known tokens beside
  what the running ones still need, and always when nothing runs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from m3stack.cache.media import MediaLedger
from m3stack.cache.prefix import PrefixCache
from m3stack.engine.plan import Admission, EncodeItem, Row, StepPlan, StepResult
from m3stack.engine.sequence import Sequence, SequenceState
from m3stack.errors import ErrorKind
from m3stack.types import Event, Failed, Finished, Tokens

# a sequence preempted that often runs again only when nothing can preempt it any more
MAX_PREEMPTIONS = 3


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a step.

    Attributes:
        max_batch_tokens: tokens of a step; more than `max_sequences`, so that prompts advance.
        max_sequences: sequences that run at once.
        max_encode_patches: vision patches of a step; one item may exceed it alone.
    """

    max_batch_tokens: int
    max_sequences: int
    max_encode_patches: int

    def __post_init__(self) -> None:
        assert self.max_batch_tokens > self.max_sequences > 0


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    rows: list[Row] = field(default_factory=list[Row])
    encodes: dict[bytes, EncodeItem] = field(default_factory=dict[bytes, EncodeItem])
    encode_patches: int = 0
    admissions: list[Admission] = field(default_factory=list[Admission])
    preempted: list[int] = field(default_factory=list[int])


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
        # all of `_running` is older than all of `_waiting`; both are in order of arrival
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._by_handle: dict[int, Sequence] = {}
        self._waiting_tokens = 0
        self._blocked: _Blocked | None = None
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
        return self._waiting_tokens + running

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
        self._by_handle[sequence.handle] = sequence
        self._waiting.append(sequence)
        self._waiting_tokens += sequence.num_prompt

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
        draft = _Draft()
        self._admit(draft)
        shares = self._split_budget()
        # a copy: sequences behind the current one may be preempted on the way
        for sequence in tuple(self._running):
            if sequence.state is SequenceState.RUNNING and shares[sequence.handle] > 0:
                self._plan_row(draft, sequence, shares[sequence.handle])
        assert draft.rows or not self._by_handle, "invariant: the oldest sequence can always run"
        self._is_executing = bool(draft.rows)
        return StepPlan(
            rows=tuple(sorted(draft.rows, key=lambda row: len(row.token_ids) > 1)),
            encodes=tuple(draft.encodes.values()),
            admissions=tuple(draft.admissions),
            preempted=tuple(draft.preempted),
        )

    def commit(self, plan: StepPlan, result: StepResult) -> list[tuple[int, Event]]:
        """Takes over what a step gave; returns what requests are to be told, in order."""
        assert self._is_executing
        self._is_executing = False
        events: list[tuple[int, Event]] = []
        for row in plan.rows:
            sequence = self._by_handle[row.handle]
            if row.handle in result.failures:
                continue
            sequence.num_computed = row.end
            if self._pages.enabled:
                for page, key in sequence.newly_full():
                    self._pages.register(page, key)
            if row.output_index is not None:
                events.extend(self._accept(sequence, result))
        for handle, message in result.failures.items():
            self._end(self._by_handle[handle])
            events.append((handle, Failed(ErrorKind.INTERNAL, message)))
        return events

    def abandon(self, plan: StepPlan, message: str) -> list[tuple[int, Event]]:
        """Ends every sequence of a plan that could not be executed."""
        assert self._is_executing
        self._is_executing = False
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
        assert self._waiting_tokens == sum(s.num_prompt for s in self._waiting)

    def _admit(self, draft: _Draft) -> None:
        while self._waiting and len(self._running) < self._limits.max_sequences:
            sequence = self._waiting[0]
            headroom = self._headroom(sequence)
            state = _Blocked(sequence.handle, self._pages.num_available - headroom)
            if self._running and self._blocked is not None and self._blocked.covers(state):
                return
            keys = sequence.matchable_keys() if self._pages.enabled else []
            matched = self._pages.match(keys)
            missing = sequence.pages_for_tokens - len(matched)
            if self._running and missing > self._pages.num_available - headroom:
                self._pages.release(matched)
                self._blocked = state
                return
            self._waiting.popleft()
            self._waiting_tokens -= sequence.num_prompt
            is_first_time = sequence.cached_tokens is None
            sequence.start(matched)
            self._running.append(sequence)
            if is_first_time:
                draft.admissions.append(Admission(sequence.handle, sequence.num_computed))

    def _headroom(self, newcomer: Sequence) -> int:
        """Pages that must stay available for the running sequences if `newcomer` joins them."""
        if newcomer.num_preemptions >= MAX_PREEMPTIONS:
            own_growth = newcomer.pages_at_most - newcomer.pages_for_tokens
            return own_growth + sum(s.pages_at_most - len(s.pages) for s in self._running)
        promised = sum(s.pages_for_tokens - len(s.pages) for s in self._running)
        return promised + len(self._running)

    def _split_budget(self) -> dict[int, int]:
        """Tokens each running sequence may compute in this step, by handle."""
        shares = {s.handle: 1 for s in self._running}
        prompts = [s for s in self._running if s.num_uncomputed > 1]
        if not prompts:
            return shares
        left = self._limits.max_batch_tokens - (len(self._running) - len(prompts))
        oldest = prompts[0]
        reserved = min(oldest.num_uncomputed, -(-left // 2))
        left -= reserved
        # sorted is stable: equal lengths keep their order of arrival
        for sequence in sorted(prompts[1:], key=lambda s: s.num_uncomputed):
            shares[sequence.handle] = min(sequence.num_uncomputed, left)
            left -= shares[sequence.handle]
        shares[oldest.handle] = min(oldest.num_uncomputed, reserved + left)
        return shares

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
            is_behind = item.end <= sequence.num_computed
            if is_behind or item.key in draft.encodes or self._media.is_encoded(item.key):
                continue
            total = draft.encode_patches + item.num_patches
            if draft.encodes and total > self._limits.max_encode_patches:
                return max(item.first, sequence.num_computed)
            draft.encodes[item.key] = EncodeItem(sequence.handle, item.key)
            draft.encode_patches = total
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
        """Preempts sequences newer than `sequence`, newest first, until a page is available."""
        while self._pages.num_available == 0 and self._running[-1] is not sequence:
            victim = self._running.pop()
            self._pages.release(victim.pages)
            victim.pages = []
            victim.restart()
            self._waiting.appendleft(victim)
            self._waiting_tokens += victim.num_prompt
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
        if sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
            self._pages.release(sequence.pages)
            sequence.pages = []
        else:
            self._waiting.remove(sequence)
            self._waiting_tokens -= sequence.num_prompt
        sequence.state = SequenceState.ENDED
