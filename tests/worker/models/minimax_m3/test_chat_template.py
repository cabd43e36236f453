"""The tiny checkpoint's chat template renders M3's format: every documented example."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from m3stack.checkpoints import builtin_checkpoint

IDENTITY = (
    "Your model version is MiniMax-M3, developed by MiniMax. Knowledge cutoff: January 2026. "
    "Founded in early 2022, MiniMax is a global AI foundation model company committed to "
    "advancing the frontiers of AI towards AGI."
)
THINKING = (
    "\n\n<thinking_instructions>\nYou have a thinking capability that allows you to reason step by "
    "step before responding. When thinking is enabled, wrap your reasoning in "
    "<mm:think></mm:think> tags before your response. When thinking is disabled, begin your "
    "response directly after the </mm:think> prefix. When thinking is adaptive, decide on your own "
    "whether to think for the current turn.\n"
)
MODE_LINES = {
    "enabled": (
        "Current thinking mode: enabled. You MUST think step by step before every response, "
        "including after receiving function/tool results.\n"
    ),
    "disabled": "Current thinking mode: disabled. Do not output any thinking process.\n",
    "adaptive": (
        "Current thinking mode: adaptive. You are encouraged to think for complex "
        "decision-making, multi-step reasoning, or when analyzing function/tool results.\n"
    ),
    "xyz": "",
}
OPENINGS = {"enabled": "<mm:think>", "disabled": "</mm:think>", "adaptive": "", "xyz": ""}
HELPFUL = "You are a helpful assistant."
MARK = "]<]minimax[>["

Message = dict[str, Any]


def system(mode: str = "adaptive", identity: str = IDENTITY) -> str:
    closing = "</thinking_instructions>[e~[\n"
    return f"]~!b[]~b]system\n{identity}{THINKING}{MODE_LINES[mode]}{closing}"


def block(role: str, text: str) -> str:
    return f"]~b]{role}\n{text}[e~[\n"


@pytest.fixture(scope="module")
def render() -> Callable[..., str]:
    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = fail
    source = (builtin_checkpoint("tiny") / "chat_template.jinja").read_text(encoding="utf-8")
    return environment.from_string(source).render


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def assistant(content: Any = "", **fields: Any) -> Message:
    return {"role": "assistant", "content": content, **fields}


def call(name: str, arguments: Any) -> Message:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize("mode", MODE_LINES)
def test_mode_decides_one_line_and_the_opening(render: Callable[..., str], mode: str) -> None:
    text = render(messages=[user("Hi")], add_generation_prompt=True, thinking_mode=mode)
    opening = "]~b]ai\n" + OPENINGS[mode]
    assert text == system(mode) + block("developer", HELPFUL) + block("user", "Hi") + opening


def test_without_a_mode_thinking_is_adaptive(render: Callable[..., str]) -> None:
    text = render(messages=[user("Hi")], add_generation_prompt=True)
    assert text == system() + block("developer", HELPFUL) + block("user", "Hi") + "]~b]ai\n"


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_leading_instruction_becomes_the_developer_block(
    render: Callable[..., str], role: str
) -> None:
    text = render(messages=[{"role": role, "content": "Be terse."}, user("Hi")])
    assert text == system() + block("developer", "Be terse.") + block("user", "Hi")


def test_a_root_message_replaces_the_identity(render: Callable[..., str]) -> None:
    messages = [
        {"role": "root", "content": "ROOT"},
        {"role": "developer", "content": "DEV"},
        user("Hi"),
    ]
    expected = system(identity="ROOT") + block("developer", "DEV") + block("user", "Hi")
    assert render(messages=messages) == expected
    only_root = render(messages=[messages[0], user("Hi")])
    assert only_root == system(identity="ROOT") + block("developer", HELPFUL) + block("user", "Hi")


def test_no_messages_give_both_blocks(render: Callable[..., str]) -> None:
    expected = system() + block("developer", HELPFUL)
    assert render(messages=[]) == expected
    assert render(messages=[], add_generation_prompt=True) == expected + "]~b]ai\n"


@pytest.mark.parametrize("content", ["", None, []])
def test_an_empty_instruction_gives_the_default(render: Callable[..., str], content: Any) -> None:
    messages = [{"role": "system", "content": content}, user("Hi")]
    assert render(messages=messages) == render(messages=[user("Hi")])
    named = render(messages=messages, model_identity="I am X")
    assert named == system() + block("developer", "I am X") + block("user", "Hi")


def test_tools_calls_results_and_media_render_as_documented(render: Callable[..., str]) -> None:
    tool = {
        "name": "get_weather",
        "description": "Wetter für Städte",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    }
    arguments = {
        "city": "Köln <A&B>",
        "days": 3,
        "opt": {"deep": True, "xs": [1, "two", None, {"k": 1.5}]},
        "skip": None,
        "e": [],
        "f": {},
        "s": "",
    }
    messages = [
        user("Hi"),
        assistant(
            reasoning_content="think A",
            tool_calls=[call("get_weather", arguments), {"name": "now", "arguments": {}}],
        ),
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "content": [{"type": "text", "text": "12:00"}, {"type": "image"}]},
        assistant("It is sunny."),
        user(
            [
                {"type": "image"},
                {"type": "text", "text": "and this "},
                {"type": "video"},
                {"type": "text", "text": "?"},
            ]
        ),
    ]
    text = render(
        messages=messages,
        tools=[{"type": "function", "function": tool}],
        thinking_mode="enabled",
        add_generation_prompt=True,
    )
    assert text == system("enabled") + (
        "]~b]developer\nYou are a helpful assistant.\n\n# Tools\nYou may call one or more tools to "
        "assist with the user query.\nHere are the tools available in JSONSchema format:\n\n"
        '<tools>\n<tool>{"name": "get_weather", "description": "Wetter für Städte", '
        '"parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": '
        '{"type": "integer"}}, "required": ["city"]}}</tool>\n</tools>\n\nTo call tools, wrap all '
        "invocations in a single §<tool_call>§</tool_call> block. Parameter values containing "
        "nested objects or arrays are recursively expanded into XML elements. Example:\n\n"
        '§<tool_call>\n§<invoke name="tool-name-1">§<param-1>value-1§</param-1>§<param-2>'
        "§<item>§<key-a>val-a§</key-a>§<key-b>val-b§</key-b>§</item>§</param-2>§</invoke>\n"
        '§<invoke name="tool-name-2">§<param-1>value-1§</param-1>§</invoke>\n§</tool_call>'
        "[e~[\n]~b]user\nHi[e~[\n]~b]ai\n<mm:think>think A</mm:think>§<tool_call>\n"
        '§<invoke name="get_weather">§<city>Köln <A&B>§</city>§<days>3§</days>§<opt>§<deep>'
        "true§</deep>§<xs>§<item>1§</item>§<item>two§</item>§<item>§</item>§<item>§<k>1.5"
        "§</k>§</item>§</xs>§</opt>§<e>§</e>§<f>§</f>§<s>§</s>§</invoke>\n"
        '§<invoke name="now">§</invoke>\n§</tool_call>[e~[\n]~b]tool\n<response>sunny</response>'
        "\n<response>12:00]<]image[>[</response>[e~[\n]~b]ai\n</mm:think>It is sunny.[e~[\n"
        "]~b]user\n]<]image[>[and this ]<]video[>[?[e~[\n]~b]ai\n<mm:think>"
    ).replace("§", MARK)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (assistant("<mm:think>\nabc\n</mm:think>\n\nans\n"), "<mm:think>abc</mm:think>ans"),
        (assistant("abc</mm:think>ans"), "<mm:think>abc</mm:think>ans"),
        (
            assistant("abc</mm:think>ans", reasoning_content="R"),
            "<mm:think>R</mm:think>abc</mm:think>ans",
        ),
        (assistant("x", reasoning_content=""), "</mm:think>x"),
        (assistant("x", reasoning_content=None), "</mm:think>x"),
        (assistant("x\n"), "</mm:think>x\n"),
        (assistant("a</mm:think>b</mm:think>c"), "<mm:think>a</mm:think>c"),
        (assistant("<mm:think>a<mm:think>b</mm:think>c"), "<mm:think>b</mm:think>c"),
        (assistant("</mm:think>c"), "</mm:think>c"),
        (
            assistant([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
            "</mm:think>ab",
        ),
        (assistant(None), "</mm:think>"),
    ],
)
def test_reasoning_is_found_and_kept(
    render: Callable[..., str], message: Message, expected: str
) -> None:
    for mode in ("enabled", "disabled"):
        text = render(messages=[user("q"), message, user("r")], thinking_mode=mode)
        assert text.endswith(block("user", "q") + block("ai", expected) + block("user", "r"))


def test_later_instructions_are_not_rendered(render: Callable[..., str]) -> None:
    for role in ("system", "developer", "root"):
        messages = [user("a"), {"role": role, "content": "MID"}, user("b")]
        assert render(messages=messages) == render(messages=[user("a"), user("b")])


def test_unknown_parts_vanish_and_texts_join(render: Callable[..., str]) -> None:
    parts = ["raw ", {"type": "image_url", "image_url": "x"}, {"type": "text", "text": "t"}]
    assert render(messages=[user(parts)]).endswith(block("user", "raw t"))


def test_results_stand_together_until_another_turn(render: Callable[..., str]) -> None:
    def result(content: Any) -> Message:
        return {"role": "tool", "content": content}

    called = assistant("", tool_calls=[call("f", {})])
    output = [{"type": "tool_output", "output": "O"}, "S"]
    text = render(messages=[called, result("1"), user("u"), result(output), result("3")])
    assert text.endswith(
        "[e~[\n]~b]tool\n<response>1</response>[e~[\n]~b]user\nu[e~[\n"
        "]~b]tool\n<response>OS</response>\n<response>3</response>[e~[\n"
    )


def test_a_result_without_a_call_and_unparsed_arguments_are_errors(
    render: Callable[..., str],
) -> None:
    result = {"role": "tool", "content": "r"}
    for messages in ([user("q"), result], [assistant("a"), result]):
        with pytest.raises(jinja2.TemplateError, match="must follow an assistant message"):
            render(messages=messages)
    with pytest.raises(jinja2.TemplateError, match="arguments of tool call f must be an object"):
        render(messages=[assistant("", tool_calls=[call("f", "{}")])])


def test_text_that_looks_like_markup_is_not_escaped(render: Callable[..., str]) -> None:
    text = "[e~[ ]~b] <tool> & \"quotes\" 'too' {{ x }}"
    assert render(messages=[user(text)]).endswith(block("user", text))
