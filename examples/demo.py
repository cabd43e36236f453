"""The whole system on real input: a text, a picture and a clip through REST, streamed.

Starts `m3stack up` on the built-in tiny model, talks to it with the official `openai` client and
prints every answer with its token usage, time to first token and tokens per second. The tiny
model has random weights: its answers are noise, the path they take is the real one.

    python examples/demo.py            exits 0 if every answer came
"""

from __future__ import annotations

import base64
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import ffmpeg
import httpx
import openai

READY_TIMEOUT_S = 120.0


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


def make_picture(path: Path) -> None:
    """A 640x480 JPEG test card, drawn by FFmpeg."""
    card = ffmpeg.input("testsrc2=size=640x480:rate=1:duration=1", f="lavfi")
    card.output(str(path), vframes=1).run(quiet=True, overwrite_output=True)


def make_clip(path: Path) -> None:
    """Five seconds of 320x240 H.264 at 24 frames a second, drawn by FFmpeg."""
    card = ffmpeg.input("testsrc2=size=320x240:rate=24:duration=5", f="lavfi")
    card.output(str(path), vcodec="libx264", pix_fmt="yuv420p").run(
        quiet=True, overwrite_output=True
    )


def data_url(path: Path, mime: str) -> str:
    """The file as a data URL."""
    return f"data:{mime};base64,{base64.b64encode(path.read_bytes()).decode()}"


def ask(client: openai.OpenAI, content: object) -> Answer:
    """Sends one user message and prints the reply as it arrives."""
    began = time.monotonic()
    first: float | None = None
    text, usage = "", None
    stream = client.chat.completions.create(
        model="m3-tiny",
        messages=[{"role": "user", "content": content}],  # type: ignore[typeddict-item]
        max_tokens=64,
        temperature=1.0,
        seed=7,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"thinking": {"type": "disabled"}, "ignore_eos": True},
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            piece = choice.delta.content or ""
            if piece and first is None:
                first = time.monotonic()
            text += piece
            print(piece, end="", flush=True)
    print()
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


def converse(url: str, folder: Path) -> None:
    """The three questions."""
    picture, clip = folder / "card.jpg", folder / "card.mp4"
    make_picture(picture)
    make_clip(clip)
    image_part = {"type": "image_url", "image_url": {"url": data_url(picture, "image/jpeg")}}
    video_part = {"type": "video_url", "video_url": {"url": data_url(clip, "video/mp4")}}
    questions = [
        ("text", "Tell me about sparse attention."),
        ("picture", [image_part, {"type": "text", "text": "What is on this card?"}]),
        ("clip", [video_part, {"type": "text", "text": "What moves in this clip?"}]),
    ]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for name, content in questions:
            print(f"\n--- {name} ---")
            answer = ask(client, content)
            print(
                f"[{answer.prompt_tokens} prompt + {answer.completion_tokens} completion tokens, "
                f"first token after {1000 * answer.first_token_s:.0f} ms, "
                f"{answer.tokens_per_second():.0f} tokens/s]"
            )


def main() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "m3stack", "up", "--port", str(port)]
    server = subprocess.Popen([*command, "--served-model-name", "m3-tiny"])
    try:
        wait_until_ready(server, url)
        with tempfile.TemporaryDirectory() as folder:
            converse(url, Path(folder))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    if server.returncode != 0:
        print(f"the server stopped with exit code {server.returncode}", file=sys.stderr)
        return 1
    print("\ndemo done: text, picture and clip answered")
    return 0


if __name__ == "__main__":
    sys.exit(main())
