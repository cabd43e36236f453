"""What a long prompt does to requests that decode beside it, and they to it.

The prompt is computed whole, twice: alone, and beside requests that wait for their next token.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from m3stack.bench.agentic.compiled import counted
from m3stack.bench.agentic.replay import Crowd, quantile
from m3stack.bench.agentic.worker import Running, Sizes, Step, running_engine
from m3stack.models.minimax_m3.model import M3Model


@dataclass(frozen=True, slots=True)
class BesideShape:
    """Sizes of the measurement, in tokens.

    Attributes:
        decoding: requests that decode.
        decoding_context: each of them, at the start.
        prompt: the long one.
        parts: of the prompt, which are told apart as well.
        slowdown: as in `Sizes`.
        max_batch_tokens, max_mixed_tokens: of a step, and of one beside decode.
        idle_tokens: of each request, for the time between tokens without a prompt.
    """

    decoding: int = 64
    decoding_context: int = 4096
    prompt: int = 1_048_448
    parts: int = 4
    slowdown: float = 1.8
    max_mixed_tokens: int = 2048
    max_batch_tokens: int = 8192
    idle_tokens: int = 300


@dataclass(frozen=True, slots=True)
class BesideRow:
    """The prompt from one token to another; the first row is the whole of it.

    Attributes:
        solo_tokens_per_s, beside_tokens_per_s: of the prompt, alone and beside decode.
        idle_p50_ms, idle_p99_ms: between tokens of the requests that decode, before the prompt.
        beside_p50_ms, beside_p99_ms, beside_max_ms: the same beside it.
        gaps: those of `beside`, of one request.
        compiled: kernels that were compiled meanwhile; 0, or the times are not those of steps.
    """

    first: int
    end: int
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


@dataclass(frozen=True, slots=True)
class _Advance:
    """How far a prompt had come when: seconds, and tokens that were computed by then."""

    times: tuple[float, ...]
    computed: tuple[int, ...]

    def when(self, tokens: int) -> float:
        """The first moment at which so many tokens were known to be computed."""
        places = range(len(self.times))
        return self.times[next(place for place in places if self.computed[place] >= tokens)]


def measure(model: M3Model, shape: BesideShape) -> tuple[list[BesideRow], list[Step]]:
    """The whole prompt, then each part of it; and all steps that had prompts."""
    page = model.config.block_tokens
    decoded = shape.decoding_context + 8192
    num_pages = shape.decoding * -(-decoded // page)
    # computed twice, and a shorter one before it
    num_pages += 2 * (-(-shape.prompt // page) + 2) + 4 * -(-shape.max_batch_tokens // page)
    sizes = Sizes(
        num_pages=num_pages,
        max_batch_tokens=max(shape.max_batch_tokens, shape.decoding + 2),
        max_mixed_tokens=max(shape.max_mixed_tokens, shape.decoding + 2),
        max_sequences=shape.decoding + 1,
        slowdown=shape.slowdown,
        filled=True,
    )
    with running_engine(model, sizes) as running:
        rows = _rows(running, shape, model.config.vocab_size - 64)
        return rows, [step for step in running.steps if step.prompt_tokens]


def _rows(running: Running, shape: BesideShape, vocab_size: int) -> list[BesideRow]:
    crowd = Crowd(running.engine, running.mailbox)
    rng = random.Random("beside")

    def draw(count: int) -> tuple[int, ...]:
        return tuple(rng.choices(range(vocab_size), k=count))

    passing = running.passing
    assert passing is not None
    prompts = [draw(shape.decoding_context) for _ in range(shape.decoding)]
    # what stands before the requests that decode is not computed: its pages hold random numbers
    passing.is_on = True
    crowd.wait_ended(*(crowd.submit(prompt, 1) for prompt in prompts))
    passing.is_on = False
    # what is loaded at first use
    crowd.wait_ended(crowd.submit(draw(2 * shape.max_batch_tokens), 1))
    alone = _prefill(running, crowd, draw(shape.prompt))
    decoding = [crowd.submit((*prompt, 1), 1 << 20) for prompt in prompts]
    # enough for recordings to be made
    crowd.wait_tokens(decoding, 24)
    crowd.wait_ended(crowd.submit(draw(shape.max_batch_tokens), 1))
    began_at = time.perf_counter()
    have = min(len(crowd.times[handle]) for handle in decoding)
    crowd.wait_tokens(decoding, have + shape.idle_tokens)
    idle = crowd.gaps(decoding, began_at, time.perf_counter())
    with counted() as compiled:
        beside = _prefill(running, crowd, draw(shape.prompt))
    places = [shape.prompt * part // shape.parts for part in range(shape.parts + 1)]
    rows: list[BesideRow] = []
    for first, end in ((0, shape.prompt), *pairwise(places)):
        gaps = crowd.gaps(decoding, beside.when(first), beside.when(end))
        rows.append(
            BesideRow(
                first=first,
                end=end,
                decoding=shape.decoding,
                slowdown=shape.slowdown,
                max_mixed_tokens=shape.max_mixed_tokens,
                solo_tokens_per_s=(end - first) / (alone.when(end) - alone.when(first)),
                beside_tokens_per_s=(end - first) / (beside.when(end) - beside.when(first)),
                idle_p50_ms=statistics.median(idle) * 1e3,
                idle_p99_ms=quantile(idle, 0.99) * 1e3,
                beside_p50_ms=statistics.median(gaps) * 1e3,
                beside_p99_ms=quantile(gaps, 0.99) * 1e3,
                beside_max_ms=max(gaps) * 1e3,
                gaps=len(gaps) // shape.decoding,
                compiled=compiled.kernels,
            )
        )
    crowd.cancel(*decoding)
    return rows


def _prefill(running: Running, crowd: Crowd, prompt: Sequence[int]) -> _Advance:
    """Computes a prompt up to the first token behind it."""
    handle = crowd.submit(prompt, 1)
    # what the client's own work on a long prompt takes is not the engine's
    submitted_at = time.perf_counter()
    crowd.wait_ended(handle)
    steps = [step for step in running.steps if step.ended_at > submitted_at and step.prompt_tokens]
    return _Advance(
        (submitted_at, *(step.ended_at for step in steps)),
        (0, *(step.prompt_end for step in steps)),
    )
