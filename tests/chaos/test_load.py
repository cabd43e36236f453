"""The judge of the chaos runs tells an honest end from a cut, and a repeated token from none."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import AsyncIterator

import httpx
import pytest
from PIL import Image

from tests.chaos import load as chaos
from tests.chaos.load import KINDS, End, Load, Outcome
from tests.chaos.verdict import agrees

CHAT = KINDS[0]


def chunk(text: str) -> str:
    return "data: " + json.dumps({"choices": [{"delta": {"content": text}}]}) + "\n\n"


ERROR = 'data: {"error": {"message": "gone"}}\n\n'
DONE = "data: [DONE]\n\n"


async def judged(status: int, body: str) -> Outcome:
    """How a client that is sent these bytes judges them."""

    async def pieces() -> AsyncIterator[bytes]:
        for line in body.splitlines(keepends=True):
            yield line.encode()

    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(status, content=pieces())

    outcome = Outcome(CHAT, 0, time.monotonic())
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        load = Load(["http://gateway"], model="m", seed=0)
        await load.ask(client, ["http://gateway"], outcome)
    return outcome


@pytest.mark.parametrize(
    ("status", "body", "end"),
    [
        (200, chunk("a") + chunk("b") + DONE, End.ANSWERED),
        (200, chunk("a") + ERROR, End.ERROR_EVENT),
        (200, chunk("a"), End.CUT_SILENTLY),
        (200, "", End.CUT_SILENTLY),
        (200, chunk("a") + DONE + DONE, End.TWICE),
        (200, chunk("a") + ERROR + DONE, End.TWICE),
        (200, chunk("a") + DONE + chunk("b"), End.TWICE),
        (503, '{"error": {"message": "no worker"}}', End.REFUSED),
        (503, "{}", End.CUT_SILENTLY),
    ],
)
def test_an_end_is_called_by_its_name(status: int, body: str, end: End) -> None:
    assert asyncio.run(judged(status, body)).end is end


@pytest.mark.parametrize(
    ("end", "text", "is_true"),
    [
        (End.ANSWERED, "abc", True),
        (End.ANSWERED, "ab", False),
        (End.ANSWERED, "abbc", False),
        (End.ERROR_EVENT, "ab", True),
        (End.ERROR_EVENT, "", True),
        (End.BROKEN, "aab", False),
    ],
)
def test_a_text_must_be_the_true_one_or_its_beginning(end: End, text: str, is_true: bool) -> None:
    outcome = Outcome(CHAT, 0, 0.0, end=end, text=text)
    assert agrees(outcome, {(CHAT.name, 0): "abc"}) is is_true


def test_pictures_of_the_load_are_ones_that_decoders_read() -> None:
    with Image.open(io.BytesIO(base64.b64decode(chaos.picture(3)))) as picture:
        assert picture.size == (56, 56)
        assert len(picture.convert("RGB").getcolors() or []) == 1
