"""Output that must have a form: whatever the tiny model's noise, the reply has it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import anthropic
import httpx
import jsonschema
import openai
import pytest

from tests.e2e.conftest import MODEL_NAME, Server

USER = [{"role": "user", "content": "Report."}]
REPORT = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 6},
        "level": {"enum": ["low", "high"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 40},
        "marks": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["title", "level", "count", "marks", "next"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 9}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "strict": True, "parameters": parameters},
    }
    for name, parameters in [
        ("report", REPORT),
        ("ping", {"type": "object", "properties": {}, "additionalProperties": False}),
    ]
]
# noise likes white space, of which a document in JSON has room for a lot
COUNT = {
    "type": "object",
    "properties": {"count": {"type": "integer", "minimum": 1, "maximum": 40}},
    "required": ["count"],
    "additionalProperties": False,
}
DISABLED = {"thinking": {"type": "disabled"}}


@pytest.fixture
def client(gateway: Server) -> Iterator[openai.OpenAI]:
    url = f"{gateway.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def end_of_thinking(gateway: Server) -> int:
    body = {"model": MODEL_NAME, "prompt": "</mm:think>"}
    (token,) = httpx.post(f"{gateway.url}/tokenize", json=body, timeout=60).json()["tokens"]
    return token


def chat(client: openai.OpenAI, seed: int, **options: object) -> object:
    extra = options.pop("extra_body", DISABLED)
    return client.chat.completions.create(
        model=MODEL_NAME,
        messages=USER,
        seed=seed,
        max_tokens=400,
        temperature=1.0,
        extra_body=extra,
        **options,
    )


@pytest.mark.parametrize("thinking", ["disabled", "adaptive", "enabled"])
def test_an_answer_fits_its_schema_whatever_came_before_it(
    client: openai.OpenAI, gateway: Server, thinking: str
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "r", "schema": COUNT, "strict": True}}
    # a model of random weights would think for ever
    bias = {} if thinking == "disabled" else {str(end_of_thinking(gateway)): 100}
    extra = {"thinking": {"type": thinking}}
    reply = chat(client, 3, response_format=form, extra_body=extra, logit_bias=bias)
    assert reply.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(reply.choices[0].message.content), COUNT)


def test_a_required_call_is_made_and_its_arguments_fit(client: openai.OpenAI) -> None:
    names = set()
    for seed in range(4):
        options = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
        choice = chat(client, seed, **options).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls
        names.add(call.function.name)
        if call.function.name == "report":
            jsonschema.validate(json.loads(call.function.arguments), REPORT)
    assert names <= {"report", "ping"}


def test_a_named_call_streams_its_arguments(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "report"}}
    arguments, names, reasons = "", [], []
    for chunk in chat(client, 5, tools=TOOLS, tool_choice=named, stream=True):
        for choice in chunk.choices:
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for call in choice.delta.tool_calls or []:
                arguments += call.function.arguments or ""
                names += [call.function.name] if call.function.name else []
    assert names == ["report"]
    assert reasons == ["tool_calls"]
    jsonschema.validate(json.loads(arguments), REPORT)


def test_messages_and_responses_keep_to_the_same_forms(
    client: openai.OpenAI, gateway: Server
) -> None:
    with anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as other:
        message = other.messages.create(
            model=MODEL_NAME,
            max_tokens=400,
            messages=[{"role": "user", "content": "Report."}],
            tools=[{"name": "report", "input_schema": REPORT, "strict": True}],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        )
    assert message.stop_reason == "tool_use"
    (block,) = message.content
    jsonschema.validate(block.input, REPORT)
    response = client.responses.create(
        model=MODEL_NAME,
        input="Report.",
        reasoning={"effort": "none"},
        max_output_tokens=400,
        text={"format": {"type": "json_schema", "name": "r", "schema": COUNT, "strict": True}},
    )
    assert response.status == "completed"
    jsonschema.validate(json.loads(response.output_text), COUNT)


@pytest.mark.parametrize(
    ("wish", "text"),
    [({"choice": ["yes", "no"]}, "yes|no"), ({"regex": "[ab]{3}-[0-9]"}, "[ab]{3}-[0-9]")],
)
def test_choices_and_patterns_hold(client: openai.OpenAI, wish: dict, text: str) -> None:
    reply = chat(client, 7, extra_body=DISABLED | {"structured_outputs": wish})
    jsonschema.validate(
        reply.choices[0].message.content, {"type": "string", "pattern": f"^({text})$"}
    )


def test_a_form_that_cannot_be_kept_is_refused_by_name(client: openai.OpenAI) -> None:
    schema = {"type": "string", "pattern": "(?=a)b"}
    form = {"type": "json_schema", "json_schema": {"name": "r", "schema": schema, "strict": True}}
    with pytest.raises(openai.BadRequestError) as refusal:
        chat(client, 1, response_format=form)
    assert refusal.value.param == "response_format"
    odd = {"type": "object", "properties": {"a": {"type": "string", "not": {}}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": odd}}]
    with pytest.raises(openai.BadRequestError) as refusal:
        chat(client, 1, tools=tools)
    assert refusal.value.param == "tools[0].function.parameters"
    assert '"not"' in refusal.value.message
