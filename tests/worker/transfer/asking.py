"""Requests to workers that fetch from each other, and what became of them."""

from __future__ import annotations

from m3stack.types import Finished, Purpose, Request, Source, Stage, Tokens
from tests.worker.engine.history_model import (
    IMAGE_ID,
    PATCH_FORMAT,
    VIDEO_ID,
    clip,
    greedy_alone,
    image,
    sampling,
)
from tests.worker.rpc.worker_harness import Worker

PREFILL = Stage(Purpose.PREFILL)


def text(length: int, *, name: str = "r", salt: int = 0, **changes: object) -> Request:
    prompt = tuple((index * 7 + salt * 13) % 59 for index in range(length))
    return Request(name, prompt, sampling(**changes))


def picture(seed: int = 1, *, name: str = "r") -> Request:
    prompt = [5] * 9 + [IMAGE_ID] * 12 + [6] * 7
    return Request(
        name,
        tuple(prompt),
        sampling(),
        PATCH_FORMAT,
        (image(seed, offset=9, num_tokens=12),),
    )


def film(seed: int = 2) -> Request:
    prompt = [5] * 3 + ([VIDEO_ID] * 6 + [6]) * 4 + [8] * 5
    item = clip(seed, offset=3, num_slices=4, tokens_per_slice=6)
    return Request("film", tuple(prompt), sampling(), PATCH_FORMAT, (item,))


def alone(request: Request) -> list[int]:
    patches = {item.media_hash: bytes(item.patches or b"") for item in request.media}
    return greedy_alone(request, patches)


def source_of(subject: Worker) -> Source:
    return Source(subject.target)


async def prefill(subject: Worker, request: Request, stage: Stage = PREFILL) -> Finished:
    """Computes a prompt for others; nothing but its end may be told."""
    events = [event async for event in subject.client.generate(request, stage=stage)]
    assert not any(isinstance(event, Tokens) for event in events)
    end = events[-1]
    assert isinstance(end, Finished)
    return end


async def answer(subject: Worker, request: Request, source: Source) -> tuple[list[int], Finished]:
    stage = Stage(pages=source)
    events = [event async for event in subject.client.generate(request, stage=stage)]
    end = events[-1]
    assert isinstance(end, Finished)
    return [t for e in events if isinstance(e, Tokens) for t in e.token_ids], end


def outcomes(subject: Worker) -> dict[str, float]:
    """Ended transfers by outcome."""
    found: dict[str, float] = {}
    for family in subject.metrics.registry.collect():
        for sample in family.samples:
            if sample.name == "m3stack_worker_transfers_total" and sample.value:
                found[sample.labels["outcome"]] = sample.value
    return found
