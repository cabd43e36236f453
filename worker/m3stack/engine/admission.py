"""Who leaves the queue: strict order, room for all known tokens, tenants, shared prefixes."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from m3stack.cache.prefix import PrefixCache
from m3stack.engine.budget import SchedulerLimits
from m3stack.engine.plan import Admission
from m3stack.engine.restoring import Restorer
from m3stack.engine.sequence import Sequence, WaitReason
from m3stack.engine.underway import PagesUnderway
from m3stack.engine.waiting import TenantCaps, WaitingQueue, order_key

# a sequence preempted that often runs again only when nothing can preempt it any more
MAX_PREEMPTIONS = 3
# page keys made in a step for who waits, while others run: a millisecond or two
KEYS_A_STEP = 512


@dataclass(frozen=True, slots=True)
class _Blocked:
    """A head of the queue that did not fit, and the pages there were for it.

    Looking for its prefix again is work that grows with its length: only more room is a reason.
    """

    handle: int
    room: int

    def covers(self, state: _Blocked) -> bool:
        return self.handle == state.handle and state.room <= self.room


class Admissions:
    """Moves sequences from the queue to the running set; the scheduler owns it.

    Args:
        limits: of a step.
        pages: for newcomers.
        waiting, running: the scheduler's own, the latter in order.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pages: PrefixCache,
        waiting: WaitingQueue,
        running: list[Sequence],
    ) -> None:
        self._limits = limits
        self._pages = pages
        self._waiting = waiting
        self._running = running
        self.tenants = TenantCaps(limits.max_running_per_tenant)
        self.underway = PagesUnderway(pages)
        self._blocked: _Blocked | None = None
        self._keys_left = 0

    def admit(self, restorer: Restorer) -> list[Admission]:
        """Starts whoever may start now."""
        admitted: list[Admission] = []
        self._keys_left = KEYS_A_STEP
        index = 0
        while index < len(self._waiting) and len(self._running) < self._limits.max_sequences:
            sequence = self._waiting[index]
            if not self.tenants.allows(sequence.request.tenant):
                sequence.waited_for(WaitReason.TENANT)
                index += 1
            elif not self._has_keys(sequence):
                sequence.waited_for(WaitReason.KEYS)
                return admitted
            elif self.underway.holds_back(sequence):
                sequence.waited_for(WaitReason.PREFIX)
                index += 1
            else:
                admission = self._try_start(sequence, restorer)
                if admission is None:
                    sequence.waited_for(WaitReason.PAGES)
                    return admitted
                admitted.append(admission)
        if index < len(self._waiting):
            self._waiting[index].waited_for(WaitReason.SEQUENCES)
        return admitted

    def may_admit(self) -> bool:
        """Whether somebody waits who might start now; at most a step's keys are made for it."""
        if len(self._running) >= self._limits.max_sequences:
            return False
        self._keys_left = KEYS_A_STEP
        for sequence in self._waiting:
            if not self.tenants.allows(sequence.request.tenant):
                continue
            if not self._has_keys(sequence):
                return False
            if not self.underway.holds_back(sequence):
                return not (self._running and self._is_blocked(self._state(sequence)))
        return False

    def _has_keys(self, sequence: Sequence) -> bool:
        """Whether a prompt's pages can be looked for; who runs is not held up by their keys."""
        if not (self._pages.keeps and self._running):
            return True
        self._keys_left -= sequence.make_keys(self._keys_left)
        return not sequence.num_lacking_keys

    def _state(self, sequence: Sequence) -> _Blocked:
        room = self._pages.num_available - self._headroom(sequence)
        return _Blocked(sequence.handle, room)

    def _is_blocked(self, state: _Blocked) -> bool:
        return self._blocked is not None and self._blocked.covers(state)

    def _try_start(self, sequence: Sequence, restorer: Restorer) -> Admission | None:
        state = self._state(sequence)
        if self._running and self._is_blocked(state):
            return None
        keys = sequence.matchable_keys() if self._pages.keeps else []
        matched = self._pages.match(keys)
        missing = sequence.pages_for_tokens - len(matched)
        # pages that were idle until now are not available any more
        room = self._pages.num_available - self._headroom(sequence)
        if self._running and missing > room:
            self._pages.release(matched)
            self._blocked = state
            return None
        known = len(matched) + self._pages.known_length(keys[len(matched) :])
        is_first = sequence.cached_tokens is None
        self._waiting.remove(sequence)
        sequence.start(matched, known_pages=known)
        restorer.begin(sequence, keys[len(matched) : known])
        insort(self._running, sequence, key=order_key)
        self.tenants.started(sequence.request.tenant)
        self.underway.announce(sequence, known)
        size = sequence.page_tokens
        return Admission(sequence.handle, known * size, (known - len(matched)) * size, is_first)

    def _headroom(self, newcomer: Sequence) -> int:
        """Pages that must stay available for the running sequences if `newcomer` joins them."""
        if newcomer.num_preemptions >= MAX_PREEMPTIONS:
            own_growth = newcomer.pages_at_most - newcomer.pages_for_tokens
            return own_growth + sum(s.pages_at_most - len(s.pages) for s in self._running)
        promised = sum(s.pages_for_tokens - len(s.pages) for s in self._running)
        return promised + len(self._running)
