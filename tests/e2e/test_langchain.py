"""LangChain's ChatOpenAI, unmodified, as agents are written with it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from m3stack.local_ports import free_port
from tests.e2e.conftest import MODEL_NAME, Server, Stack, wait_for
from tests.e2e.scripted_worker import scripted_worker
from tests.e2e.test_messages import CALL


@tool
def weather(city: str, days: int) -> str:
    """Tells the weather."""
    return f"{days} days of sun in {city}"


def chat(server: Server, **settings: object) -> ChatOpenAI:
    url = f"{server.url}/v1"
    return ChatOpenAI(model=MODEL_NAME, base_url=url, api_key="none", max_retries=0, **settings)


@pytest.fixture
def agent(worker: Server, gateway: Server, stack: Stack) -> Iterator[Server]:
    """A gateway whose worker speaks and calls a tool."""
    response = httpx.post(f"{gateway.url}/tokenize", json={"prompt": f"I look.{CALL}"}, timeout=60)
    with scripted_worker(worker, response.json()["tokens"]) as url:
        server = stack.start("gateway", f"127.0.0.1:{free_port()}", "", "--workers", url)
        wait_for(server, "/ready")
        yield server
        server.stop()


def test_a_tool_loop_goes_round(agent: Server) -> None:
    model = chat(agent).bind_tools([weather])
    messages: list = [HumanMessage("How is the weather in Köln?")]
    first = model.invoke(messages)
    assert first.content == "I look."
    assert [call["name"] for call in first.tool_calls] == ["weather"]
    assert first.tool_calls[0]["args"] == {"city": "Köln", "days": 3}
    assert not first.invalid_tool_calls
    result = weather.invoke(first.tool_calls[0])
    assert isinstance(result, ToolMessage)
    second = model.invoke([*messages, first, result])
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]


def test_streamed_calls_add_up(agent: Server) -> None:
    whole = None
    for chunk in chat(agent, stream_usage=True).bind_tools([weather]).stream("Weather?"):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert whole.content == "I look."
    assert whole.tool_calls[0]["args"] == {"city": "Köln", "days": 3}
    assert whole.usage_metadata["total_tokens"] > 0


def test_the_responses_protocol_serves_it_too(agent: Server) -> None:
    model = chat(agent, use_responses_api=True, store=False).bind_tools([weather])
    first = model.invoke("Weather?")
    assert first.text == "I look."
    assert first.tool_calls[0]["args"] == {"city": "Köln", "days": 3}


def test_a_form_is_kept_by_the_tiny_model(gateway: Server) -> None:
    schema = {
        "title": "report",
        "type": "object",
        "properties": {"level": {"enum": ["low", "high"]}},
        "required": ["level"],
        "additionalProperties": False,
    }
    extra = {"thinking": {"type": "disabled"}}
    model = chat(gateway, temperature=0, extra_body=extra)
    for method in ("json_schema", "function_calling"):
        asked = model.with_structured_output(schema, method=method, strict=True)
        assert asked.invoke("Report.")["level"] in ("low", "high"), method


def test_the_tiny_model_streams(gateway: Server) -> None:
    # words come whatever the model would say
    words = {"regex": "[a-z ]{20,40}"}
    extra = {"thinking": {"type": "disabled"}, "structured_outputs": words}
    model = chat(gateway, temperature=0, max_tokens=20, extra_body=extra)
    asked = "How is the weather in Köln?"
    streamed = "".join(chunk.text for chunk in model.stream(asked))
    assert streamed == model.invoke(asked).text != ""
