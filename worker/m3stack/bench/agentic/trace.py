"""An agent's day: conversations with one long beginning, and a tool's answer in every turn."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TraceShape:
    """Sizes of a trace, in tokens.

    Attributes:
        shared: system prompt and tools that every conversation begins with.
        new: least and most that a turn adds to what was said.
        output: least and most that a turn puts out.
        turns: of each conversation.
    """

    shared: int = 60_000
    new: tuple[int, int] = (200, 4000)
    output: tuple[int, int] = (100, 600)
    turns: int = 3

    @property
    def longest(self) -> int:
        """Tokens that the longest conversation can reach."""
        return self.shared + self.turns * (self.new[1] + self.output[1])


@dataclass(frozen=True, slots=True)
class Turn:
    new_token_ids: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is asked, turn by turn; what was answered stands between."""

    turns: tuple[Turn, ...]


def shared_prefix(shape: TraceShape, vocab_size: int) -> tuple[int, ...]:
    """The beginning of every conversation."""
    return _tokens(random.Random("shared"), shape.shared, vocab_size)


def conversations(
    shape: TraceShape, count: int, vocab_size: int, *, first: int = 0
) -> list[Conversation]:
    """The same ones in every run.

    Args:
        first: number of the first one: what an engine has seen before is in its cache.
    """
    made: list[Conversation] = []
    for number in range(first, first + count):
        rng = random.Random(f"conversation {number}")
        made.append(
            Conversation(
                tuple(
                    Turn(
                        _tokens(rng, rng.randint(*shape.new), vocab_size),
                        rng.randint(*shape.output),
                    )
                    for _ in range(shape.turns)
                )
            )
        )
    return made


def _tokens(rng: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.randrange(vocab_size) for _ in range(count))
