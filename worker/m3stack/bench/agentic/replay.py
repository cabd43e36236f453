"""Replays conversations through an engine, and takes the times of what it tells."""

from __future__ import annotations

import queue
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from m3stack.bench.agentic.trace import Conversation
from m3stack.client import default_sampling
from m3stack.engine.engine import Engine
from m3stack.types import Event, Failed, Finished, Request, Tokens

# longest silence of an engine before the run is given up
SILENCE_S = 120.0
# tokens between the ends of two requests while warming up: enough for a step's recording
WARM_STEPS = 6


class ReplayError(Exception):
    """The engine did not do what it was asked to."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One arm at one concurrency.

    Attributes:
        cached_share: of all prompt tokens, those that the prefix cache had.
    """

    concurrency: int
    arm: str
    output_tokens_per_s: float
    ttft_p50_ms: float
    itl_p99_ms: float
    output_tokens: int
    seconds: float
    cached_share: float


@dataclass(slots=True)
class _Talk:
    """A conversation under way."""

    script: Conversation
    tokens: list[int]
    turn: int = 0
    asked_at: float = 0.0
    last_at: float = 0.0
    answer: list[int] = field(default_factory=list[int])


class Mailbox:
    """Events of an engine with the time they came; its `put` is the engine's `deliver`."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[tuple[float, Sequence[tuple[int, Event]]] | None] = (
            queue.SimpleQueue()
        )
        self._failure: BaseException | None = None

    def put(self, events: Sequence[tuple[int, Event]]) -> None:
        self._events.put((time.perf_counter(), events))

    def end(self, failure: BaseException | None) -> None:
        """The engine's `on_exit`."""
        self._failure = failure
        self._events.put(None)

    def get(self) -> tuple[float, Sequence[tuple[int, Event]]]:
        """The next ones; raises ReplayError after a long silence, or if the engine has ended."""
        try:
            found = self._events.get(timeout=SILENCE_S)
        except queue.Empty:
            raise ReplayError(f"the engine told nothing for {SILENCE_S:g} s") from None
        if found is None:
            raise ReplayError(f"the engine has ended: {self._failure}")
        return found


class Crowd:
    """Requests of any kind, and when each of their tokens came.

    Attributes:
        times: arrival of each token, by handle.
        tokens: the tokens, by handle.
        ended: handles that got all their tokens.
    """

    def __init__(self, engine: Engine, mailbox: Mailbox, *, first_handle: int = 1_000_000) -> None:
        self._engine, self._mailbox = engine, mailbox
        self._next_handle = first_handle
        self.times: dict[int, list[float]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.ended: set[int] = set()

    def submit(self, tokens: Sequence[int], max_tokens: int) -> int:
        """Asks for that many tokens behind a prompt; returns the request's handle."""
        handle = self._next_handle
        self._next_handle += 1
        self.times[handle], self.tokens[handle] = [], []
        rules = default_sampling(max_tokens, ignore_eos=True)
        self._engine.submit(handle, Request(f"bench-{handle}", tuple(tokens), rules))
        return handle

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Takes events until something holds; raises ReplayError if a request fails."""
        while not is_done():
            now, events = self._mailbox.get()
            for handle, event in events:
                if isinstance(event, Tokens) and handle in self.times:
                    self.times[handle].append(now)
                    self.tokens[handle].extend(event.token_ids)
                elif isinstance(event, Failed):
                    raise ReplayError(f"a request failed: {event.message}")
                elif isinstance(event, Finished):
                    self.ended.add(handle)

    def wait_ended(self, *handles: int) -> None:
        self.wait(lambda: self.ended.issuperset(handles))

    def wait_tokens(self, handles: Sequence[int], count: int) -> None:
        """Until each of some requests has that many tokens."""
        self.wait(lambda: all(len(self.times[handle]) >= count for handle in handles))

    def cancel(self, *handles: int) -> None:
        """Ends requests; events of theirs that still come mean nothing."""
        for handle in handles:
            self._engine.cancel(handle)

    def gaps(self, handles: Sequence[int], since: float, until: float) -> list[float]:
        """Seconds between tokens of requests, those that came within a time."""
        found: list[float] = []
        for handle in handles:
            times = self.times[handle]
            found += [
                later - earlier
                for earlier, later in pairwise(times)
                if earlier >= since and later <= until
            ]
        return found


class Replay:
    """Keeps conversations running; a turn is asked as soon as the last one is answered.

    Args:
        engine: running; its events go to `mailbox`.
        shared: what every conversation begins with.
    """

    def __init__(self, engine: Engine, mailbox: Mailbox, shared: Sequence[int]) -> None:
        self._engine = engine
        self._mailbox = mailbox
        self._shared = shared
        self._next_handle = 0

    def warm(self, concurrency: int, reaches: Sequence[int] = ()) -> None:
        """Has the shared beginning computed, and every size of step compiled and recorded.

        Args:
            concurrency: requests at once that are to be measured.
            reaches: lengths beyond the shared beginning that contexts will come to; one request
                of each is run to its end beside shorter ones, which end one after the other.
        """
        crowd = Crowd(self._engine, self._mailbox, first_handle=1 << 40)
        crowd.wait_ended(crowd.submit(self._shared, 2))
        for number, reach in enumerate(reaches):
            ends = [WARM_STEPS * min(n, 8) + 2 * max(0, n - 8) for n in range(concurrency + 1)]
            asked = [
                crowd.submit((*self._shared, *(number + n + i for i in range(20))), ends[n])
                for n in range(1, concurrency)
            ]
            longest = (*self._shared, *(number + 7 * i % 251 for i in range(reach)))
            asked.append(crowd.submit(longest, ends[-1] + 8))
            crowd.wait_ended(*asked)

    def measure(self, arm: str, scripts: Sequence[Conversation], concurrency: int) -> Measured:
        """Times conversations, of which so many run at once; one that ends makes room for the next.

        Time ends with the last moment at which that many run: what is left then is cancelled, and
        counts as far as it came.

        Raises:
            ReplayError: a request failed or was not answered in full.
        """
        assert len(scripts) > concurrency
        to_come = deque(_Talk(script, list(self._shared)) for script in scripts)
        first_s: list[float] = []
        between_s: list[float] = []
        began_at = now = time.perf_counter()
        live = {self._ask(talk): talk for talk in (to_come.popleft() for _ in range(concurrency))}
        prompt = cached = output = 0
        while len(live) == concurrency:
            now, events = self._mailbox.get()
            for handle, event in events:
                talk = live.get(handle)
                if talk is None:
                    continue
                if isinstance(event, Tokens):
                    since, times = (
                        (talk.last_at, between_s) if talk.answer else (talk.asked_at, first_s)
                    )
                    times.append(now - since)
                    talk.last_at = now
                    talk.answer.extend(event.token_ids)
                    output += len(event.token_ids)
                elif isinstance(event, Failed):
                    raise ReplayError(f"a request failed: {event.message}")
                elif isinstance(event, Finished):
                    prompt += event.usage.prompt_tokens
                    cached += event.usage.cached_tokens
                    del live[handle]
                    following = talk if self._close_turn(talk) else None
                    if following is None and to_come:
                        following = to_come.popleft()
                    if following is not None:
                        live[self._ask(following)] = following
        for handle in live:
            self._engine.cancel(handle)
        seconds = now - began_at
        return Measured(
            concurrency=concurrency,
            arm=arm,
            output_tokens_per_s=output / seconds,
            ttft_p50_ms=statistics.median(first_s) * 1e3,
            itl_p99_ms=quantile(between_s, 0.99) * 1e3,
            output_tokens=output,
            seconds=seconds,
            cached_share=cached / prompt,
        )

    def _ask(self, talk: _Talk) -> int:
        turn = talk.script.turns[talk.turn]
        talk.tokens.extend(turn.new_token_ids)
        handle = self._next_handle
        self._next_handle += 1
        talk.answer = []
        talk.asked_at = time.perf_counter()
        rules = default_sampling(turn.output_tokens, ignore_eos=True)
        self._engine.submit(handle, Request(f"agent-{handle}", tuple(talk.tokens), rules))
        return handle

    def _close_turn(self, talk: _Talk) -> bool:
        """Takes an answer into what was said; False at the end of the talk."""
        wanted = talk.script.turns[talk.turn].output_tokens
        if len(talk.answer) != wanted:
            raise ReplayError(f"{len(talk.answer)} tokens were told of {wanted}")
        talk.tokens.extend(talk.answer)
        talk.turn += 1
        return talk.turn < len(talk.script.turns)


def quantile(values: Sequence[float], share: float) -> float:
    """The value that a share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
