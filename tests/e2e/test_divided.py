"""A fleet that divides the work, through REST: the answers of one worker, whoever is lost."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import MODEL_NAME, START_TIMEOUT_S, Server, Stack, wait_for
from tests.e2e.media import clip, image_part, picture, text_part, video_part

# several pages of the built-in checkpoint
BEGINNING = "Once upon a time there was a cache that remembered. " * 60


def figure(server: Server, name: str) -> float:
    address = server.metrics_address or server.address
    page = httpx.get(f"http://{address}/metrics", timeout=60).text
    found = (float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))
    return next(found, 0.0)


def transfers(worker: Server, outcome: str) -> float:
    return figure(worker, f'm3stack_worker_transfers_total{{outcome="{outcome}"}}')


def stages(gateway: Server, stage: str, outcome: str) -> float:
    return figure(gateway, f'm3stack_gateway_stages_total{{stage="{stage}",outcome="{outcome}"}}')


def body_of(content: object, **more: object) -> dict:
    return {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 16,
        "temperature": 0,
        "thinking": {"type": "disabled"},
        **more,
    }


def ask(gateway: Server, body: dict) -> dict:
    reply = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def text_of(reply: dict) -> str:
    return reply["choices"][0]["message"]["content"]


def ready(gateway: Server, count: int) -> None:
    wait_for(gateway, "/ready")
    deadline = time.monotonic() + START_TIMEOUT_S
    while figure(gateway, 'm3stack_gateway_workers{state="ready"}') < count:
        assert time.monotonic() < deadline, f"fewer than {count} workers are ready"
        time.sleep(0.1)


@pytest.mark.timeout(600)
def test_a_fleet_that_divides_the_work_answers_as_one_worker_does(
    stack: Stack, tmp_path: Path
) -> None:
    whole = stack.worker()
    encode, prefill, decode = (
        stack.worker("--set", f"role={role}") for role in ("encode", "prefill", "decode")
    )
    alone = stack.gateway(whole)
    divided = stack.gateway(encode, prefill, decode)
    ready(alone, 1)
    ready(divided, 3)
    bodies = {
        "text": body_of(BEGINNING + "What is it about?"),
        "sampled": body_of(BEGINNING + "And then?", temperature=1.0, seed=5),
        "picture": body_of(
            [text_part(BEGINNING), image_part(picture(tmp_path)), text_part("What is it?")]
        ),
        "clip": body_of([video_part(clip(tmp_path, seconds=2)), text_part(BEGINNING)]),
        "short": body_of("Hi"),
    }
    for name, body in bodies.items():
        expected, given = ask(alone, body), ask(divided, body)
        assert text_of(given) == text_of(expected), name
        for count in ("prompt_tokens", "completion_tokens"):
            assert given["usage"][count] == expected["usage"][count], name
    assert transfers(decode, "whole") > 0
    assert transfers(decode, "failed") + transfers(decode, "corrupt") == 0
    # the second question finds the beginning where it is answered
    assert (stages(divided, "prefill", "done"), stages(divided, "encode", "done")) == (3, 2)
    # the encoder's features were fetched, and nobody else's tower ran
    assert figure(encode, "m3stack_worker_encoded_media_parts_total") > 0
    for fetches in (prefill, decode):
        assert figure(fetches, "m3stack_worker_encoded_media_parts_total") == 0

    # a streamed answer comes once, whole, and ends
    events: list[str] = []
    streamed = bodies["sampled"] | {"stream": True}
    with httpx.stream(
        "POST", f"{divided.url}/v1/chat/completions", json=streamed, timeout=60
    ) as stream:
        events += [line[6:] for line in stream.iter_lines() if line.startswith("data: ")]
    assert events.count("[DONE]") == 1
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    said = "".join(delta.get("content") or "" for delta in deltas)
    assert said == text_of(ask(alone, bodies["sampled"]))

    # asked again, the cache is a cache again: what was only fetched before is told as cached now
    again = ask(divided, bodies["text"])
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 256

    # those that help go without a word: the one that answers does it all
    prefill.kill()
    encode.kill()
    for name in ("text", "picture"):
        body = json.loads(json.dumps(bodies[name]))
        body["cache_salt"] = "after"
        assert text_of(ask(divided, body)) == text_of(ask(alone, bodies[name])), name
    decode.kill()
    deadline = time.monotonic() + START_TIMEOUT_S
    while httpx.get(f"{divided.url}/ready", timeout=60).status_code != 503:
        assert time.monotonic() < deadline
        time.sleep(0.1)
