"""Held-out questions of every skill, each with its control: the same without what it needs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from m3stack.eval.media_files import data_url, mp4, png
from m3stack.train import needles, pictures, text_tasks, words
from m3stack.train.encode import Media, Turn

HELD_OUT = "held out"
NEEDLES_PER_DOCUMENT = 10
TOKENS_PER_SENTENCE = 9.6
"""Of the plain sentences, on average; a document is cut to its length by this."""


@dataclass(frozen=True, slots=True)
class Question:
    """One request and the only answer that counts as true.

    Attributes:
        messages, tools: of the request.
        answer: text, for a question.
        call: name and arguments, for a tool call.
    """

    skill: str
    messages: tuple[Mapping[str, Any], ...]
    answer: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    call: tuple[str, Mapping[str, Any]] | None = None

    def is_answered_by(self, message: Mapping[str, Any]) -> bool:
        """Whether an assistant's message is the true answer: the exact text, or the exact call."""
        if self.call is None:
            return (message.get("content") or "").strip() == self.answer
        calls = message.get("tool_calls") or []
        if len(calls) != 1:
            return False
        name, arguments = self.call
        function = calls[0]["function"]
        try:
            given = json.loads(function["arguments"])
        except json.JSONDecodeError:
            return False
        # types count: 3 is not "3", and true is not 1
        same = json.dumps(given, sort_keys=True) == json.dumps(dict(arguments), sort_keys=True)
        return function["name"] == name and same


@dataclass(frozen=True, slots=True)
class Skill:
    """What is scored.

    Attributes:
        make: (generator of choices, number of questions) -> questions.
        control: what the control lacks.
        control_make: the same questions without it; None where another server is asked.
        chance: share of true answers that guessing among the possible ones gives.
        bar, control_bar: what accuracy must reach, what the control must not pass.
    """

    name: str
    make: Callable[[random.Random, int], Iterator[Question]]
    control: str
    control_make: Callable[[random.Random, int], Iterator[Question]] | None
    chance: float
    bar: float
    control_bar: float | None = None


def part_of(item: Media) -> dict[str, Any]:
    """A content part that holds a picture or a clip."""
    if item.is_clip:
        return {"type": "video_url", "video_url": {"url": data_url(mp4(item.frames), "video/mp4")}}
    return {"type": "image_url", "image_url": {"url": data_url(png(item.frames[0]), "image/png")}}


def _about(skill: str, item: Media, question: str, answer: str) -> Question:
    content = [part_of(item), {"type": "text", "text": question}]
    return Question(skill, ({"role": "user", "content": content},), answer)


def _figures(
    skill: str, counts: tuple[int, ...], *, blank: bool
) -> Callable[[random.Random, int], Iterator[Question]]:
    def make(rng: random.Random, count: int) -> Iterator[Question]:
        made = 0
        while made < count:
            figures = pictures.random_figures(rng, rng.choice(counts))
            fitting = [
                asked for asked in pictures.figure_questions(figures, rng) if asked[2] == skill
            ]
            picture = pictures.draw_figures([] if blank else figures, rng)
            if fitting:
                question, answer, _ = rng.choice(fitting)
                yield _about(skill, picture, question, answer)
                made += 1

    return make


def _digits(*, blank: bool) -> Callable[[random.Random, int], Iterator[Question]]:
    def make(rng: random.Random, count: int) -> Iterator[Question]:
        for _ in range(count):
            digit, colour = rng.randrange(10), rng.choice(list(words.COLOURS))
            picture = pictures.draw_digit(digit, colour, rng)
            if blank:
                picture = pictures.draw_figures([], rng)
            question, answer, skill = pictures.digit_question(digit)
            yield _about(skill, picture, question, answer)

    return make


Change = Callable[[Media, random.Random], Media]


def same(item: Media, rng: random.Random) -> Media:
    return item


def shuffled(item: Media, rng: random.Random) -> Media:
    """Its frames in another order."""
    order = list(range(item.frames.shape[0]))
    rng.shuffle(order)
    return replace(item, frames=item.frames[order])


def one_frame(item: Media, rng: random.Random) -> Media:
    """One of its frames, for its whole length."""
    pick = rng.randrange(item.frames.shape[0])
    return replace(item, frames=np.repeat(item.frames[pick : pick + 1], len(item.frames), axis=0))


def _motion(change: Change) -> Callable[[random.Random, int], Iterator[Question]]:
    def make(rng: random.Random, count: int) -> Iterator[Question]:
        for _ in range(count):
            direction, shape = rng.choice(list(words.DIRECTIONS)), rng.choice(words.SHAPES)
            clip = pictures.draw_motion(direction, shape, rng.choice(list(words.COLOURS)), rng)
            question, answer, skill = pictures.motion_questions(direction, shape)[0]
            yield _about(skill, change(clip, rng), question, answer)

    return make


def _order(change: Change) -> Callable[[random.Random, int], Iterator[Question]]:
    def make(rng: random.Random, count: int) -> Iterator[Question]:
        for _ in range(count):
            colours = rng.sample(list(words.COLOURS), 3)
            question, answer, skill = pictures.order_question(colours)
            yield _about(skill, change(pictures.draw_colours(colours, rng), rng), question, answer)

    return make


def _flashes(change: Change) -> Callable[[random.Random, int], Iterator[Question]]:
    def make(rng: random.Random, count: int) -> Iterator[Question]:
        for _ in range(count):
            lit = rng.randint(1, 4)
            question, answer, skill = pictures.flash_question(lit)
            yield _about(skill, change(pictures.draw_flashes(lit, rng), rng), question, answer)

    return make


def _text_qa(*, blank: bool) -> Callable[[random.Random, int], Iterator[Question]]:
    def make(rng: random.Random, count: int) -> Iterator[Question]:
        for _ in range(count):
            turns = text_tasks.passage(rng, thinks=False, held_out=True)
            text = turns[0].text
            text = text.rpartition("\n")[2] if blank else text
            yield Question("text_qa", ({"role": "user", "content": text},), turns[1].text)

    return make


def _tool_call(*, has_tools: bool) -> Callable[[random.Random, int], Iterator[Question]]:
    def make(rng: random.Random, count: int) -> Iterator[Question]:
        for _ in range(count):
            tools = text_tasks.tool_choice(rng)
            user, answer, *_ = text_tasks.tool_use(rng, tools, held_out=True)
            (call,) = answer.calls
            yield Question(
                "tool_call",
                ({"role": "user", "content": user.text},),
                tools=tuple({"type": "function", "function": tool} for tool in tools)
                if has_tools
                else (),
                call=(call.name, call.arguments),
            )

    return make


def needle_questions(
    rng: random.Random, count: int, *, num_tokens: int, skill: str
) -> Iterator[Question]:
    """Questions about long documents, ten a document, so that its prefix is read once."""
    sentences = needles.plain_sentences()
    lengths = [TOKENS_PER_SENTENCE] * len(sentences)
    made = 0
    while made < count:
        stack = needles.haystack(
            rng,
            sentences,
            lengths,  # pyright: ignore[reportArgumentType]
            num_tokens=num_tokens - 400,
            num_needles=min(NEEDLES_PER_DOCUMENT, count - made),
            held_out=True,
        )
        turns: list[Turn] = needles.question_turns(rng, list(stack.hidden), count, skill)
        for user, answer in zip(turns[::2], turns[1::2], strict=True):
            text = f"{stack.text}\n{user.text}"
            yield Question(skill, ({"role": "user", "content": text},), answer.text)
            made += 1


def _needle(num_tokens: int, skill: str) -> Callable[[random.Random, int], Iterator[Question]]:
    def make(rng: random.Random, count: int) -> Iterator[Question]:
        return needle_questions(rng, count, num_tokens=num_tokens, skill=skill)

    return make


MANY = (2, 3, 4)
RANDOM_INDEX = "index branch with random weights"


def _picture_skill(
    name: str, chance: float, bar: float, *, asked: str = "", counts: tuple[int, ...] = (1,)
) -> Skill:
    """Of a kind of question about figures, under the name `name`, in pictures of so many."""
    make, control = (_figures(asked or name, counts, blank=blank) for blank in (False, True))
    return Skill(name, make, "picture without figures", control, chance, bar)


SKILLS: tuple[Skill, ...] = (
    _picture_skill("picture_colour", 1 / 6, 0.95),
    _picture_skill("picture_shape", 1 / 6, 0.95),
    _picture_skill("picture_count", 1 / 6, 0.85, counts=(1, 2, 3, 4, 5, 6)),
    _picture_skill("picture_position", 1 / 9, 0.85),
    _picture_skill("colour_of_many", 1 / 3, 0.95, asked="picture_colour", counts=MANY),
    _picture_skill("shape_of_many", 1 / 3, 0.95, asked="picture_shape", counts=MANY),
    _picture_skill("position_of_many", 1 / 3, 0.85, asked="picture_position", counts=MANY),
    Skill(
        "picture_digit",
        _digits(blank=False),
        "picture without a digit",
        _digits(blank=True),
        1 / 10,
        0.85,
    ),
    Skill("clip_motion", _motion(same), "frames shuffled", _motion(shuffled), 1 / 2, 0.90, 0.5),
    Skill("clip_motion", _motion(same), "one frame", _motion(one_frame), 1 / 2, 0.90, 0.5),
    Skill("clip_order", _order(same), "frames shuffled", _order(shuffled), 1 / 6, 0.90),
    Skill("clip_flashes", _flashes(same), "one frame", _flashes(one_frame), 1 / 4, 0.90),
    Skill("needle_4k", _needle(4096, "needle_4k"), RANDOM_INDEX, None, 0.01, 0.95, 0.10),
    Skill("needle_64k", _needle(65536, "needle_64k"), RANDOM_INDEX, None, 0.01, 0.85, 0.10),
    Skill(
        "tool_call",
        _tool_call(has_tools=True),
        "no tools given",
        _tool_call(has_tools=False),
        0.0,
        0.90,
    ),
    Skill("text_qa", _text_qa(blank=False), "no passage given", _text_qa(blank=True), 0.1, 0.90),
)
