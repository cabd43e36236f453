"""What is compiled before time is taken, and how many kernels still were while it was.

Time in which Triton compiles is the compiler's, not an arm's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

from m3stack.first_steps import PROMPT_TOKENS, StepSize

# the largest step beside decode, alone, and of a long prompt alone
MOST_MIXED_TOKENS, MOST_TOKENS, MOST_GROWN_TOKENS = 2048, 8192, 16_384
LONG_PROMPT_TOKENS = 1_048_576
PAGE_TOKENS, ROWS_BESIDE = 128, 300


def conversation_steps(context_tokens: int, *, num_decoding: int) -> list[StepSize]:
    """Steps with prompts of all sizes; those without are recorded while warming up.

    Args:
        context_tokens: of the conversations.
        num_decoding: of them that decode beside prompts, at most.
    """
    return _steps(context_tokens, MOST_TOKENS, num_decoding)


def long_prompt_steps(*, num_decoding: int) -> list[StepSize]:
    """Steps with all sizes of parts of a prompt of a million tokens."""
    return _steps(LONG_PROMPT_TOKENS, MOST_GROWN_TOKENS, num_decoding)


def _steps(context_tokens: int, most: int, num_decoding: int) -> list[StepSize]:
    found: list[StepSize] = []
    for tokens in sorted({min(tokens, most) for tokens in PROMPT_TOKENS}):
        found.append(StepSize((tokens,), context_tokens))
        if tokens <= MOST_MIXED_TOKENS:
            found += [
                StepSize((*(1,) * decoding, tokens), context_tokens)
                for decoding in (2, num_decoding - 1)
            ]
    # rows beside a prompt are divided by how many there are, and tables told apart by their width
    even = context_tokens - context_tokens % (16 * PAGE_TOKENS)
    for context in (even, even - PAGE_TOKENS):
        for power in range((num_decoding - 1).bit_length()):
            found.append(StepSize((*(1,) * (1 << power), ROWS_BESIDE), context))
    return found


@dataclass(slots=True)
class Compiled:
    """Attributes:
    kernels: compiled anew; those found in the compiler's cache do not count.
    """

    kernels: int = 0


@contextmanager
def counted() -> Iterator[Compiled]:
    """Counts in its block, in every thread; without Triton nothing is compiled."""
    count = Compiled()
    if find_spec("triton") is None:
        yield count
        return
    from triton import knobs

    before = knobs.compilation.listener

    def listen(*, cache_hit: bool, **named: object) -> None:
        if not cache_hit:
            count.kernels += 1
        if before is not None:
            before(cache_hit=cache_hit, **named)  # type: ignore[arg-type]

    knobs.compilation.listener = listen  # type: ignore[assignment]
    try:
        yield count
    finally:
        knobs.compilation.listener = before
