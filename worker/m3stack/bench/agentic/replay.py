"""Replays conversations through an engine, and takes the times of what it tells."""

from __future__ import annotations

import queue
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from m3stack.bench.agentic.trace import Conversation
from m3stack.client import default_sampling
from m3stack.engine.engine import Engine
from m3stack.types import Event, Failed, Finished, Request, Tokens

# longest silence of an engine before the run is given up
SILENCE_S = 300.0


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
        self._events: queue.SimpleQueue[tuple[float, Sequence[tuple[int, Event]]]] = (
            queue.SimpleQueue()
        )

    def put(self, events: Sequence[tuple[int, Event]]) -> None:
        self._events.put((time.perf_counter(), events))

    def get(self) -> tuple[float, Sequence[tuple[int, Event]]]:
        """The next ones; raises ReplayError after a long silence."""
        try:
            return self._events.get(timeout=SILENCE_S)
        except queue.Empty:
            raise ReplayError(f"the engine told nothing for {SILENCE_S:g} s") from None


class Replay:
    """Runs conversations side by side; a turn is asked as soon as the last one is answered.

    Args:
        engine: running; its events go to `mailbox`.
        shared: what every conversation begins with.
    """

    def __init__(self, engine: Engine, mailbox: Mailbox, shared: Sequence[int]) -> None:
        self._engine = engine
        self._mailbox = mailbox
        self._shared = shared
        self._next_handle = 0

    def warm(self) -> None:
        """Has the shared beginning computed once."""
        self._run([_Talk(Conversation(()), list(self._shared))], [], [], probe_tokens=4)

    def measure(self, arm: str, scripts: Sequence[Conversation]) -> Measured:
        """Times one run of all conversations at once.

        Raises:
            ReplayError: a request failed or was not answered in full.
        """
        first_s: list[float] = []
        between_s: list[float] = []
        talks = [_Talk(script, list(self._shared)) for script in scripts]
        began_at = time.perf_counter()
        prompt, cached = self._run(talks, first_s, between_s)
        seconds = time.perf_counter() - began_at
        output = sum(turn.output_tokens for script in scripts for turn in script.turns)
        return Measured(
            concurrency=len(scripts),
            arm=arm,
            output_tokens_per_s=output / seconds,
            ttft_p50_ms=statistics.median(first_s) * 1e3,
            itl_p99_ms=_quantile(between_s, 0.99) * 1e3,
            output_tokens=output,
            seconds=seconds,
            cached_share=cached / prompt,
        )

    def _run(
        self,
        talks: list[_Talk],
        first_s: list[float],
        between_s: list[float],
        *,
        probe_tokens: int = 0,
    ) -> tuple[int, int]:
        """Runs talks to their end; returns prompt tokens and those of them that were cached."""
        live = {self._ask(talk, probe_tokens): talk for talk in talks}
        prompt = cached = 0
        while live:
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
                elif isinstance(event, Failed):
                    raise ReplayError(f"a request failed: {event.message}")
                elif isinstance(event, Finished):
                    prompt += event.usage.prompt_tokens
                    cached += event.usage.cached_tokens
                    del live[handle]
                    if self._close_turn(talk, probe_tokens):
                        live[self._ask(talk, 0)] = talk
        return prompt, cached

    def _ask(self, talk: _Talk, probe_tokens: int) -> int:
        wanted = probe_tokens
        if not probe_tokens:
            turn = talk.script.turns[talk.turn]
            talk.tokens.extend(turn.new_token_ids)
            wanted = turn.output_tokens
        handle = self._next_handle
        self._next_handle += 1
        talk.answer = []
        talk.asked_at = time.perf_counter()
        rules = default_sampling(wanted, ignore_eos=True)
        self._engine.submit(handle, Request(f"agent-{handle}", tuple(talk.tokens), rules))
        return handle

    def _close_turn(self, talk: _Talk, probe_tokens: int) -> bool:
        """Takes an answer into what was said; False at the end of the talk."""
        if probe_tokens:
            return False
        wanted = talk.script.turns[talk.turn].output_tokens
        if len(talk.answer) != wanted:
            raise ReplayError(f"{len(talk.answer)} tokens were told of {wanted}")
        talk.tokens.extend(talk.answer)
        talk.turn += 1
        return talk.turn < len(talk.script.turns)


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
