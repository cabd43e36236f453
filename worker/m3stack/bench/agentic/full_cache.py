"""Throughput where more conversations run than the cache can hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

from m3stack.bench.agentic.replay import Replay
from m3stack.bench.agentic.trace import TraceShape, conversations, shared_prefix
from m3stack.bench.agentic.worker import Sizes, running_engine
from m3stack.models.minimax_m3.model import M3Model


@dataclass(frozen=True, slots=True)
class FullCacheShape:
    """Sizes of the measurement.

    Attributes:
        held: conversations that the cache holds at their longest.
        concurrencies: that are run, the last of them twice what is held.
        host_slots: pages of host memory beside it.
    """

    trace: TraceShape
    held: int = 16
    concurrencies: tuple[int, ...] = (16, 32)
    host_slots: int = 2048
    max_batch_tokens: int = 8192
    max_mixed_tokens: int = 2048
    slowdown: float = 0.0


@dataclass(frozen=True, slots=True)
class FullCacheRow:
    """One concurrency over the same cache."""

    concurrency: int
    held: int
    num_pages: int
    output_tokens_per_s: float
    itl_p99_ms: float
    cached_share: float
    preemptions: int
    of_peak: float


def measure(model: M3Model, shape: FullCacheShape) -> list[FullCacheRow]:
    """A row for each concurrency; the peak is the best of them."""
    page, trace = model.config.block_tokens, shape.trace
    growing = trace.turns * (trace.new[1] + trace.output[1])
    num_pages = -(-trace.shared // page) + shape.held * (-(-growing // page) + 2)
    most = max(shape.concurrencies)
    sizes = Sizes(
        num_pages=num_pages,
        max_batch_tokens=max(shape.max_batch_tokens, 2 * most),
        max_mixed_tokens=max(shape.max_mixed_tokens, 2 * most),
        max_sequences=most,
        slowdown=shape.slowdown,
        host_slots=shape.host_slots,
    )
    rows: list[FullCacheRow] = []
    vocab_size = model.config.vocab_size - 64
    with running_engine(model, sizes) as running:
        replay = Replay(running.engine, running.mailbox, shared_prefix(trace, vocab_size))
        replay.warm(most, (64,))
        before = running.preemptions
        asked = 0
        for concurrency in shape.concurrencies:
            count = 2 * concurrency
            scripts = conversations(trace, count, vocab_size, first=asked)
            asked += count
            got = replay.measure("full", scripts, concurrency)
            rows.append(
                FullCacheRow(
                    concurrency=concurrency,
                    held=shape.held,
                    num_pages=num_pages,
                    output_tokens_per_s=got.output_tokens_per_s,
                    itl_p99_ms=got.itl_p99_ms,
                    cached_share=got.cached_share,
                    preemptions=running.preemptions - before,
                    of_peak=0.0,
                )
            )
            before = running.preemptions
    peak = max(row.output_tokens_per_s for row in rows)
    return [replace(row, of_peak=row.output_tokens_per_s / peak) for row in rows]
