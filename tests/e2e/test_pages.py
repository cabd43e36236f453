"""The document at /openapi.json against the gateway that serves it, and the pages' own files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import jsonschema
import pytest
from openapi_spec_validator import validate

from tests.e2e.conftest import Server, Stack, wait_for

HTTP = Path(__file__).parents[2] / "gateway/server/src/http"
DOCUMENT = json.loads((HTTP.parents[1] / "assets/openapi.json").read_text())
SCHEMAS = DOCUMENT["components"]["schemas"]
OPERATIONS = [
    (path, method, operation)
    for path, item in DOCUMENT["paths"].items()
    for method, operation in item.items()
]
STREAMED = [
    path
    for path, _, operation in OPERATIONS
    if "text/event-stream" in operation["responses"]["200"].get("content", {})
]
KEY = "sk-of-the-pages-test-0123"


def resolved(value: dict) -> dict:
    if "$ref" not in value:
        return value
    inner = DOCUMENT
    for step in value["$ref"].removeprefix("#/").split("/"):
        inner = inner[step]
    return inner


def check(value: object, schema: dict) -> None:
    root = schema | {"components": DOCUMENT["components"]}
    jsonschema.Draft202012Validator(root).validate(value)


def closed(value: object) -> object:
    """The same schemas, but what they do not name may not be there."""
    if isinstance(value, list):
        return [closed(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    ours = {key: closed(inner) for key, inner in value.items()}
    if isinstance(value.get("properties"), dict) and "type" in value:
        return {"additionalProperties": False} | ours
    return ours


def check_told(value: object, schema: dict) -> None:
    """What the gateway tells fits its schema, and holds nothing beside it."""
    check(value, schema)
    root = closed(schema) | {"components": {"schemas": TOLD}}
    errors = jsonschema.Draft202012Validator(root).iter_errors(value)
    assert not (error := jsonschema.exceptions.best_match(errors)), error


def ask(server: Server, path: str, method: str, body: object = None) -> httpx.Response:
    url = server.url + path.replace("{id}", "m3-tiny")
    return httpx.request(method, url, json=body, timeout=100)


def example_of(operation: dict) -> dict | None:
    body = operation.get("requestBody")
    return body and body["content"]["application/json"]["example"]


def check_answer(operation: dict, response: httpx.Response) -> None:
    """The answer's status, headers and body are those of the document."""
    promised = resolved(operation["responses"][str(response.status_code)])
    kind = response.headers["content-type"].split(";")[0]
    content = promised["content"][kind]
    if kind == "application/json":
        check_told(response.json(), content["schema"])
    documented = set(promised.get("headers", {}))
    for name in documented - LIMIT_HEADERS:
        assert name in response.headers, name
    assert set(response.headers) - documented - CUSTOMARY == set()


TOLD = closed(SCHEMAS)
# only where a tenant has limits
LIMIT_HEADERS = {name for name in DOCUMENT["components"]["headers"] if "ratelimit" in name}
# of HTTP itself, and of every page for browsers
CUSTOMARY = {
    *("connection", "content-length", "content-type", "date", "transfer-encoding"),
    *("cache-control", "content-security-policy", "x-content-type-options"),
    *("cross-origin-opener-policy", "referrer-policy", "x-accel-buffering"),
}


def test_the_document_is_valid_and_served_as_it_stands(gateway: Server) -> None:
    validate(DOCUMENT)
    assert ask(gateway, "/openapi.json", "get").json() == DOCUMENT
    version = ask(gateway, "/version", "get").json()["version"]
    assert DOCUMENT["info"]["version"] == version


def test_routes_and_document_name_the_same_paths() -> None:
    routed = set(re.findall(r'\.route\("([^"]+)"', (HTTP / "mod.rs").read_text()))
    pages = re.findall(r'path: "([^"]+)"', (HTTP / "pages.rs").read_text())
    routed |= {path for path in pages if not path.endswith((".js", ".css"))}
    assert {path.replace("{*id}", "{id}") for path in routed} == set(DOCUMENT["paths"])


@pytest.mark.parametrize(
    ("path", "method", "operation"),
    OPERATIONS,
    ids=[entry[2]["operationId"] for entry in OPERATIONS],
)
def test_every_route_answers_its_example_as_documented(
    gateway: Server, path: str, method: str, operation: dict
) -> None:
    example = example_of(operation)
    if example is not None:
        check(example, operation["requestBody"]["content"]["application/json"]["schema"])
    response = ask(gateway, path, method, example)
    assert response.status_code == 200, response.text
    check_answer(operation, response)


@pytest.mark.parametrize("path", STREAMED)
def test_every_event_of_a_stream_is_as_documented(gateway: Server, path: str) -> None:
    operation = DOCUMENT["paths"][path]["post"]
    schema = operation["responses"]["200"]["content"]["text/event-stream"]["schema"]
    response = ask(gateway, path, "post", example_of(operation) | {"stream": True})
    lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
    events = [line.removeprefix("data: ") for line in lines if line != "data: [DONE]"]
    assert len(events) > 1
    for event in events:
        check_told(json.loads(event), schema)


def test_what_the_document_requires_is_required(gateway: Server) -> None:
    num_checked = 0
    for path, method, operation in OPERATIONS:
        if "requestBody" in operation:
            response = ask(gateway, path, method, {})
            assert response.status_code == 400, path
            check_answer(operation, response)
            num_checked += 1
    assert num_checked > 5


def bounded(schema: dict) -> list[tuple[str, object, bool]]:
    """Values at and beyond each documented bound: member, value, whether it is allowed."""
    cases = []
    for name, member in schema["properties"].items():
        step = 1 if member.get("type") == "integer" else 0.5
        for bound, sign in (("minimum", -1), ("maximum", 1)):
            if bound in member:
                cases.append((name, member[bound], True))
                cases.append((name, member[bound] + sign * step, False))
        if "exclusiveMinimum" in member:
            cases.append((name, member["exclusiveMinimum"], False))
        if "maxLength" in member:
            cases.append((name, "x" * member["maxLength"], True))
            cases.append((name, "x" * (member["maxLength"] + 1), False))
        wrong = {"boolean": "yes", "integer": "1", "number": "1", "string": 1, "array": 1}
        if member.get("type") in wrong:
            cases.append((name, wrong[member["type"]], False))
    return cases


BOUNDS = [
    case
    for schema in (SCHEMAS["Sampling"], SCHEMAS["Standing"], SCHEMAS["ChatRequest"]["allOf"][0])
    for case in bounded(schema)
]


def test_documented_bounds_are_the_gateways(gateway: Server) -> None:
    # a chat's tokens are counted after all of it was checked, and without a worker
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
    assert len(BOUNDS) > 40
    with httpx.Client(base_url=gateway.url) as client:
        for name, value, is_allowed in BOUNDS:
            response = client.post("/tokenize", json=chat | {name: value})
            assert response.is_success == is_allowed, (name, value, response.text)
            if not is_allowed:
                assert name in response.json()["error"]["param"]


def test_pages_are_open_and_all_else_asks_for_a_key_as_documented(
    stack: Stack, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[keys]]\nname = "team"\nkey = "{KEY}"\n')
    keys.chmod(0o600)
    server = stack.gateway(flags=("--api-keys", str(keys)))
    for path, method, operation in OPERATIONS:
        response = ask(server, path, method, example_of(operation))
        is_open = operation.get("security") == []
        assert (response.status_code != 401) == is_open, path
        check_answer(operation, response)


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_page_needs_nothing_but_this_gateway(gateway: Server, path: str) -> None:
    page = ask(gateway, path, "get")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    names = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    files = [name for name in names if name != "data:,"]
    assert len(files) > 2
    for name in files:
        response = ask(gateway, "/" + name.removeprefix("./"), "get")
        assert response.status_code == 200, name
        assert "http" not in name
        assert not re.search(r"https?://", response.text) or name == "openapi.json"


def test_a_page_that_is_asked_for_in_another_way_is_refused(gateway: Server) -> None:
    response = ask(gateway, "/docs", "post", {})
    assert response.status_code == 405
    check(response.json(), {"$ref": "#/components/schemas/Error"})


def test_the_document_says_what_is_missing_when_nothing_is_ready(stack: Stack) -> None:
    server = stack.gateway()
    response = wait_for(server, "/ready", status=503)
    check_answer(DOCUMENT["paths"]["/ready"]["get"], response)
    chat = DOCUMENT["paths"]["/v1/chat/completions"]["post"]
    response = ask(server, "/v1/chat/completions", "post", example_of(chat))
    assert response.status_code == 503
    check_answer(chat, response)
