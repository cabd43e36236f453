"""The whole system on real input: questions about a text, a picture and a clip through REST.

Starts `m3stack up` on the built-in tiny model, asks it with the official `openai` client and
prints every answer as it streams, whether it is true, and its token usage, time to first token
and tokens per second.

    python examples/demo.py            exits 0 if every answer came and is true
"""

from __future__ import annotations

import io
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import httpx
import openai
from PIL import Image

from m3stack.eval.media_files import data_url, mp4
from m3stack.local_ports import free_port
from m3stack.train import pictures

READY_TIMEOUT_S = 120.0


PASSAGE = "Anna lives in Oslo. Ben has a red cup. Tom works in the library."


@dataclass(frozen=True)
class Answer:
    """One streamed reply and its figures."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    first_token_s: float
    total_s: float

    def tokens_per_second(self) -> float:
        """Rate after the first token."""
        return (self.completion_tokens - 1) / max(self.total_s - self.first_token_s, 1e-9)


def make_picture() -> bytes:
    """A JPEG of a blue star at the top right of a grey ground."""
    star = pictures.Figure("star", "blue", (0, 2))
    drawn = pictures.draw_figures([star], random.Random(5))
    file = io.BytesIO()
    Image.fromarray(drawn.frames[0]).save(file, "JPEG", quality=95)
    return file.getvalue()


def make_clip() -> bytes:
    """Eight seconds of H.264: a red circle that moves to the left."""
    return mp4(pictures.draw_motion("left", "circle", "red", random.Random(5)).frames)


def ask(client: openai.OpenAI, content: object) -> Answer:
    """Sends one user message and prints the reply as it arrives."""
    began = time.monotonic()
    first: float | None = None
    text, usage = "", None
    stream = client.chat.completions.create(
        model="m3-tiny",
        messages=[{"role": "user", "content": content}],  # type: ignore[typeddict-item]
        max_tokens=64,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"thinking": {"type": "disabled"}},
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            piece = choice.delta.content or ""
            if piece and first is None:
                first = time.monotonic()
            text += piece
            print(piece, end="", flush=True)
    if usage is None or first is None:
        raise RuntimeError("the stream ended without text or without usage")
    return Answer(
        text, usage.prompt_tokens, usage.completion_tokens, first - began, time.monotonic() - began
    )


def wait_until_ready(server: subprocess.Popen[bytes], url: str) -> None:
    """Returns when the gateway sees a ready worker."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"`m3stack up` ended with exit code {server.returncode}")
        try:
            if httpx.get(f"{url}/ready", timeout=1.0).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"not ready after {READY_TIMEOUT_S:.0f} s")


def converse(url: str) -> bool:
    """The questions; gives whether every answer is true."""
    image = {"type": "image_url", "image_url": {"url": data_url(make_picture(), "image/jpeg")}}
    video = {"type": "video_url", "video_url": {"url": data_url(make_clip(), "video/mp4")}}
    star, circle = "a blue star at the top right", "a red circle moves to the left"
    questions = [
        ("text", PASSAGE, None, "Where does Anna live?", "Anna lives in Oslo."),
        ("picture", star, image, "What colour is the star?", "The star is blue."),
        ("picture", star, image, "What shape is blue?", "The blue shape is a star."),
        ("clip", circle, video, "Which way does the circle move?", "The circle moves left."),
    ]
    are_true = True
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for kind, shown, part, question, expected in questions:
            print(f"\n{kind}: {shown}\n  {question}  ", end="", flush=True)
            content: object = f"{shown}\n{question}"
            if part is not None:
                content = [part, {"type": "text", "text": question}]
            answer = ask(client, content)
            is_true = answer.text.strip() == expected
            are_true = are_true and is_true
            print(
                f"  ({'true' if is_true else f'not true: {expected}'})\n"
                f"  [{answer.prompt_tokens} prompt + {answer.completion_tokens} completion tokens, "
                f"first token after {1000 * answer.first_token_s:.0f} ms, "
                f"{answer.tokens_per_second():.0f} tokens/s]"
            )
    return are_true


def main() -> int:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "m3stack", "up", "--port", str(port)]
    server = subprocess.Popen([*command, "--served-model-name", "m3-tiny"])
    try:
        wait_until_ready(server, url)
        are_true = converse(url)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    if server.returncode != 0:
        print(f"the server stopped with exit code {server.returncode}", file=sys.stderr)
        return 1
    if not are_true:
        print("an answer is not true", file=sys.stderr)
        return 1
    print("\ndemo done: text, picture and clip answered, and every answer is true")
    return 0


if __name__ == "__main__":
    sys.exit(main())
