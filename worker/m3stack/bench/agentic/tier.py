"""Decoding with keys and values of cold pages in host memory, beside decoding with all resident."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from m3stack.bench.agentic.models import Models, without_dense_layers
from m3stack.bench.agentic.replay import Crowd
from m3stack.bench.agentic.worker import Running, Sizes, running_engine
from m3stack.cache.tiered import TieredPages, with_tier
from m3stack.kernels.interface import Kernels


@dataclass(frozen=True, slots=True)
class TierShape:
    """Sizes of the measurement.

    Attributes:
        requests, context: that decode at once, and tokens of each at the start.
        hot_shares: of all pages, those that are hot, arm by arm.
        settling: tokens of each request before time is taken: until it is settled what is hot.
        tokens: of each request while it is.
    """

    requests: int = 8
    context: int = 65_536
    hot_shares: tuple[float, ...] = (1.0, 0.97)
    settling: int = 300
    tokens: int = 200
    max_batch_tokens: int = 8192


@dataclass(frozen=True, slots=True)
class TierRow:
    """One share of hot pages.

    Attributes:
        hot_share: 0 for the pool without a tier.
        hit_share: of parts of pages that were asked for, those that were there.
        equal_tokens: of the tokens before time is taken, those that are the plain pool's, up to
            the first that differs in each request.
    """

    requests: int
    context: int
    hot_share: float
    hot_pages: int
    hit_share: float
    tokens_per_s: float
    of_resident: float
    equal_tokens: float
    host_bytes: int


def measure(models: Models, shape: TierShape) -> list[TierRow]:
    """The pool that holds all, then a row for each share."""
    page = models.config.block_tokens
    each = -(-(shape.context + shape.settling + shape.tokens + 8) // page) + 1
    num_pages = shape.requests * each
    rows: list[TierRow] = []
    plain: list[list[int]] = []
    for share in (0.0, *shape.hot_shares):
        least = hot_pages_at_least_for(models, shape)
        hot = min(num_pages, max(least, round(share * num_pages))) if share else 0
        change = with_tier if hot else _as_they_are
        sizes = Sizes(
            num_pages=num_pages,
            max_batch_tokens=shape.max_batch_tokens,
            max_mixed_tokens=shape.max_batch_tokens,
            max_sequences=shape.requests,
            hot_pages=hot,
            filled=True,
        )
        model = without_dense_layers(models.with_kernels(change, keeps_mxfp8=True))
        with running_engine(model, sizes) as running:
            rate, hits, tokens = _decode(running, shape, models.config.vocab_size - 64)
            tiers = _tiers(running)
            plain = plain or tokens
            rows.append(
                TierRow(
                    requests=shape.requests,
                    context=shape.context,
                    hot_share=share,
                    hot_pages=hot or num_pages,
                    hit_share=hits,
                    tokens_per_s=rate,
                    of_resident=rate / rows[0].tokens_per_s if rows else 1.0,
                    equal_tokens=_equal(tokens, plain),
                    host_bytes=sum(tier.host_bytes for tier in tiers),
                )
            )
            del tiers
    return rows


def hot_pages_at_least_for(models: Models, shape: TierShape) -> int:
    """Hot pages without which a step of the measurement cannot be computed."""
    config = models.config
    written = shape.max_batch_tokens // config.block_tokens + 2 * shape.requests
    return max(config.num_kv_heads * config.topk_blocks, written)


def _as_they_are(kernels: Kernels) -> Kernels:
    return kernels


def _tiers(running: Running):
    layers = running.pool.layers
    tiers = [layer.tier for layer in layers if isinstance(layer, TieredPages)]
    return [tier for tier in tiers if tier is not None]


def _counts(running: Running) -> tuple[int, int]:
    counts = [tier.counts() for tier in _tiers(running)]
    return sum(asked for asked, _ in counts), sum(fetched for _, fetched in counts)


def _decode(
    running: Running, shape: TierShape, vocab_size: int
) -> tuple[float, float, list[list[int]]]:
    """Tokens a second, the share of hits meanwhile, and the tokens of the time before."""
    crowd = Crowd(running.engine, running.mailbox)
    rng = random.Random("tier")
    passing = running.passing
    assert passing is not None
    prompts = [
        tuple(rng.choices(range(vocab_size), k=shape.context)) for _ in range(shape.requests)
    ]
    passing.is_on = True
    for prompt in prompts:
        crowd.wait_ended(crowd.submit(prompt, 1))
    passing.is_on = False
    count = shape.settling + shape.tokens
    handles = [crowd.submit((*prompt, 1 + number), count) for number, prompt in enumerate(prompts)]
    crowd.wait_tokens(handles, shape.settling)
    asked, fetched = _counts(running)
    began_at = time.perf_counter()
    have = sum(len(crowd.times[handle]) for handle in handles)
    crowd.wait_ended(*handles)
    seconds = time.perf_counter() - began_at
    rate = (shape.requests * count - have) / seconds
    asked_after, fetched_after = _counts(running)
    misses = (fetched_after - fetched) / max(1, asked_after - asked)
    return rate, 1 - misses, [crowd.tokens[handle][: shape.settling] for handle in handles]


def _equal(tokens: list[list[int]], plain: list[list[int]]) -> float:
    same = 0
    for mine, theirs in zip(tokens, plain, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            if one != other:
                break
            same += 1
    return same / max(1, sum(map(len, plain)))
