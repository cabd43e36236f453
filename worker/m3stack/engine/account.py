"""Where one request's time went: a bounded account of the phases of its life."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum

MAX_ENTRIES = 512
"""Of one account; chunks of a prompt beyond that are added to the last one."""
MAX_ENDED = 1024
"""Accounts of ended requests that are kept."""


class Phase(Enum):
    """Value = name in `worker.proto`."""

    UPLOAD = "upload"
    QUEUE = "queue"
    ENCODE = "encode"
    RESTORE = "restore"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"


@dataclass(slots=True)
class Totals:
    """What the worker has done so far; the difference of two is what it did in between.

    Attributes:
        steps, steps_s, tokens: all steps, how long they took, what they computed.
        mixed_steps, mixed_s: those of them that held prompt tokens.
    """

    steps: int = 0
    steps_s: float = 0.0
    tokens: int = 0
    mixed_steps: int = 0
    mixed_s: float = 0.0

    def snapshot(self) -> Totals:
        return Totals(self.steps, self.steps_s, self.tokens, self.mixed_steps, self.mixed_s)


@dataclass(slots=True)
class Entry:
    """A stretch of time; seconds, `start_s` since the request reached the worker."""

    phase: Phase
    start_s: float
    duration_s: float = 0.0
    tokens: int = 0
    work: Totals = field(default_factory=Totals)
    note: str = ""


class Account:
    """The account of one request; the engine thread owns it while the request lives.

    Args:
        request_id: as the client gave it.
        began_at: when the request reached the worker, on the engine's clock.
        prompt_tokens: of the request.
    """

    def __init__(self, request_id: str, *, began_at: float, prompt_tokens: int) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self.output_tokens = 0
        self.preemptions = 0
        self.outcome = "running"
        self.entries: list[Entry] = []
        self._began_at = began_at
        self._since: Totals | None = None

    @property
    def phase(self) -> Phase | None:
        """The phase it is in."""
        return self.entries[-1].phase if self.entries else None

    def open(self, phase: Phase, now: float, totals: Totals, note: str = "") -> None:
        """Ends the current phase, and begins another that lasts until the next call."""
        self.close(now, totals)
        self.entries.append(Entry(phase, now - self._began_at, note=note))
        self._since = totals.snapshot()

    def close(self, now: float, totals: Totals, note: str = "") -> None:
        """Ends the current phase."""
        if self._since is None:
            return
        entry, since = self.entries[-1], self._since
        self._since = None
        entry.duration_s = now - self._began_at - entry.start_s
        entry.note = entry.note or note
        entry.work = Totals(
            totals.steps - since.steps,
            totals.steps_s - since.steps_s,
            totals.tokens - since.tokens,
            totals.mixed_steps - since.mixed_steps,
            totals.mixed_s - since.mixed_s,
        )

    def add(self, entry: Entry) -> None:
        """Adds what happened within one step; past the bound, to the last such entry."""
        assert self._since is None
        last = self.entries[-1] if self.entries else None
        if len(self.entries) >= MAX_ENTRIES and last is not None and last.phase is entry.phase:
            last.duration_s = entry.start_s + entry.duration_s - last.start_s
            last.tokens += entry.tokens
            last.work.steps += entry.work.steps
            last.work.steps_s += entry.work.steps_s
            last.work.tokens += entry.work.tokens
            return
        self.entries.append(entry)

    def since_begin(self, now: float) -> float:
        return now - self._began_at


class AccountBook:
    """Accounts of running requests, and of the latest that have ended."""

    def __init__(self, max_ended: int = MAX_ENDED) -> None:
        self._max_ended = max_ended
        self._live: dict[int, Account] = {}
        self._ended: OrderedDict[str, Account] = OrderedDict()

    def begin(self, handle: int, account: Account) -> None:
        self._live[handle] = account

    def __getitem__(self, handle: int) -> Account:
        return self._live[handle]

    def end(self, handle: int, outcome: str) -> None:
        """Files the account of a request that has ended."""
        account = self._live.pop(handle)
        account.outcome = outcome
        self._ended.pop(account.request_id, None)
        self._ended[account.request_id] = account
        while len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)

    def find(self, request_id: str) -> Account | None:
        """The latest request of that id, running ones first."""
        for account in reversed(self._live.values()):
            if account.request_id == request_id:
                return account
        return self._ended.get(request_id)
