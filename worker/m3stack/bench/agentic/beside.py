"""What a long prompt does to requests that decode beside it, and they to it.

Pages hold random numbers from the start, so that a prompt can begin where nearly a million tokens
stand before it: those are passed over, as if the prefix cache had them.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from m3stack.bench.agentic.replay import Crowd, quantile
from m3stack.bench.agentic.worker import Running, Sizes, running_engine
from m3stack.models.minimax_m3.model import M3Model


@dataclass(frozen=True, slots=True)
class BesideShape:
    """Sizes of the measurement, in tokens.

    Attributes:
        decoding: requests that decode.
        decoding_context: each of them, at the start.
        befores: tokens in front of each stretch of the prompt that is computed and timed.
        stretch: tokens of a stretch.
        slowdown: as in `Sizes`.
        max_batch_tokens, max_mixed_tokens: of a step, and of one beside decode.
        idle_tokens: of each request, for the time between tokens without a prompt.
    """

    decoding: int = 64
    decoding_context: int = 4096
    befores: tuple[int, ...] = (0, 491_520, 983_040)
    stretch: int = 32_640
    slowdown: float = 1.8
    max_mixed_tokens: int = 2048
    max_batch_tokens: int = 8192
    idle_tokens: int = 120


@dataclass(frozen=True, slots=True)
class BesideRow:
    """One stretch of the prompt.

    Attributes:
        solo_tokens_per_s, beside_tokens_per_s: of the stretch, alone and beside decode.
        idle_p99_ms, beside_p50_ms, beside_p99_ms: between tokens of the requests that decode.
    """

    before: int
    stretch: int
    decoding: int
    slowdown: float
    max_mixed_tokens: int
    solo_tokens_per_s: float
    beside_tokens_per_s: float
    idle_p50_ms: float
    idle_p99_ms: float
    beside_p50_ms: float
    beside_p99_ms: float


def measure(model: M3Model, shape: BesideShape) -> list[BesideRow]:
    """A row for each place of the prompt."""
    page = model.config.block_tokens
    longest = max(shape.befores) + shape.stretch
    decoded = shape.decoding_context + 4096
    num_pages = shape.decoding * -(-decoded // page) + -(-longest // page)
    # every stretch is computed twice, behind the same beginning
    num_pages += 2 * len(shape.befores) * (-(-shape.stretch // page) + 2)
    sizes = Sizes(
        num_pages=num_pages,
        max_batch_tokens=max(shape.max_batch_tokens, shape.decoding + 2),
        max_mixed_tokens=max(shape.max_mixed_tokens, shape.decoding + 2),
        max_sequences=shape.decoding + 1,
        slowdown=shape.slowdown,
        filled=True,
    )
    with running_engine(model, sizes) as running:
        return _rows(running, shape, model.config.vocab_size - 64)


def _rows(running: Running, shape: BesideShape, vocab_size: int) -> list[BesideRow]:
    crowd = Crowd(running.engine, running.mailbox)
    rng = random.Random("beside")

    def draw(count: int) -> tuple[int, ...]:
        return tuple(rng.choices(range(vocab_size), k=count))

    passing = running.passing
    assert passing is not None
    beginning = draw(max(shape.befores) + 128)
    prompts = [draw(shape.decoding_context) for _ in range(shape.decoding)]
    passing.is_on = True
    crowd.wait_ended(crowd.submit(beginning, 1))
    crowd.wait_ended(*(crowd.submit(prompt, 1) for prompt in prompts))
    passing.is_on = False
    # what is compiled at first use
    crowd.wait_ended(crowd.submit(draw(2 * shape.max_batch_tokens), 1))
    solo = [_prefill(crowd, beginning[:before], draw(shape.stretch)) for before in shape.befores]
    decoding = [crowd.submit((*prompt, 1), 1 << 20) for prompt in prompts]
    # enough for recordings to be made
    crowd.wait_tokens(decoding, 24)
    crowd.wait_ended(crowd.submit(draw(shape.stretch // 8), 1))
    began_at = time.perf_counter()
    have = min(len(crowd.times[handle]) for handle in decoding)
    crowd.wait_tokens(decoding, have + shape.idle_tokens)
    idle = crowd.gaps(decoding, began_at, time.perf_counter())
    rows: list[BesideRow] = []
    for before, alone in zip(shape.befores, solo, strict=True):
        began_at = time.perf_counter()
        beside = _prefill(crowd, beginning[:before], draw(shape.stretch))
        gaps = crowd.gaps(decoding, began_at, time.perf_counter())
        rows.append(_row(shape, before, (alone, beside), idle, gaps))
        have = min(len(crowd.times[handle]) for handle in decoding)
        crowd.wait_tokens(decoding, have + 20)
    crowd.cancel(*decoding)
    return rows


def _prefill(crowd: Crowd, before: Sequence[int], stretch: Sequence[int]) -> float:
    """Tokens a second of a stretch, until the first token behind it."""
    began_at = time.perf_counter()
    handle = crowd.submit((*before, *stretch), 1)
    submitted_at = time.perf_counter()
    crowd.wait_ended(handle)
    # what the client's own work on a long prompt takes is not the engine's
    assert submitted_at - began_at < 60
    return len(stretch) / (crowd.times[handle][0] - submitted_at)


def _row(
    shape: BesideShape,
    before: int,
    rates: tuple[float, float],
    idle: Sequence[float],
    gaps: Sequence[float],
) -> BesideRow:
    return BesideRow(
        before=before,
        stretch=shape.stretch,
        decoding=shape.decoding,
        slowdown=shape.slowdown,
        max_mixed_tokens=shape.max_mixed_tokens,
        solo_tokens_per_s=rates[0],
        beside_tokens_per_s=rates[1],
        idle_p50_ms=statistics.median(idle) * 1e3,
        idle_p99_ms=quantile(idle, 0.99) * 1e3,
        beside_p50_ms=statistics.median(gaps) * 1e3,
        beside_p99_ms=quantile(gaps, 0.99) * 1e3,
    )
