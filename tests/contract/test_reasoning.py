"""Thinking: its modes, its efforts, its field, and its place in counts and history."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.contract.conftest import Api, deltas

THOUGHT, ANSWER = "Let me see what that is.", "It is a fox."


def message(api: Api, **fields: object) -> dict:
    return api.answer("Hi.", max_tokens=99, **fields)["choices"][0]["message"]


@pytest.mark.parametrize("kind", ["enabled", "disabled", "adaptive"])
def test_every_mode_is_taken(api: Api, kind: str) -> None:
    api.answer("Hi.", thinking={"type": kind})


@pytest.mark.parametrize("kind", ["sometimes", "", None, 1])
def test_another_mode_is_refused_or_the_default(api: Api, kind: object) -> None:
    assert api.ask("Hi.", thinking={"type": kind}).status_code in (200, 400, 422)


@pytest.mark.parametrize(
    "effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max", "unheard-of"]
)
def test_every_effort_is_taken_and_an_unknown_one_ignored(api: Api, effort: str) -> None:
    api.answer("Hi.", reasoning_effort=effort, thinking=None)


def test_a_word_on_thinking_stands_before_an_effort(saying: Callable[..., Api]) -> None:
    said = saying(f"{THOUGHT}</mm:think>{ANSWER}")
    kept = message(said, thinking={"type": "enabled"}, reasoning_effort="none")
    assert kept["reasoning_content"] == THOUGHT


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({"thinking": {"type": "enabled"}}, True),
        ({"thinking": None, "reasoning_effort": "high"}, True),
        ({"thinking": None, "reasoning_effort": "max"}, True),
        ({"thinking": None, "chat_template_kwargs": {"thinking_mode": "enabled"}}, True),
    ],
)
def test_thinking_that_the_prompt_opens_is_thinking(
    saying: Callable[..., Api], fields: dict, thinks: bool
) -> None:
    said = saying(f"{THOUGHT}</mm:think>{ANSWER}")
    kept = message(said, **fields)
    assert (kept.get("reasoning_content") == THOUGHT) == thinks
    assert kept["content"] == ANSWER


def test_thinking_that_the_model_opens_is_thinking(saying: Callable[..., Api]) -> None:
    said = saying(f"<mm:think>{THOUGHT}</mm:think>{ANSWER}")
    kept = message(said, thinking={"type": "adaptive"})
    assert (kept["reasoning_content"], kept["content"]) == (THOUGHT, ANSWER)


def test_thinking_is_counted_and_streamed_apart(saying: Callable[..., Api]) -> None:
    said = saying(f"{THOUGHT}</mm:think>{ANSWER}")
    wishes = {"thinking": {"type": "enabled"}, "stream_options": {"include_usage": True}}
    chunks = said.chunks("Hi.", max_tokens=99, **wishes)
    assert "".join(deltas(chunks, "reasoning_content")) == THOUGHT
    assert "".join(deltas(chunks, "content")) == ANSWER
    usage = chunks[-1]["usage"]
    reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < reasoning < usage["completion_tokens"]
    whole = said.answer("Hi.", max_tokens=99, thinking={"type": "enabled"})["usage"]
    assert whole["completion_tokens_details"]["reasoning_tokens"] == reasoning


def test_only_thinking_is_never_the_whole_answer_by_mistake(saying: Callable[..., Api]) -> None:
    kept = message(saying(f"</mm:think>{ANSWER}"), thinking={"type": "enabled"})
    assert kept["content"] == ANSWER
    assert not kept.get("reasoning_content")


def test_thinking_comes_back_in_a_tool_loop(api: Api) -> None:
    def used(**thought: str) -> int:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        turns = [
            {"role": "user", "content": "Hi."},
            {"role": "assistant", "content": None, "tool_calls": [call], **thought},
            {"role": "tool", "tool_call_id": "c", "content": "done"},
        ]
        return api.prompt_tokens(messages=turns, thinking={"type": "enabled"})

    assert used(reasoning_content=THOUGHT) == used(reasoning=THOUGHT) > used()


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("reasoning_content", {"reasoning_content"}),
        ("reasoning", {"reasoning"}),
        ("both", {"reasoning", "reasoning_content"}),
    ],
)
def test_thinking_goes_out_under_the_name_that_is_set(
    saying: Callable[..., Api], setting: str, names: set[str]
) -> None:
    said = saying(f"{THOUGHT}</mm:think>{ANSWER}", "--set", f"reasoning_field={setting}")
    kept = message(said, thinking={"type": "enabled"})
    chunks = said.chunks("Hi.", max_tokens=99, thinking={"type": "enabled"})
    for name in ("reasoning", "reasoning_content"):
        assert kept.get(name) == (THOUGHT if name in names else None)
        assert "".join(deltas(chunks, name)) == (THOUGHT if name in names else "")
    assert "".join(deltas(chunks, "content")) == kept["content"] == ANSWER
