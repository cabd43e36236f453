"""Mixed traffic against the gateways, and a verdict on how each request ended."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
import struct
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import httpx

LEAST_RATE = 1.0
CONNECT_TIMEOUT_S = 1.0
# longest that a client waits for the next byte
SILENCE_S = 60.0
# how a load balancer looks for gateways that live
CHECK_INTERVAL_S = 0.5
CHECK_TIMEOUT_S = 1.0


class End(StrEnum):
    """How a request ended, as its client saw it."""

    ANSWERED = "answered"
    # an HTTP status with an error body
    REFUSED = "refused"
    # a stream that said what went wrong, as its last word
    ERROR_EVENT = "error_event"
    # the connection broke, visibly
    BROKEN = "broken"
    # the client left on purpose
    LEFT = "left"
    # the bytes ended in good order without a last word
    CUT_SILENTLY = "cut_silently"
    # a last word, and then more
    TWICE = "twice"
    # nothing came for far too long
    SILENT = "silent"


ONCE = {End.ANSWERED, End.REFUSED, End.ERROR_EVENT, End.BROKEN, End.LEFT}


@dataclass(frozen=True, slots=True)
class Kind:
    """A sort of request.

    Attributes:
        path: of the API.
        leaves_after: chunks after which the client leaves; 0 stays to the end.
        weight: how often, against the other kinds.
    """

    name: str
    path: str
    is_stream: bool
    max_tokens: int
    weight: int
    has_picture: bool = False
    leaves_after: int = 0


CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
KINDS = (
    Kind("chat stream", CHAT, True, 12, 6),
    Kind("chat whole", CHAT, False, 12, 3),
    Kind("messages stream", MESSAGES, True, 12, 3),
    Kind("picture", CHAT, True, 8, 2, has_picture=True),
    Kind("long stream", CHAT, True, 160, 2),
    Kind("client leaves", CHAT, True, 160, 1, leaves_after=3),
)
# prompts share beginnings, as conversations do
PROMPTS = tuple(
    f"{'You are asked about the sea and its weather. ' * 6}Question {number}: what is next?"
    for number in range(8)
)


@dataclass(slots=True)
class Outcome:
    """One request, from its first byte sent.

    Attributes:
        started_s: on the monotonic clock.
        first_s: until the first content, or the whole reply; None if none came.
        text: of the answer, as far as it came.
    """

    kind: Kind
    prompt: int
    started_s: float
    end: End = End.SILENT
    first_s: float | None = None
    took_s: float = 0.0
    text: str = ""
    detail: str = ""


@dataclass
class Balancer:
    """Knows which gateways are ready, as a load balancer in front of them would."""

    urls: Sequence[str]
    client: httpx.AsyncClient
    alive: set[str] = field(default_factory=set)

    async def watch(self) -> None:
        while True:
            await asyncio.gather(*(self._check(url) for url in self.urls))
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def _check(self, url: str) -> None:
        is_ready = False
        with contextlib.suppress(httpx.TransportError):
            reply = await self.client.get(f"{url}/ready", timeout=CHECK_TIMEOUT_S)
            is_ready = reply.status_code == 200
        (self.alive.add if is_ready else self.alive.discard)(url)

    def order(self, source: random.Random) -> list[str]:
        """Ready gateways in random order, then the others."""
        shuffled = source.sample(list(self.urls), len(self.urls))
        return sorted(shuffled, key=lambda url: url not in self.alive)


class Load:
    """Clients that come by chance at a steady rate, whether those before them were served or not.

    Attributes:
        rate: requests a second.
    """

    def __init__(
        self, urls: Sequence[str], *, model: str, seed: int, rate: float = LEAST_RATE
    ) -> None:
        self._model = model
        self._source = random.Random(seed)
        self._urls = urls
        self._over = asyncio.Event()
        self.rate = rate
        self.outcomes: list[Outcome] = []

    async def run(self) -> None:
        """Until `stop`; every request that was begun is seen to its end."""
        async with _client() as client:
            balancer = Balancer(self._urls, client, set(self._urls))
            watching = asyncio.create_task(balancer.watch())
            try:
                async with asyncio.TaskGroup() as clients:
                    due_s = time.monotonic()
                    while not self._over.is_set():
                        due_s += self._source.expovariate(self.rate)
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(max(0.0, due_s - time.monotonic())):
                                await self._over.wait()
                        (kind,) = self._source.choices(KINDS, weights=[k.weight for k in KINDS])
                        prompt = self._source.randrange(len(PROMPTS))
                        order = balancer.order(self._source)
                        clients.create_task(self._serve(client, order, kind, prompt))
            finally:
                watching.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watching

    def stop(self) -> None:
        self._over.set()

    async def once(self, kind: Kind, prompt: int) -> Outcome:
        """One request, which is not counted among the load's."""
        outcome = Outcome(kind, prompt, time.monotonic())
        async with _client() as client:
            await self.ask(client, list(self._urls), outcome)
        return outcome

    async def _serve(
        self, client: httpx.AsyncClient, urls: list[str], kind: Kind, prompt: int
    ) -> None:
        outcome = Outcome(kind, prompt, time.monotonic())
        try:
            await self.ask(client, urls, outcome)
        finally:
            outcome.took_s = time.monotonic() - outcome.started_s
            self.outcomes.append(outcome)

    async def ask(self, client: httpx.AsyncClient, urls: list[str], outcome: Outcome) -> None:
        """Sends a request to the first gateway that takes the connection."""
        for url in urls:
            try:
                await self._send(client, url, outcome)
            except httpx.ConnectError as error:
                outcome.end, outcome.detail = End.BROKEN, repr(error)
                continue
            except httpx.ConnectTimeout as error:
                outcome.end, outcome.detail = End.BROKEN, repr(error)
                continue
            except httpx.ReadTimeout as error:
                outcome.end, outcome.detail = End.SILENT, repr(error)
            except httpx.TransportError as error:
                outcome.end, outcome.detail = End.BROKEN, repr(error)
            return

    async def _send(self, client: httpx.AsyncClient, url: str, outcome: Outcome) -> None:
        kind = outcome.kind
        body = request_body(self._model, kind, outcome.prompt)
        async with client.stream("POST", url + kind.path, json=body) as reply:
            if reply.status_code != 200:
                text = (await reply.aread()).decode()
                is_said = "error" in json.loads(text)
                outcome.end = End.REFUSED if is_said else End.CUT_SILENTLY
                outcome.detail = f"{reply.status_code} {text[:300]}"
            elif kind.is_stream:
                await self._read(reply, outcome)
            else:
                message = json.loads(await reply.aread())["choices"][0]["message"]
                outcome.first_s = time.monotonic() - outcome.started_s
                outcome.text = (message.get("reasoning_content") or "") + (message["content"] or "")
                outcome.end = End.ANSWERED

    async def _read(self, reply: httpx.Response, outcome: Outcome) -> None:
        """Reads a stream to the end of its bytes; sets the end it deserves."""
        ends: list[End] = []
        chunks = 0
        async for event in events(reply):
            if ends:
                ends.append(End.TWICE)
                continue
            content, end = understood(event)
            if content and outcome.first_s is None:
                outcome.first_s = time.monotonic() - outcome.started_s
            outcome.text += content
            chunks += bool(content)
            if end is not None:
                ends.append(end)
                outcome.detail = "" if end is End.ANSWERED else json.dumps(event)[:300]
            if outcome.kind.leaves_after and chunks >= outcome.kind.leaves_after:
                outcome.end = End.LEFT
                return
        outcome.end = ends[0] if len(ends) == 1 else End.TWICE if ends else End.CUT_SILENTLY


def _client() -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    timeout = httpx.Timeout(SILENCE_S, connect=CONNECT_TIMEOUT_S)
    return httpx.AsyncClient(limits=limits, timeout=timeout)


def request_body(model: str, kind: Kind, prompt: int) -> dict[str, Any]:
    """What is sent; equal kinds and prompts must be answered equally."""
    content: Any = PROMPTS[prompt]
    if kind.has_picture:
        url = f"data:image/png;base64,{picture(prompt)}"
        content = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": content},
        ]
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": kind.max_tokens,
        "stream": kind.is_stream,
        "temperature": 0,
    }
    if kind.path == CHAT:
        body["ignore_eos"] = True
    return body


def picture(number: int) -> str:
    """A small picture of one colour, as base64 of a PNG."""
    colour = bytes((number * 29 % 256, 255 - number * 31 % 256, 90))
    rows = b"".join(b"\0" + colour * 56 for _ in range(56))

    def chunk(name: bytes, data: bytes) -> bytes:
        body = name + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", 56, 56, 8, 2, 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode()


async def events(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Events of either protocol; OpenAI's last word becomes `{"done": true}`."""
    async for line in reply.aiter_lines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:"):
            yield {"done": True} if data == "[DONE]" else json.loads(data)


def understood(event: dict[str, Any]) -> tuple[str, End | None]:
    """The text an event carries, and the end it means, if it means one."""
    if "error" in event:
        return "", End.ERROR_EVENT
    if "done" in event or event.get("type") == "message_stop":
        return "", End.ANSWERED
    if event.get("type") == "content_block_delta":
        delta = event["delta"]
        return delta.get("text") or delta.get("thinking") or "", None
    for choice in event.get("choices", []):
        delta = choice["delta"]
        return (delta.get("reasoning_content") or "") + (delta.get("content") or ""), None
    return "", None
