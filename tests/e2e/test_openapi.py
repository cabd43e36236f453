"""The document at /openapi.json holds all that the gateway reads and all that it tells."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import jsonschema
import pytest

from m3stack.local_ports import free_port
from tests.e2e.conftest import Server
from tests.e2e.test_pages import (
    DOCUMENT,
    OPERATIONS,
    SCHEMAS,
    ask,
    check_answer,
    check_told,
    example_of,
)

CORE = Path(__file__).parents[2] / "gateway/core/src"
KINDS = "get|string|boolean|object|array|real|double|whole|positive|integer|count"
HEAD = re.compile(rf'\.(?:{KINDS})\(\s*"(\w+)"')
# sources that read members of requests, and the schemas that they read
READERS = {
    ("conversation/messages.rs", "conversation/media.rs"): ("ChatMessage",),
    ("conversation/standing.rs",): ("Standing",),
    ("conversation/tools.rs", "conversation/mod.rs"): ("ChatRequest",),
    ("conversation/generation.rs",): ("ChatRequest", "CompletionRequest"),
    ("conversation/completion.rs",): ("CompletionRequest", "TokenizeRequest", "DetokenizeRequest"),
    tuple(f"anthropic/{name}.rs" for name in ("mod", "blocks", "messages", "tools")): (
        "MessagesRequest",
    ),
    ("responses/mod.rs", "responses/input.rs"): ("ResponsesRequest",),
}
# `messages` holds what a message has; a thread is refused; other protocols share the generation
NOT_THERE = {"messages", "thread", "max_output_tokens", "stop_sequences"}

TOOL = {
    "name": "look",
    "description": "Looks.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}
ASKED = [{"role": "user", "content": "Look at it."}]
WISHES = {
    "chat-numbers": (
        "/v1/chat/completions",
        {
            "messages": ASKED,
            "max_tokens": 3,
            "n": 2,
            "logprobs": True,
            "top_logprobs": 2,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    "chat-thinking": (
        "/v1/chat/completions",
        {"messages": ASKED, "max_tokens": 12, "thinking": {"type": "enabled"}},
    ),
    "chat-calls": (
        "/v1/chat/completions",
        {
            "messages": ASKED,
            "max_tokens": 48,
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": "required",
        },
    ),
    "completions": (
        "/v1/completions",
        {"prompt": ["a", [65, 66]], "max_tokens": 3, "logprobs": 2, "n": 2},
    ),
    "messages-thinking": (
        "/v1/messages",
        {"messages": ASKED, "max_tokens": 12, "thinking": {"type": "enabled"}},
    ),
    "messages-calls": (
        "/v1/messages",
        {
            "messages": ASKED,
            "max_tokens": 48,
            "tools": [{"name": "look", "input_schema": TOOL["parameters"]}],
            "tool_choice": {"type": "any"},
        },
    ),
    "responses-cut": (
        "/v1/responses",
        {"input": "Look.", "max_output_tokens": 4, "reasoning": {"effort": "high"}},
    ),
    "responses-calls": (
        "/v1/responses",
        {
            "input": "Look.",
            "max_output_tokens": 48,
            "reasoning": {"effort": "none"},
            "tools": [
                {"type": "namespace", "name": "eyes", "tools": [TOOL | {"type": "function"}]}
            ],
            "tool_choice": "required",
        },
    ),
}


def operation_of(path: str) -> dict:
    return next(operation for known, _, operation in OPERATIONS if known == path)


@pytest.mark.parametrize("name", WISHES)
def test_nothing_is_told_that_the_document_does_not_name(gateway: Server, name: str) -> None:
    path, body = WISHES[name]
    body = {"temperature": 0} | body
    operation = operation_of(path)
    response = ask(gateway, path, "post", body)
    assert response.status_code == 200, response.text
    check_answer(operation, response)

    schema = operation["responses"]["200"]["content"]["text/event-stream"]["schema"]
    streamed = ask(gateway, path, "post", body | {"stream": True})
    lines = [line for line in streamed.text.splitlines() if line.startswith("data: ")]
    events = [line.removeprefix("data: ") for line in lines if line != "data: [DONE]"]
    assert len(events) > 2
    for event in events:
        check_told(json.loads(event), schema)


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        ({"status": "ok", "more": 1}, operation_of("/health")["responses"]["200"]),
        ({"input_tokens": 1, "cached": 1}, {"$ref": "#/components/schemas/TokenCount"}),
        ({"type": "ping", "index": 0}, {"$ref": "#/components/schemas/MessageEvent"}),
        (
            {"type": "response.failed", "sequence_number": 1, "response": {}, "error": "a"},
            {"$ref": "#/components/schemas/ResponseEvent"},
        ),
    ],
)
def test_what_the_document_does_not_name_is_found(value: object, schema: dict) -> None:
    schema = schema["content"]["application/json"]["schema"] if "content" in schema else schema
    with pytest.raises((AssertionError, jsonschema.ValidationError)):
        check_told(value, schema)


def members(schema: object, seen: set[str]) -> set[str]:
    """The names of all members of a schema, those of what it refers to included."""
    if isinstance(schema, list):
        return set[str]().union(*(members(inner, seen) for inner in schema))
    if not isinstance(schema, dict):
        return set()
    found: set[str] = set()
    name = schema.get("$ref", "").rpartition("/")[2]
    if name and name not in seen:
        seen.add(name)
        found |= members(SCHEMAS[name], seen)
    properties = schema.get("properties", {})
    rest = [value for key, value in schema.items() if key not in ("properties", "example")]
    return found | set(properties) | members([*properties.values(), *rest], seen)


@pytest.mark.parametrize("files", READERS, ids=lambda files: files[0])
def test_each_member_that_is_read_is_documented(files: tuple[str, ...]) -> None:
    sources = "".join((CORE / name).read_text().partition("mod tests {")[0] for name in files)
    read = set(HEAD.findall(sources))
    documented = members([SCHEMAS[name] for name in READERS[files]], set())
    assert len(read) > 2
    assert read - documented - NOT_THERE == set()


def test_a_compressed_body_and_an_unknown_model_are_refused_as_documented(gateway: Server) -> None:
    for path, method, operation in OPERATIONS:
        if "requestBody" not in operation:
            continue
        url, example = gateway.url + path, example_of(operation)
        compressed = {"content-encoding": "gzip", "content-type": "application/json"}
        response = httpx.request(method, url, content=b"x", headers=compressed, timeout=60)
        assert response.status_code == (400 if "messages" in path else 415), path
        check_answer(operation, response)
        response = httpx.request(method, url, json=example | {"model": "no-such"}, timeout=60)
        # a model is not asked for where only the vocabulary counts
        assert response.status_code == (200 if "detokenize" in path else 404), path
        check_answer(operation, response)


def test_a_picture_that_cannot_be_had_is_refused_as_documented(gateway: Server) -> None:
    url = f"http://127.0.0.1:{free_port()}/a.png"
    part = {"type": "image_url", "image_url": {"url": url}}
    block = {"type": "image", "source": {"type": "url", "url": url}}
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": [part]}]},
        "/tokenize": {"messages": [{"role": "user", "content": [part]}]},
        "/v1/tokenize": {"messages": [{"role": "user", "content": [part]}]},
        "/v1/responses": {"input": [{"role": "user", "content": [part]}]},
        "/v1/messages": {"messages": [{"role": "user", "content": [block]}], "max_tokens": 1},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": [block]}]},
    }
    for path, body in bodies.items():
        response = ask(gateway, path, "post", body)
        assert response.status_code == 502, (path, response.text)
        check_answer(operation_of(path), response)


def test_statuses_of_errors_are_the_same_wherever_the_same_can_happen() -> None:
    for path, _, operation in OPERATIONS:
        if "requestBody" not in operation:
            continue
        busy = "529" if path.startswith("/v1/messages") else "429"
        always = {"200", "400", "401", "408", "413", "500", busy}
        assert always <= set(operation["responses"]), path
    assert "403" not in json.dumps(DOCUMENT["paths"]), "roles are asked at the other door only"
