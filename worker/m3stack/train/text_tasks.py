"""Episodes of text: copying, arithmetic, questions about a passage, tool calls."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from m3stack.train import words
from m3stack.train.encode import Call, Turn

Episode = list[Turn]


def asked(question: str, answer: str, skill: str, reasoning: str = "", told: str = "") -> Episode:
    """One question and its answer, whose last word a sentence has told."""
    value = answer.removesuffix(".").rpartition(" ")[2] if told else ""
    return [
        Turn("user", (question,)),
        Turn("assistant", (answer,), skill, reasoning, told=told, value=value),
    ]


def copying(rng: random.Random) -> Episode:
    """A list of words to be said again; long ones teach most to find what followed a word."""
    said = " ".join(rng.choice(words.NOUNS) for _ in range(rng.choice((2, 3, 4, 6, 8, 16, 32))))
    return asked(f"Repeat these words: {said}", said, "copy")


def arithmetic(rng: random.Random, *, thinks: bool, held_out: bool = False) -> Episode:
    """A sum or a difference of numbers up to 99."""
    while True:
        left, right = rng.randint(0, 99), rng.randint(0, 99)
        if rng.random() < 0.7:
            left, right = left // 4, right // 4
        sign = "minus" if rng.random() < 0.4 else "plus"
        if sign == "minus":
            left, right = max(left, right), min(left, right)
        # as it is asked: a difference is not the sum of the same numbers
        if words.is_held_out(left, sign, right) == held_out:
            break
    result = left - right if sign == "minus" else left + right
    reasoning = f"I count {left} {sign} {right}." if thinks else ""
    question = f"How much is {left} {sign} {right}?"
    return asked(question, f"{left} {sign} {right} equals {result}.", "arithmetic", reasoning)


def passage(rng: random.Random, *, thinks: bool, held_out: bool = False) -> Episode:
    """Facts about a few people, and questions about them.

    The facts that are asked about are held out, or none that the text tells is:
    `words.is_held_out`.
    """
    people = rng.sample(words.NAMES, rng.randint(2, 4))
    facts = [fact for person in people for fact in _facts(rng, person)]
    if not held_out:
        facts = [fact for fact in facts if not words.is_held_out(*fact[3])]
    rng.shuffle(facts)
    facts = facts[: rng.randint(3, 7)]
    text = " ".join(fact for fact, _, _, _ in facts)
    fitting = [fact for fact in facts if words.is_held_out(*fact[3]) == held_out]
    if not fitting:
        return passage(rng, thinks=thinks, held_out=held_out)
    rng.shuffle(fitting)
    turns: Episode = []
    for sentence, question, answer, _ in fitting[: rng.randint(1, 4)]:
        prompt = f"{text}\n{question}" if not turns else question
        turns += asked(prompt, answer, "text_qa", sentence if thinks else "", told=sentence)
    if not held_out and rng.random() < 0.4:
        absent = rng.choice([name for name in words.NAMES if name not in people])
        question = rng.choice((f"Where does {absent} live?", f"What does {absent} like?"))
        turns += asked(question, "The text does not say.", "refusal", "")
    return turns


def _facts(rng: random.Random, person: str) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """(sentence, question, answer, the fact itself) about a person."""
    city, food = rng.choice(words.CITIES), rng.choice(words.FOODS)
    yield (
        f"{person} lives in {city}.",
        f"Where does {person} live?",
        f"{person} lives in {city}.",
        (person, city),
    )
    yield (
        f"{person} likes {food}.",
        f"What does {person} like?",
        f"{person} likes {food}.",
        (person, food),
    )
    thing, colour = rng.choice(words.THINGS), rng.choice(list(words.COLOURS))
    yield (
        f"{person} has a {colour} {thing}.",
        f"What colour is the {thing} of {person}?",
        f"The {thing} of {person} is {colour}.",
        (person, thing, colour),
    )
    place, pet = rng.choice(words.WORKPLACES), rng.choice(words.ANIMALS)
    yield (
        f"{person} works in the {place}.",
        f"Where does {person} work?",
        f"{person} works in the {place}.",
        (person, place),
    )
    yield (
        f"The pet of {person} is a {pet}.",
        f"What is the pet of {person}?",
        f"The pet of {person} is a {pet}.",
        (person, pet),
    )


def fact_parts(rng: random.Random, person: str) -> list[tuple[str, str]]:
    """Sentences about a person, each cut before its last word; facts that are held out are not
    among them.
    """
    told: list[tuple[str, str]] = []
    for sentence, _, _, fact in _facts(rng, person):
        if not words.is_held_out(*fact) and not sentence.startswith(f"{person} has"):
            subject, _, value = sentence.rpartition(" ")
            told.append((subject, f" {value}"))
    return told or fact_parts(rng, person)


Tool = dict[str, Any]


def _tool(name: str, description: str, **types: str) -> Tool:
    return {
        "name": name,
        "description": description,
        "parameters": {
            "type": "object",
            "properties": {key: _schema(kind) for key, kind in types.items()},
            "required": list(types),
        },
    }


def _schema(kind: str) -> dict[str, Any]:
    if kind == "strings":
        return {"type": "array", "items": {"type": "string"}}
    return {"type": kind}


TOOLS: Mapping[str, Tool] = {
    tool["name"]: tool
    for tool in (
        _tool("get_weather", "weather of a city", city="string", days="integer"),
        _tool("set_light", "light of a room", room="string", enabled="boolean"),
        _tool("set_timer", "start a timer", minutes="integer", label="string"),
        _tool("send_message", "send a text", to="string", text="string"),
        _tool("add_items", "add to the list", items="strings"),
        _tool("set_heat", "heat of a room", room="string", degrees="number"),
    )
}


def tool_choice(rng: random.Random) -> tuple[Tool, ...]:
    """One to three tools that a conversation may use."""
    return tuple(TOOLS[name] for name in rng.sample(list(TOOLS), rng.randint(1, 3)))


def tool_use(
    rng: random.Random, tools: tuple[Tool, ...], *, held_out: bool = False, thinks: bool = False
) -> Episode:
    """A request that one of the tools fits, its call and, sometimes, what came of it."""
    while True:
        name = rng.choice(tools)["name"]
        question, arguments = _request(rng, name)
        if words.is_held_out(name, *arguments.values()) == held_out:
            break
    reasoning = f"I call {name}." if thinks else ""
    call = Turn("assistant", (), "tool_call", reasoning, (Call(name, arguments),))
    turns = [Turn("user", (question,)), call]
    if rng.random() < 0.5:
        word = rng.choice(words.ADJECTIVES)
        turns.append(Turn("tool", (word,)))
        turns.append(Turn("assistant", (f"The result is {word}.",), "tool_result", ""))
    return turns


def _request(rng: random.Random, name: str) -> tuple[str, dict[str, Any]]:
    room = rng.choice(words.WORKPLACES)
    if name == "get_weather":
        city, days = rng.choice(words.CITIES), rng.randint(1, 9)
        return f"What is the weather in {city} in {days} days?", {"city": city, "days": days}
    if name == "set_light":
        enabled = rng.random() < 0.5
        wish = "on" if enabled else "off"
        return f"Turn {wish} the light in the {room}.", {"room": room, "enabled": enabled}
    if name == "set_timer":
        minutes, label = rng.randint(1, 60), rng.choice(words.FOODS)
        return (
            f"Set a timer for {label} to {minutes} minutes.",
            {"minutes": minutes, "label": label},
        )
    if name == "send_message":
        person = rng.choice(words.NAMES)
        text = " ".join(rng.choice(words.NOUNS) for _ in range(rng.randint(1, 4)))
        return f"Send {person} this message: {text}", {"to": person, "text": text}
    if name == "add_items":
        items = [rng.choice(words.NOUNS) for _ in range(rng.randint(1, 3))]
        return f"Add {' and '.join(items)} to the list.", {"items": items}
    assert name == "set_heat", name
    degrees = rng.randint(10, 30) + 0.5
    return f"Set the heat in the {room} to {degrees}.", {"room": room, "degrees": degrees}
