"""What a long prompt does to requests that decode beside it, and they to it.

The prompt is computed in stretches at several places, each twice: alone, and beside requests that
wait for their next token. What stands before a stretch is passed over, as if the prefix cache had
it: pages hold random numbers from the start.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from m3stack.bench.agentic.compiled import counted
from m3stack.bench.agentic.replay import Crowd, quantile
from m3stack.bench.agentic.step_profile import TimedOperations, profiled
from m3stack.bench.agentic.step_times import summary
from m3stack.bench.agentic.worker import Running, Sizes, Step, running_engine
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
    befores: tuple[int, ...] = (0, 458_752, 917_504)
    stretch: int = 131_072
    slowdown: float = 0.0
    max_mixed_tokens: int = 2048
    max_batch_tokens: int = 8192
    idle_tokens: int = 200


@dataclass(frozen=True, slots=True)
class BesideRow:
    """A stretch of the prompt; the first row is all of them together.

    Attributes:
        before: tokens in front of it; -1 for all.
        solo_tokens_per_s, beside_tokens_per_s: of the stretch, alone and beside decode.
        idle_p50_ms, idle_p99_ms: between tokens of the requests that decode, before the prompt.
        beside_p50_ms, beside_p99_ms, beside_max_ms: the same beside it.
        gaps: those of `beside`, of one request.
        compiled: kernels that were compiled meanwhile; 0, or the times are not those of steps.
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
    beside_max_ms: float
    gaps: int
    compiled: int


@dataclass(slots=True)
class Found:
    """What was measured.

    Attributes:
        rows: all stretches together, then each.
        steps: those that had prompts.
        times: means of steps beside the prompt, by kind, as `step_times.summary` gives them.
        profile: of one more stretch, as `step_profile.profiled` gives it; empty if not asked for.
    """

    rows: list[BesideRow]
    steps: list[Step]
    times: dict[str, dict[str, float]]
    profile: dict[str, Any]


def measure(model: M3Model, shape: BesideShape, operations: TimedOperations | None = None) -> Found:
    """Both sides of every stretch.

    Args:
        operations: of the model; with them one more stretch is profiled.
    """
    page = model.config.block_tokens
    longest = max(shape.befores) + shape.stretch
    decoded = shape.decoding_context + 4096
    num_pages = shape.decoding * -(-decoded // page) + -(-longest // page)
    # every stretch is computed twice behind the same beginning, one thrice; a shorter prompt before
    num_pages += (2 * len(shape.befores) + 1) * (-(-shape.stretch // page) + 2)
    num_pages += 4 * -(-shape.max_batch_tokens // page)
    sizes = Sizes(
        num_pages=num_pages,
        max_batch_tokens=max(shape.max_batch_tokens, shape.decoding + 2),
        max_mixed_tokens=max(shape.max_mixed_tokens, shape.decoding + 2),
        max_sequences=shape.decoding + 1,
        slowdown=shape.slowdown,
        filled=True,
    )
    with running_engine(model, sizes) as running:
        return _found(running, shape, model.config.vocab_size - 64, operations)


def _found(
    running: Running, shape: BesideShape, vocab_size: int, operations: TimedOperations | None
) -> Found:
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
    # what is loaded at first use
    crowd.wait_ended(crowd.submit(draw(2 * shape.max_batch_tokens), 1))
    with counted() as compiled:
        alone = [
            _prefill(running, crowd, beginning[:before], draw(shape.stretch))[0]
            for before in shape.befores
        ]
        decoding = [crowd.submit((*prompt, 1), 1 << 20) for prompt in prompts]
        # enough for recordings to be made
        crowd.wait_tokens(decoding, 24)
        crowd.wait_ended(crowd.submit(draw(shape.max_batch_tokens), 1))
        began_at = time.perf_counter()
        have = min(len(crowd.times[handle]) for handle in decoding)
        crowd.wait_tokens(decoding, have + shape.idle_tokens)
        idle = crowd.gaps(decoding, began_at, time.perf_counter())
        first = len(running.times)
        beside: list[float] = []
        gaps: list[list[float]] = []
        for before in shape.befores:
            seconds, since = _prefill(running, crowd, beginning[:before], draw(shape.stretch))
            beside.append(seconds)
            gaps.append(crowd.gaps(decoding, since, time.perf_counter()))
            have = min(len(crowd.times[handle]) for handle in decoding)
            crowd.wait_tokens(decoding, have + 20)
    times = summary([step for step in running.times[first:] if step.collected_at])
    profile: dict[str, Any] = {}
    if operations is not None:
        with profiled(running, operations) as profile:
            before = shape.befores[len(shape.befores) // 2]
            _prefill(running, crowd, beginning[:before], draw(shape.stretch))
    crowd.cancel(*decoding)
    together = (-1, sum(alone), sum(beside), [gap for each in gaps for gap in each])
    rows: list[BesideRow] = []
    for before, solo_s, beside_s, found in (
        together,
        *zip(shape.befores, alone, beside, gaps, strict=True),
    ):
        tokens = shape.stretch * (len(shape.befores) if before < 0 else 1)
        rows.append(
            BesideRow(
                before=before,
                stretch=tokens,
                decoding=shape.decoding,
                slowdown=shape.slowdown,
                max_mixed_tokens=shape.max_mixed_tokens,
                solo_tokens_per_s=tokens / solo_s,
                beside_tokens_per_s=tokens / beside_s,
                idle_p50_ms=statistics.median(idle) * 1e3,
                idle_p99_ms=quantile(idle, 0.99) * 1e3,
                beside_p50_ms=statistics.median(found) * 1e3,
                beside_p99_ms=quantile(found, 0.99) * 1e3,
                beside_max_ms=max(found) * 1e3,
                gaps=len(found) // shape.decoding,
                compiled=compiled.kernels,
            )
        )
    steps = [step for step in running.steps if step.prompt_tokens]
    return Found(rows, steps, times, profile)


def _prefill(
    running: Running, crowd: Crowd, before: Sequence[int], stretch: Sequence[int]
) -> tuple[float, float]:
    """Seconds of the steps that compute a stretch, and when it was asked for."""
    asked_at = time.perf_counter()
    first = len(running.steps)
    crowd.wait_ended(crowd.submit((*before, *stretch), 1))
    steps = [step for step in running.steps[first:] if step.prompt_tokens]
    # finding what is cached of a million tokens is not the steps' time; it shows between tokens
    return steps[-1].ended_at - steps[0].ended_at + steps[0].seconds, asked_at
