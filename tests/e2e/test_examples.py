"""The examples run, and the side doors give what the front door gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx

from m3stack.checkpoints import builtin_checkpoint
from m3stack.client import WorkerClient
from m3stack.prepare import Preparer
from m3stack.types import Tokens
from tests.e2e.conftest import MODEL_NAME, Server
from tests.e2e.media import clip, image_part, picture, text_part, video_part

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=250, cwd=EXAMPLES.parent
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_demo_answers_a_text_a_picture_and_a_clip() -> None:
    output = run(str(EXAMPLES / "demo.py"))
    assert output.count("(true)") == 4
    assert "every answer is true" in output


def test_preparing_alone_shows_the_prompt() -> None:
    assert "placeholders" in run(str(EXAMPLES / "prepare.py"))


def test_a_worker_answers_directly(worker: Server, gateway: Server) -> None:
    # the fixture `gateway` has waited for the worker to be ready
    said = run(str(EXAMPLES / "direct.py"), worker.address)
    assert "finished: " in said
    assert "Anna lives in Oslo." in said


def test_both_doors_give_the_same_tokens(worker: Server, gateway: Server, tmp_path: Path) -> None:
    content = [
        image_part(picture(tmp_path)),
        video_part(clip(tmp_path, size="112x112", seconds=3)),
        text_part("Compare."),
    ]
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 20,
        "temperature": 0.7,
        "seed": 3,
        "ignore_eos": True,
        "thinking": {"type": "disabled"},
    }
    preparer = Preparer(builtin_checkpoint("tiny"))
    request, fingerprint = preparer.chat(body)
    direct: list[int] = []
    with WorkerClient(worker.address) as client:
        for event in client.generate(request, fingerprint=fingerprint):
            if isinstance(event, Tokens):
                direct += event.token_ids
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["usage"]["prompt_tokens"] == len(request.prompt_token_ids)
    # what ends a message is no text of it, even where the model goes on
    told = preparer.detokenize(direct).replace("[e~[", "")
    assert answer["choices"][0]["message"]["content"] == told
