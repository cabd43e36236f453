"""Roles, tools, limits and counts of text requests."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from m3stack.checkpoints import builtin_checkpoint
from m3stack.prepare import Preparer
from tests.contract.conftest import MARK, OFF, Api, deltas


def user(content: object = "Hi.") -> dict:
    return {"role": "user", "content": content}


def function(name: str, parameters: dict | None = None) -> dict:
    described = {"name": name, "description": name, "parameters": parameters or {"type": "object"}}
    return {"type": "function", "function": described}


def calls(*named: tuple[str, str], arguments: object = '{"a": 1}') -> dict:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name in named
        ],
    }


def result(call_id: str, content: object = "done") -> dict:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def emitted(name: str, argument: str) -> str:
    tags = f"{MARK}<a>{argument}{MARK}</a>"
    return (
        f'{MARK}<tool_call>\n{MARK}<invoke name="{name}">{tags}{MARK}</invoke>\n{MARK}</tool_call>'
    )


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "root", "content": "Be brief."}, user()],
        [{"role": "root", "content": "A"}, {"role": "system", "content": "B"}, user()],
        [{"role": "developer", "content": "Be brief."}, user()],
        [{"role": "system", "content": "A"}, {"role": "system", "content": "B"}, user()],
        [user(), {"role": "system", "content": "Late."}, user()],
        [user(), {"role": "assistant", "content": "A"}, {"role": "assistant", "content": "B"}],
        [user(), user("And?")],
        [{"role": "user", "content": "Hi.", "name": "ann"}],
        [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
        [user(), calls(("c1", "f")), result("c1")],
        [user(), {k: v for k, v in calls(("c1", "f")).items() if k != "content"}, result("c1")],
        [user(), calls(("c1", "f"), ("c2", "g")), result("c2"), result("c1")],
        [user(), calls(("c1", "f")), result("c1", ""), user()],
        [user(), calls(("c1", "f")), result("c1", None), user()],
        [user(), calls(("c1", "f")), result("c1", [{"type": "text", "text": "ok"}]), user()],
        [user(), {"role": "assistant", "content": "A", "reasoning_content": "B"}, user()],
    ],
)
def test_every_order_of_turns_that_agents_send_is_answered(api: Api, messages: list) -> None:
    assert api.answer(messages=messages)["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize("content", [[], None, "", [{"type": "text", "text": ""}]])
def test_a_user_who_says_nothing_breaks_nothing(api: Api, content: object) -> None:
    assert api.ask(content).status_code in (200, 400)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "Hi."}]}, "role"),
        ({"messages": [{"content": "Hi."}]}, "role"),
        ({"messages": "Hi."}, "messages"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"messages": [user(), calls(("c1", "f"), arguments="{"), result("c1")]}, "arguments"),
        ({"messages": [user(), calls(("c1", "f"), arguments="[1]"), result("c1")]}, "arguments"),
        ({"messages": [user(), calls(("c1", "f")), result("c2")]}, "tool_call_id"),
        ({"messages": [user(), calls(("c1", "f"), ("c2", "g")), result("c1"), user()]}, "c2"),
        ({"messages": [user(), calls(("c1", "f")), result("c1", {"a": 1})]}, "content"),
        ({"messages": [user(), result("c1")]}, "tool_call_id"),
        ({"tools": [{"type": "function", "function": {}}]}, "name"),
        ({"tools": "weather"}, "tools"),
        (
            {
                "tools": [function("f")],
                "tool_choice": {"type": "function", "function": {"name": "none_such"}},
            },
            "none_such",
        ),
        ({"tool_choice": "required"}, "tools"),
    ],
)
def test_a_mistake_is_refused_and_named(api: Api, fields: dict, names: str) -> None:
    error = api.refusal("Hi.", **fields)
    assert names in f"{error['param']} {error['message']}"


@pytest.mark.parametrize(("temperature", "top_p"), [(0, 1), (0.01, 0.01), (1, 0), (2, 1)])
def test_the_ends_of_temperature_and_mass_are_taken(
    api: Api, temperature: float, top_p: float
) -> None:
    api.answer("Hi.", temperature=temperature, top_p=top_p)


def test_no_mass_is_the_most_probable_token(api: Api) -> None:
    wish = {"temperature": 2, "max_tokens": 12, "ignore_eos": True}
    texts = {
        api.answer("Hi.", top_p=0, seed=seed, **wish)["choices"][0]["message"]["content"]
        for seed in (1, 2, 3)
    }
    assert len(texts) == 1


def test_an_unknown_model_is_named(api: Api) -> None:
    response = api.ask("Hi.", model="none-such")
    assert response.status_code in (400, 404)
    assert "none-such" in response.json()["error"]["message"]


def test_fields_that_other_apis_have_are_no_mistake(api: Api) -> None:
    api.answer("Hi.", reasoning_split=True, mask_sensitive_info=False, user="ann", metadata={})


def test_more_tokens_than_the_context_holds_are_the_callers_mistake(api: Api) -> None:
    # what the model allows; a worker with less memory has room for less, and says so
    most = 131_072
    api.refusal("Hi.", max_tokens=most + 1)
    response = api.ask("Hi. " * most, max_tokens=1)
    assert response.status_code == 400
    said = re.search(r"the context of (\d+) tokens", response.json()["error"]["message"])
    assert said is not None
    context = int(said[1])
    assert 0 < context <= most
    api.refusal("Hi.", max_tokens=context + 1)


def test_the_order_of_a_schemas_keys_is_kept() -> None:
    names = ["zeta", "alpha", "mid", "beta"]
    parameters = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    preparer = Preparer(builtin_checkpoint("tiny"))
    request, _ = preparer.chat({"messages": [user()], "tools": [function("f", parameters)]})
    prompt = preparer.detokenize(list(request.prompt_token_ids))
    places = [prompt.index(f'"{name}"') for name in names]
    assert places == sorted(places)


@pytest.mark.parametrize("name", ["get-weather", "mcp.server.tool", "a_b-c.d"])
def test_names_with_hyphens_and_dots_come_back_as_they_are(
    api: Api, saying: Callable[..., Api], name: str
) -> None:
    api.answer("Hi.", tools=[function(name)])
    said = saying(emitted(name, "x")).answer("Hi.", tools=[function(name)], max_tokens=99)
    assert said["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == name


def test_thirty_tools_are_taken(api: Api) -> None:
    api.answer("Hi.", tools=[function(f"tool_{number}") for number in range(30)])


def test_undeclared_tools_in_the_history_stay(api: Api) -> None:
    messages = [user(), calls(("c1", "forgotten_tool")), result("c1"), user()]
    with_other = api.prompt_tokens(messages=messages, tools=[function("f")])
    messages[1] = calls(("c1", "f"))
    assert with_other > api.prompt_tokens(messages=messages, tools=[function("f")])


def test_parallel_calls_have_ids_of_their_own(saying: Callable[..., Api]) -> None:
    said = saying(emitted("f", "1") + emitted("f", "2") + emitted("g", "3"))
    tools = [function("f"), function("g")]
    choice = said.answer("Hi.", tools=tools, max_tokens=999)["choices"][0]
    made = choice["message"]["tool_calls"]
    assert [call["function"]["name"] for call in made] == ["f", "f", "g"]
    assert len({call["id"] for call in made}) == 3
    assert choice["finish_reason"] == "tool_calls"
    assert not choice["message"]["content"]
    # and again, streamed: each id once, the arguments in one piece or many
    chunks = said.chunks("Hi.", tools=tools, max_tokens=999)
    pieces = [
        call
        for chunk in chunks
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls", [])
    ]
    assert [piece["index"] for piece in pieces if "id" in piece] == [0, 1, 2]
    for index, argument in enumerate("123"):
        fragments = [p["function"].get("arguments", "") for p in pieces if p["index"] == index]
        assert "".join(fragments) in (f'{{"a":{argument}}}', f'{{"a":"{argument}"}}')


def test_calls_are_calls_even_if_no_tool_was_declared(saying: Callable[..., Api]) -> None:
    choice = saying("Look: " + emitted("f", "1")).answer("Hi.", max_tokens=99)["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "f"
    assert MARK not in (choice["message"]["content"] or "")
    assert choice["finish_reason"] == "tool_calls"


def test_counts_add_up_and_stand_in_the_last_chunk_only(api: Api) -> None:
    wishes = {"stream_options": {"include_usage": True}, "max_tokens": 9, "ignore_eos": True}
    chunks = api.chunks("Count.", **wishes)
    told = [chunk for chunk in chunks if chunk.get("usage")]
    assert told == chunks[-1:]
    assert chunks[-1]["choices"] == []
    whole = api.answer("Count.", max_tokens=9, ignore_eos=True)["usage"]
    for usage in (told[0]["usage"], whole):
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert told[0]["usage"]["prompt_tokens"] == whole["prompt_tokens"]
    assert told[0]["usage"]["completion_tokens"] == whole["completion_tokens"] == 9


@pytest.mark.parametrize("limit", [1, 7])
def test_an_answer_cut_by_its_limit_has_exactly_that_many_tokens(api: Api, limit: int) -> None:
    cut = api.answer("Go on.", max_tokens=limit, ignore_eos=True)
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["usage"]["completion_tokens"] == limit


def test_a_prompt_asked_again_is_cached(api: Api) -> None:
    prompt = "A story that is long enough to fill pages. " * 60
    api.answer(prompt)
    details = api.answer(prompt)["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] > 0


def test_one_id_and_one_role_a_stream(api: Api) -> None:
    chunks = api.chunks("Hi.", max_tokens=20, ignore_eos=True)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert deltas(chunks, "role") == ["assistant"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
    assert [reason for reason in reasons if reason] == ["length"]


def test_thinking_can_be_off(api: Api) -> None:
    message = api.answer("Hi.", max_tokens=20, thinking=OFF)["choices"][0]["message"]
    assert not message.get("reasoning_content")
