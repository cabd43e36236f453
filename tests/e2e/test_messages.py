"""Anthropic's Messages through the official client, unmodified, on the real stack."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import anthropic
import httpx
import pytest

from m3stack.local_ports import free_port
from tests.e2e.conftest import MODEL_NAME, Server, Stack, wait_for
from tests.e2e.media import clip, picture
from tests.e2e.scripted_worker import scripted_worker

MARK = "]<]minimax[>["
THINKING = {"type": "enabled", "budget_tokens": 1024}
WEATHER = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
}
CALL = (
    f'{MARK}<tool_call>\n{MARK}<invoke name="weather">{MARK}<city>Köln{MARK}</city>'
    f"{MARK}<days>3{MARK}</days>{MARK}</invoke>\n{MARK}</tool_call>"
)


# words come whatever the model would say
LEVEL = {
    "format": {
        "type": "json_schema",
        "schema": {
            "type": "object",
            "properties": {"level": {"enum": ["low", "high"]}},
            "required": ["level"],
            "additionalProperties": False,
        },
    }
}


def client_of(gateway: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def client(gateway: Server) -> Iterator[anthropic.Anthropic]:
    with client_of(gateway) as client:
        yield client


@pytest.fixture
def agent(worker: Server, gateway: Server, stack: Stack) -> Iterator[anthropic.Anthropic]:
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


def user(*content: object) -> list:
    return [{"role": "user", "content": list(content)}]


def text_block(text: str) -> dict:
    return {"type": "text", "text": text}


def media_block(kind: str, data: bytes, mime: str) -> dict:
    encoded = base64.b64encode(data).decode()
    return {
        "type": kind,
        "source": {"type": "base64", "media_type": mime, "data": encoded},
    }


def request(messages: list, **options: object) -> dict:
    return {"model": MODEL_NAME, "max_tokens": 16, "messages": messages} | options


def input_tokens(client: anthropic.Anthropic, messages: list, **options: object) -> int:
    """What the request uses, after confirming that a count says the same."""
    usage = client.messages.create(**request(messages, max_tokens=1, **options)).usage
    used = usage.input_tokens + usage.cache_read_input_tokens
    count = client.messages.count_tokens(model=MODEL_NAME, messages=messages, **options)
    assert count.input_tokens == used
    return used


def test_a_streamed_message_is_the_whole_message(client: anthropic.Anthropic) -> None:
    settings = request(
        user(text_block("Say something.")),
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        max_tokens=40,
        metadata={"user_id": "somebody"},
        extra_body={"temperature": 1.0, "top_k": 20, "seed": 11, "output_config": LEVEL},
    )
    whole = client.messages.create(**settings)
    with client.messages.stream(**settings) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert [block.type for block in whole.content] == ["text"]
    assert streamed.content[0].text == whole.content[0].text != ""
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert streamed.id.startswith("msg_")
    assert events[0] == "message_start"
    assert events[-1] == "message_stop"
    assert whole._request_id


def test_a_picture_and_a_clip_count_as_they_are_used(
    client: anthropic.Anthropic, tmp_path: Path
) -> None:
    question = text_block("What is this?")
    without = input_tokens(client, user(question))
    card = media_block("image", picture(tmp_path), "image/jpeg")
    # 640x480 becomes 644x476: 23 x 17 merged patches, and two marks around them
    assert input_tokens(client, user(card, question)) - without == 23 * 17 + 2
    film = media_block("video", clip(tmp_path), "video/mp4")
    # three pairs of frames, 11 x 9 merged patches each, and timestamps
    assert input_tokens(client, user(film, question)) - without > 3 * (11 * 9 + 2)


def test_tools_their_results_and_pictures_in_them_are_part_of_the_prompt(
    client: anthropic.Anthropic, tmp_path: Path
) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Köln"}}
    thought = {"type": "thinking", "thinking": "Look it up.", "signature": "any"}
    card = media_block("image", picture(tmp_path, size="112x112", name="c.png"), "image/png")

    def used(*, content: list, thoughts: list, tools: list) -> int:
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content}
        messages = [
            *user(text_block("Weather?")),
            {"role": "assistant", "content": [*thoughts, call]},
            *user(result),
        ]
        return input_tokens(client, messages, tools=tools)

    words = [text_block("sunny")]
    full = used(content=[*words, card], thoughts=[thought], tools=[WEATHER])
    # 112x112 is 4 x 4 merged patches and two marks
    assert full - used(content=words, thoughts=[thought], tools=[WEATHER]) >= 4 * 4 + 2
    assert full > used(content=[*words, card], thoughts=[], tools=[WEATHER])
    assert full > used(content=[*words, card], thoughts=[thought], tools=[])


def test_a_call_arrives_typed_whole_and_streamed(agent: anthropic.Anthropic) -> None:
    settings = request(
        user(text_block("Weather?")),
        max_tokens=2000,
        tools=[WEATHER],
        thinking=THINKING,
    )
    whole = agent.messages.create(**settings)
    pieces = []
    with agent.messages.stream(**settings) as stream:
        for event in stream:
            if event.type == "input_json":
                pieces.append(event.partial_json)
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        thinking, words, call = message.content
        assert (thinking.thinking, words.text) == ("Let me see.", "I look.")
        assert len(thinking.signature) == 64
        assert (call.name, call.input) == ("weather", {"city": "Köln", "days": 3})
        assert message.stop_reason == "tool_use"
    assert len(pieces) > 2


def test_a_tool_loop_goes_on_with_what_came_back(agent: anthropic.Anthropic) -> None:
    settings = {"tools": [WEATHER], "thinking": THINKING}
    messages = user(text_block("Weather?"))
    first = agent.messages.create(**request(messages, **settings))
    call = first.content[-1]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    longer = [*messages, {"role": "assistant", "content": first.content}, *user(result)]
    second = agent.messages.create(**request(longer, **settings))
    assert second.usage.input_tokens > first.usage.input_tokens
    count = agent.messages.count_tokens(model=MODEL_NAME, messages=longer, **settings)
    assert count.input_tokens == second.usage.input_tokens


def test_a_stop_sequence_ends_and_is_named(agent: anthropic.Anthropic) -> None:
    message = agent.messages.create(
        **request(user(text_block("Go")), thinking=THINKING, stop_sequences=["look"])
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "look")
    assert message.content[-1].text == "I "


def test_the_prefix_cache_shows_in_the_usage(client: anthropic.Anthropic) -> None:
    messages = user(text_block("A long story. " * 200))
    first, second = (
        client.messages.create(**request(messages, max_tokens=1)).usage for _ in range(2)
    )
    assert second.cache_read_input_tokens > 0
    assert second.input_tokens + second.cache_read_input_tokens == (
        first.input_tokens + first.cache_read_input_tokens
    )


def test_errors_are_the_clients_own_exceptions(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(**request(user(text_block("Hi"))) | {"model": "other"})
    assert unknown.value.body["error"]["type"] == "not_found_error"
    broken = media_block("image", b"no picture", "image/png")
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**request(user(broken)))
    assert "messages[0].content[0].source" in refused.value.body["error"]["message"]
    assert refused.value.body["request_id"] == refused.value.request_id
