"""The contract that providers of M3 are held to, asked over REST as its public verifier asks it.

Re-expressed from the facts of that verifier, not copied; pictures and clips are generated. Each
test asks a gateway before the tiny model, or before a worker that says what the test needs.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from m3stack.local_ports import free_port
from tests.e2e.conftest import (  # noqa: F401
    MODEL_NAME,
    Server,
    Stack,
    gateway,
    served,
    stack,
    wait_for,
    worker,
)
from tests.e2e.scripted_worker import scripted_worker

OFF = {"type": "disabled"}
MARK = "]<]minimax[>["


@dataclass(frozen=True)
class Api:
    """One gateway, asked for chat completions."""

    server: Server

    def ask(self, content: object = None, **fields: object) -> httpx.Response:
        """One answer of one token, unless the fields say otherwise; `content` is the user's."""
        body: dict[str, object] = {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 1,
            "temperature": 0,
            "thinking": OFF,
        }
        body |= fields
        url = f"{self.server.url}/v1/chat/completions"
        return httpx.post(url, json=body, timeout=100)

    def answer(self, content: object = None, **fields: object) -> dict[str, Any]:
        """The same, which must succeed."""
        response = self.ask(content, **fields)
        assert response.status_code == 200, response.text
        return response.json()

    def prompt_tokens(self, content: object = None, **fields: object) -> int:
        return self.answer(content, **fields)["usage"]["prompt_tokens"]

    def refusal(self, content: object = None, **fields: object) -> dict[str, Any]:
        """The error of a request that must be the caller's mistake."""
        response = self.ask(content, **fields)
        assert response.status_code in (400, 422), response.text
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"]
        return error

    def chunks(self, content: object = None, **fields: object) -> list[dict[str, Any]]:
        """Every chunk of a streamed answer, which must end in `[DONE]`."""
        lines = self.ask(content, stream=True, **fields).text.splitlines()
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        assert "[DONE]" not in events[:-1]
        return [json.loads(event) for event in events[:-1]]


def deltas(chunks: list[dict[str, Any]], key: str) -> list[str]:
    """The texts under one key, in order; empty ones and nulls are left out."""
    found = [choice["delta"].get(key) for chunk in chunks for choice in chunk["choices"]]
    return [text for text in found if text]


def data_url(data: bytes, mime: str) -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def image(url: str, **controls: object) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url, **controls}}


def video(url: str, **controls: object) -> dict[str, object]:
    return {"type": "video_url", "video_url": {"url": url, **controls}}


@pytest.fixture
def api(gateway: Server) -> Api:  # noqa: F811
    """A gateway before the tiny model."""
    return Api(gateway)


@pytest.fixture
def saying(
    gateway: Server,  # noqa: F811
    worker: Server,  # noqa: F811
    stack: Stack,  # noqa: F811
) -> Iterator[Callable[..., Api]]:
    """Gives gateways whose worker says a text, control tokens in it meant."""
    with contextlib.ExitStack() as workers:

        def start(
            text: str,
            *flags: str,
            tokens_per_message: int = 1,
            interval_s: float = 0.0,
        ) -> Api:
            asked = httpx.post(f"{gateway.url}/tokenize", json={"prompt": text}, timeout=60)
            script = scripted_worker(
                worker,
                asked.json()["tokens"],
                tokens_per_message=tokens_per_message,
                interval_s=interval_s,
            )
            url = workers.enter_context(script)
            address = f"127.0.0.1:{free_port()}"
            server = stack.start("gateway", address, "", "--workers", url, *flags)
            wait_for(server, "/ready")
            return Api(server)

        yield start
        for server in stack.servers:
            server.stop()
