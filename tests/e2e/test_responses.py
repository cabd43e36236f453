"""OpenAI's Responses through the official client, unmodified, on the real stack."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from m3stack.local_ports import free_port
from tests.e2e.conftest import MODEL_NAME, Server, Stack, wait_for
from tests.e2e.media import image_part, picture
from tests.e2e.scripted_worker import scripted_worker

MARK = "]<]minimax[>["
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"days": {"type": "integer"}}},
    "strict": False,
}
CALL = (
    f'{MARK}<tool_call>\n{MARK}<invoke name="weather">{MARK}<days>3{MARK}</days>'
    f"{MARK}</invoke>\n{MARK}</tool_call>"
)
QUIET = {"reasoning": {"effort": "none"}, "store": False}


def client_of(gateway: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def client(gateway: Server) -> Iterator[openai.OpenAI]:
    with client_of(gateway) as client:
        yield client


@pytest.fixture
def agent(worker: Server, gateway: Server, stack: Stack) -> Iterator[openai.OpenAI]:
    """A client of a gateway whose worker thinks, speaks and calls a tool."""
    text = f"Let me see.</mm:think>I look.{CALL}"
    response = httpx.post(f"{gateway.url}/tokenize", json={"prompt": text}, timeout=60)
    with scripted_worker(worker, response.json()["tokens"]) as url:
        address = f"127.0.0.1:{free_port()}"
        server = stack.start("gateway", address, "", "--workers", url)
        wait_for(server, "/ready")
        with client_of(server) as client:
            yield client
        server.stop()


def input_tokens(client: openai.OpenAI, content: object, **options: object) -> int:
    settings = {"model": MODEL_NAME, "input": content, "max_output_tokens": 1, **QUIET, **options}
    return client.responses.create(**settings).usage.input_tokens


def test_a_streamed_response_is_the_whole_response(client: openai.OpenAI) -> None:
    settings = {
        "model": MODEL_NAME,
        "input": "Say something.",
        "instructions": "Be brief.",
        "max_output_tokens": 40,
        "temperature": 1.0,
        "extra_body": {"seed": 11},
        **QUIET,
    }
    whole = client.responses.create(**settings)
    with client.responses.stream(**settings) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response() if kinds[-1] == "response.completed" else None
    assert whole.output_text != ""
    assert whole.status in ("completed", "incomplete")
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{whole.status}"
    if streamed:
        assert streamed.output_text == whole.output_text
    deltas = client.responses.create(stream=True, **settings)
    text = "".join(e.delta for e in deltas if e.type == "response.output_text.delta")
    assert text == whole.output_text


def test_instructions_and_pictures_are_part_of_the_prompt(
    client: openai.OpenAI, tmp_path: Path
) -> None:
    question = {"type": "input_text", "text": "What is this?"}
    url = image_part(picture(tmp_path))["image_url"]["url"]
    card = {"type": "input_image", "image_url": url, "detail": "auto"}
    without = input_tokens(client, [{"role": "user", "content": [question]}])
    # 640x480 becomes 644x476: 23 x 17 merged patches, and two marks around them
    with_card = input_tokens(client, [{"role": "user", "content": [card, question]}])
    assert with_card - without == 23 * 17 + 2
    assert input_tokens(client, "What is this?") == without
    assert input_tokens(client, "What is this?", instructions="Be brief. " * 20) > without


def test_a_tool_loop_goes_on_with_what_came_back(agent: openai.OpenAI) -> None:
    settings = {
        "model": MODEL_NAME,
        "tools": [WEATHER],
        "reasoning": {"effort": "high"},
        "store": False,
    }
    messages: list = [{"role": "user", "content": "Weather?"}]
    with agent.responses.stream(input=messages, **settings) as stream:
        pieces = [
            event.delta
            for event in stream
            if event.type == "response.function_call_arguments.delta"
        ]
        streamed = stream.get_final_response()
    first = agent.responses.create(input=messages, **settings)
    for response in (first, streamed):
        thinking, words, call = response.output
        assert thinking.content[0].text == "Let me see."
        assert words.content[0].text == response.output_text == "I look."
        assert (call.name, call.arguments) == ("weather", '{"days":3}')
        assert response.status == "completed"
    assert "".join(pieces) == '{"days":3}'
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = agent.responses.create(input=[*messages, *streamed.output, result], **settings)
    assert second.usage.input_tokens > first.usage.input_tokens


def test_what_needs_stored_state_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(
            model=MODEL_NAME, input="And?", previous_response_id="resp_1", store=False
        )
    with pytest.raises(openai.BadRequestError, match="keeps no responses"):
        client.responses.create(model=MODEL_NAME, input="Hi", store=True)
