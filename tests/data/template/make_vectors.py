"""Makes vectors.json: templates, variables, and what Jinja2 renders as transformers sets it up.

Run: python tests/data/template/make_vectors.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import _compile_jinja_template

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
NUM_CONVERSATIONS = 160
NUM_VALUES = 120

TEXTS = [
    "",
    "Hi",
    "a b  a\n",
    "\n\nspaced\t \n",
    "Köln <A&B> 'x' \"y\" \\n",
    "北京 ☀️🚲",
    "abba",
    "<mm:think>\nabc\n</mm:think>\n\nans\n",
    "abc</mm:think>ans",
    "a</mm:think>b<mm:think>c</mm:think>d",
    "5",
    "None",
    "\u0001\u007f\x80",
]
NUMBERS = [
    0,
    -1,
    3,
    1.5,
    -0.0,
    1.0,
    1e16,
    1e15,
    123456789.125,
    1e-4,
    1e-5,
    1.5e-7,
    1e22,
    5e-324,
    1.7976931348623157e308,
    2**63,
    2**64 + 1,
    10**40,
    -(10**40),
    0.1 + 0.2,
]
KEYS = ["a", "b", "name", "item", "-n", "$filter", "Ünï", "k k", "type", "z9"]


def random_value(rng: random.Random, depth: int = 0) -> Any:
    """A JSON value."""
    kind = rng.randrange(8 if depth < 3 else 5)
    if kind == 0:
        return None
    if kind == 1:
        return rng.random() < 0.5
    if kind == 2:
        return rng.choice(NUMBERS)
    if kind in (3, 4):
        return rng.choice(TEXTS)
    if kind == 5:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    keys = rng.sample(KEYS, rng.randrange(4))
    return {key: random_value(rng, depth + 1) for key in keys}


def random_arguments(rng: random.Random) -> dict[str, Any]:
    return {key: random_value(rng) for key in rng.sample(KEYS, rng.randrange(4))}


def random_content(rng: random.Random, *, media: bool) -> Any:
    """A string, or a list of parts."""
    if rng.random() < 0.6:
        return rng.choice(TEXTS)
    kinds = ["text", "text", "image", "video", "string"] if media else ["text", "string"]
    parts: list[Any] = []
    for kind in rng.choices(kinds, k=rng.randrange(4)):
        text = rng.choice(TEXTS)
        if kind == "text":
            parts.append({"type": "text", "text": text})
        elif kind == "string":
            parts.append(text)
        else:
            parts.append({"type": kind})
    return parts


def random_message(rng: random.Random, *, may_answer: bool) -> dict[str, Any]:
    roles = ["user", "user", "assistant", "assistant", "system", "developer"]
    role = rng.choice(roles + ["tool"] * (4 if may_answer else 0))
    message: dict[str, Any] = {"role": role}
    message["content"] = random_content(rng, media=role in ("user", "tool"))
    if role == "assistant":
        if rng.random() < 0.4:
            message["reasoning_content"] = rng.choice(TEXTS)
        if rng.random() < 0.4:
            calls = []
            for _ in range(rng.randrange(1, 4)):
                function = {"name": rng.choice(KEYS), "arguments": random_arguments(rng)}
                flat = rng.random() < 0.2
                calls.append(function if flat else {"type": "function", "function": function})
            message["tool_calls"] = calls
    return message


def random_conversation(rng: random.Random) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.2:
        messages.append({"role": "root", "content": rng.choice(TEXTS)})
    if rng.random() < 0.5:
        role = rng.choice(["system", "developer"])
        messages.append({"role": role, "content": random_content(rng, media=False)})
    called = False
    for _ in range(rng.randrange(6)):
        # now and then a result without a call, which the template must refuse
        message = random_message(rng, may_answer=called or rng.random() < 0.05)
        if message["role"] == "assistant":
            called = "tool_calls" in message
        messages.append(message)
    variables: dict[str, Any] = {"messages": messages}
    variables["add_generation_prompt"] = rng.random() < 0.7
    if rng.random() < 0.5:
        variables["thinking_mode"] = rng.choice(["enabled", "disabled", "adaptive", "xyz"])
    if rng.random() < 0.2:
        variables["model_identity"] = rng.choice(TEXTS)
    tools = [
        {
            "type": "function",
            "function": {
                "name": rng.choice(KEYS),
                "description": rng.choice(TEXTS),
                "parameters": random_value(rng),
            },
        }
        for _ in range(rng.choice([0, 0, 1, 3]))
    ]
    variables["tools"] = tools or None
    return variables


def render(source: str, variables: dict[str, Any]) -> dict[str, Any]:
    """What Jinja2 makes of it: `rendered`, or `refused` with the template's own message."""
    try:
        return {"rendered": _compile_jinja_template(source).render(**variables)}
    except TemplateError as error:
        return {"refused": str(error)}


def main() -> None:
    rng = random.Random(20260115)
    m3 = REPOSITORY / "worker/m3stack/checkpoints/tiny/chat_template.jinja"
    templates = {"m3": m3.read_text(), "python": (HERE / "python.jinja").read_text()}
    cases = []
    for _ in range(NUM_CONVERSATIONS):
        cases.append(("m3", random_conversation(rng)))
    fixed = [{"value": value} for value in [*TEXTS, "\u2028\ufeff", *NUMBERS, None, True, [], {}]]
    for variables in fixed + [{"value": random_value(rng)} for _ in range(NUM_VALUES)]:
        cases.append(("python", variables))
    vectors = [
        {"template": name, "variables": variables, **render(templates[name], variables)}
        for name, variables in cases
    ]
    out = {"templates": templates, "cases": vectors}
    text = json.dumps(out, ensure_ascii=False, indent=None, separators=(",", ":"))
    (HERE / "vectors.json").write_text(text.replace('{"template":', '\n{"template":') + "\n")


if __name__ == "__main__":
    main()
