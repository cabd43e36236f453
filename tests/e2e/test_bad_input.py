"""Bad input ends in one clear error of the API's own form, and harms nobody else."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import MODEL_NAME, Server

CASES = Path(__file__).parents[1] / "data" / "media"


@dataclass(frozen=True)
class Bad:
    """A request, the status it must give, and what the message must speak of."""

    name: str
    body: object
    status: int
    says: str
    path: str = "/v1/chat/completions"


def user(content: object, **fields: object) -> dict:
    return {"model": MODEL_NAME, "messages": [{"role": "user", "content": content}], **fields}


def with_media(kind: str, name: str) -> dict:
    data = base64.b64encode((CASES / name).read_bytes()).decode()
    url = f"data:application/octet-stream;base64,{data}"
    return user([{"type": f"{kind}_url", f"{kind}_url": {"url": url}}])


def with_url(kind: str, url: str) -> dict:
    return user([{"type": f"{kind}_url", f"{kind}_url": {"url": url}}])


BAD = [
    Bad("malformed json", b'{"messages": [', 400, "JSON"),
    Bad("not an object", b"[1]", 400, ""),
    Bad("unknown model", {**user("hi"), "model": "gpt-9"}, 404, "gpt-9"),
    Bad("no messages", {"model": MODEL_NAME, "messages": []}, 400, "messages"),
    Bad("missing messages", {"model": MODEL_NAME}, 400, "messages"),
    Bad("wrong type", user(12), 400, "content"),
    Bad(
        "bad role", {"model": MODEL_NAME, "messages": [{"role": "x", "content": "a"}]}, 400, "role"
    ),
    Bad("temperature", user("hi", temperature=3), 400, "temperature"),
    Bad("top_p", user("hi", top_p=-0.1), 400, "top_p"),
    Bad("max_tokens 0", user("hi", max_tokens=0), 400, "max_tokens"),
    Bad("max_tokens beyond", user("hi", max_tokens=10**8), 400, "max_tokens"),
    Bad("unreadable image", with_media("image", "img_text.png"), 400, "image"),
    Bad("empty image", with_media("image", "img_empty.png"), 400, ""),
    Bad("truncated image", with_media("image", "img_truncated.png"), 400, ""),
    Bad("bomb", with_media("image", "img_bomb_30000x30000.png"), 400, "pixel"),
    Bad("clip without video", with_media("video", "vid_audio_only.m4a"), 400, "video"),
    Bad("clip of text", with_media("video", "vid_text.mp4"), 400, ""),
    Bad("playlist", with_media("video", "vid_evil_playlist.mp4"), 400, ""),
    Bad("scheme", with_url("image", "ftp://example.com/a.png"), 400, "ftp"),
    Bad("file", with_url("image", "file:///etc/passwd"), 400, "file"),
    Bad("bad base64", with_url("image", "data:image/png;base64,@@@"), 400, "base64"),
    Bad("completions without prompt", {"model": MODEL_NAME}, 400, "prompt", "/v1/completions"),
]


def post(gateway: Server, bad: Bad) -> httpx.Response:
    url = f"{gateway.url}{bad.path}"
    if isinstance(bad.body, bytes):
        headers = {"content-type": "application/json"}
        return httpx.post(url, content=bad.body, headers=headers, timeout=60)
    return httpx.post(url, json=bad.body, timeout=60)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name.replace(" ", "-"))
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_bad_input_is_refused_clearly(gateway: Server, bad: Bad, stream: bool) -> None:
    if stream and isinstance(bad.body, dict):
        bad = Bad(bad.name, {**bad.body, "stream": True}, bad.status, bad.says, bad.path)
    response = post(gateway, bad)
    assert response.status_code == bad.status, response.text
    error = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert bad.says.lower() in (error["message"] + str(error["param"])).lower()
    good = httpx.post(
        f"{gateway.url}/v1/chat/completions", json=user("still there?", max_tokens=2), timeout=60
    )
    assert good.status_code == 200, good.text


def test_a_prompt_too_long_says_by_how_much(stack) -> None:
    worker = stack.worker("--max-context-tokens", "512")
    gateway = stack.gateway(worker, flags=("--max-context-tokens", "512"))
    from tests.e2e.conftest import wait_for

    wait_for(gateway, "/ready")
    response = post(gateway, Bad("long", user("word " * 2000), 400, ""))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "512" in error["message"]


def test_unknown_routes_and_methods_answer_in_the_api_form(gateway: Server) -> None:
    for method, path, status in [("GET", "/v2/x", 404), ("GET", "/v1/chat/completions", 405)]:
        response = httpx.request(method, f"{gateway.url}{path}")
        assert response.status_code == status
        assert response.json()["error"]["message"]
