"""`m3stack chat`: a terminal conversation with a running gateway, streamed."""

from __future__ import annotations

import argparse
import base64
import json
import mimetypes
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

HELP = "/image PATH, /video PATH attach to the next message; /clear forgets; /quit or Ctrl-D ends"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="m3stack chat",
        description="Talks to a running gateway. Without a message it starts a conversation.",
        epilog=f"in a conversation: {HELP}",
    )
    parser.add_argument("message", nargs="?", help="one message; the answer is printed, then done")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the gateway listens")
    parser.add_argument("--model", default=None, help="model name (default: the first one served)")
    parser.add_argument("--image", action="append", default=[], metavar="PATH_OR_URL")
    parser.add_argument("--video", action="append", default=[], metavar="PATH_OR_URL")
    parser.add_argument("--system", default=None, help="system prompt")
    parser.add_argument("--thinking", choices=("enabled", "disabled", "adaptive"), default=None)
    parser.add_argument("--max-tokens", type=int, default=None)
    parser.add_argument("--temperature", type=float, default=None)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--api-key", default=None, help="sent as bearer token")
    return parser


class ChatError(Exception):
    """The gateway refused or failed; the text says why."""


def main(argv: Sequence[str]) -> int:
    """Runs one message or a conversation.

    Returns:
        0 done, 1 the gateway cannot be reached or refused.
    """
    arguments = build_parser().parse_args(argv)
    console = Console(highlight=False)
    headers = {"authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
    with httpx.Client(base_url=arguments.url, timeout=None, headers=headers) as client:
        try:
            conversation = Conversation(client, arguments, console)
            if arguments.message is not None:
                conversation.say(arguments.message, arguments.image, arguments.video)
                return 0
            return converse(conversation, arguments)
        except ChatError as error:
            print(f"m3stack chat: {error}", file=sys.stderr)
            return 1


def converse(conversation: Conversation, arguments: argparse.Namespace) -> int:
    """Reads messages until the end of input; an error ends one message, not the conversation."""
    console = conversation.console
    console.print(f"[dim]{conversation.model} at {arguments.url} · {HELP}[/dim]")
    images, videos = list(arguments.image), list(arguments.video)
    while True:
        try:
            line = console.input("[bold green]you>[/bold green] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return 0
        command, _, rest = line.partition(" ")
        if command in ("/quit", "/exit"):
            return 0
        if command == "/clear":
            conversation.forget()
            images, videos = [], []
        elif command in ("/image", "/video"):
            # read now: a wrong path is told at once and not again with every message
            try:
                (images if command == "/image" else videos).append(as_url(rest.strip()))
            except ChatError as error:
                console.print(f"{error}", style="red", markup=False)
        elif command == "/help":
            console.print(HELP, markup=False)
        elif line:
            try:
                conversation.say(line, images, videos)
                images, videos = [], []
            except ChatError as error:
                console.print(f"{error}", style="red", markup=False)
            except KeyboardInterrupt:
                console.print("\n(stopped)", style="dim", markup=False)


class Conversation:
    """The messages so far, and the way to add one."""

    def __init__(
        self, client: httpx.Client, arguments: argparse.Namespace, console: Console
    ) -> None:
        self.client = client
        self.arguments = arguments
        self.console = console
        self.messages: list[dict[str, Any]] = []
        self.model = arguments.model or self.first_model()
        self.forget()

    def forget(self) -> None:
        """Back to the system prompt alone."""
        system = self.arguments.system
        self.messages = [{"role": "system", "content": system}] if system else []

    def first_model(self) -> str:
        """Name of the first model the gateway serves."""
        try:
            response = self.client.get("/v1/models")
        except httpx.TransportError as error:
            raise ChatError(
                f"no gateway answers at {self.arguments.url} ({error}); start one with `m3stack up`"
            ) from error
        if response.status_code != 200:
            raise ChatError(error_text(response.status_code, response.text))
        return response.json()["data"][0]["id"]

    def say(self, text: str, images: Sequence[str], videos: Sequence[str]) -> None:
        """Sends a message, prints the streamed answer and its figures, remembers both."""
        parts: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": as_url(image)}} for image in images
        ]
        parts += [{"type": "video_url", "video_url": {"url": as_url(video)}} for video in videos]
        content: Any = [*parts, {"type": "text", "text": text}] if parts else text
        self.messages.append({"role": "user", "content": content})
        try:
            answer, reasoning = self.print_answer()
        except BaseException:
            self.messages.pop()
            raise
        reply: dict[str, Any] = {"role": "assistant", "content": answer}
        if reasoning:
            reply["reasoning_content"] = reasoning
        self.messages.append(reply)

    def print_answer(self) -> tuple[str, str]:
        """Streams one reply to the console; (content, reasoning)."""
        began = time.monotonic()
        first: float | None = None
        content, reasoning, usage = "", "", None
        for chunk in self.stream():
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices", []):
                delta = choice.get("delta", {})
                thought, said = delta.get("reasoning_content") or "", delta.get("content") or ""
                if (thought or said) and first is None:
                    first = time.monotonic()
                reasoning += thought
                content += said
                self.console.out(thought, end="", style="dim italic")
                self.console.out(said, end="")
        self.console.print()
        self.print_figures(began, first, usage)
        return content, reasoning

    def print_figures(
        self, began: float, first: float | None, usage: dict[str, Any] | None
    ) -> None:
        """One dim line: tokens, time to the first, rate."""
        if usage is None:
            return
        now = time.monotonic()
        parts = [f"{usage['prompt_tokens']} + {usage['completion_tokens']} tokens"]
        if first is not None:
            parts.append(f"first after {1000 * (first - began):.0f} ms")
            if usage["completion_tokens"] > 1 and now > first:
                parts.append(f"{(usage['completion_tokens'] - 1) / (now - first):.0f} tokens/s")
        self.console.print(" · ".join(parts), style="dim", markup=False)

    def stream(self) -> Iterator[dict[str, Any]]:
        """Chunks of one streamed reply, ended by the done mark."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for name in ("max_tokens", "temperature", "seed"):
            if getattr(self.arguments, name) is not None:
                body[name] = getattr(self.arguments, name)
        if self.arguments.thinking:
            body["thinking"] = {"type": self.arguments.thinking}
        try:
            with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise ChatError(error_text(response.status_code, response.read().decode()))
                yield from events(response)
        except httpx.TransportError as error:
            raise ChatError(f"the connection to {self.arguments.url} broke: {error}") from error


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Decodes server-sent events; a stream without its done mark is an error."""
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise ChatError(chunk["error"]["message"])
        yield chunk
    raise ChatError("the answer broke off")


def as_url(path_or_url: str) -> str:
    """A URL as it is; a file as a data URL.

    Raises:
        ChatError: there is no such file.
    """
    if path_or_url.startswith(("http://", "https://", "data:")):
        return path_or_url
    path = Path(path_or_url).expanduser()
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ChatError(f"cannot read {path}: {error.strerror}") from error
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def error_text(status: int, body: str) -> str:
    """The message inside an API error, or the raw body."""
    try:
        return f"{json.loads(body)['error']['message']} (HTTP {status})"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}: {body[:300]}"
