"""Conversations as token ids with their loss weights, in the layout of the chat template.

The served path renders and tokenizes in the gateway; this is a fast stand-in for making training
data, held equal to it by tests. Texts are ASCII.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from m3stack.models.minimax_m3 import tiny_tokenizer

Pixels = NDArray[np.uint8]

MARK = "]<]minimax[>["
_END = "[e~["
_PATCH, _MERGE = 14, 2
_SQUARE = _PATCH * _MERGE

# the checkpoint's split pattern on ASCII, where letters are A-Z and a-z
_SPLIT = re.compile(
    r"[^\r\nA-Za-z0-9]?[A-Z]*[a-z]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\nA-Za-z0-9]?[A-Z]+[a-z]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[0-9]{1,3}"
    r"| ?[^\sA-Za-z0-9]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)
_ADDED = re.compile("|".join(re.escape(text) for text in tiny_tokenizer.ADDED_TOKENS))

_IDENTITY = (
    "Your model version is MiniMax-M3, developed by MiniMax. Knowledge cutoff: January 2026. "
    "Founded in early 2022, MiniMax is a global AI foundation model company committed to "
    "advancing the frontiers of AI towards AGI."
)
_THINKING = (
    "\n\n<thinking_instructions>\nYou have a thinking capability that allows you to reason step "
    "by step before responding. When thinking is enabled, wrap your reasoning in "
    "<mm:think></mm:think> tags before your response. When thinking is disabled, begin your "
    "response directly after the </mm:think> prefix. When thinking is adaptive, decide on your "
    "own whether to think for the current turn.\n"
)
_MODES = {
    "enabled": "Current thinking mode: enabled. You MUST think step by step before every "
    "response, including after receiving function/tool results.\n",
    "disabled": "Current thinking mode: disabled. Do not output any thinking process.\n",
    "adaptive": "Current thinking mode: adaptive. You are encouraged to think for complex "
    "decision-making, multi-step reasoning, or when analyzing function/tool results.\n",
}
_TOOLS = (
    "\n\n# Tools\nYou may call one or more tools to assist with the user query.\nHere are the "
    "tools available in JSONSchema format:\n\n<tools>\n"
)


@dataclass(frozen=True, slots=True)
class Media:
    """A still (one frame) or a clip; sides are multiples of 28, so that no resize happens.

    Attributes:
        frames: uint8 [F, height, width, 3].
        is_clip: a clip stands with one timestamp for every two frames, at one frame a second.
    """

    frames: Pixels
    is_clip: bool

    @property
    def grid_thw(self) -> tuple[int, int, int]:
        count, height, width, _ = self.frames.shape
        return (-(-count // 2), height // _PATCH, width // _PATCH)


Part = str | Media


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call: name and typed arguments."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """One message.

    Attributes:
        role: user, assistant or tool.
        skill: what an assistant's turn is an example of; turns without one carry no loss.
        told, value: the sentence of an earlier message that tells the answer, and the words of it
            that stand at the answer's end, before its full stop; for `hints`.
    """

    role: str
    parts: tuple[Part, ...]
    skill: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    told: str = ""
    value: str = ""

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns under one thinking mode, and the tools they may use."""

    turns: tuple[Turn, ...]
    mode: str = "disabled"
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(slots=True)
class Encoded:
    """Token ids and what training needs to know about each.

    Attributes:
        ids: token ids.
        answer: for a token that is to be predicted, the number of the answer it belongs to; -1
            for all others.
        skills: skill of each answer.
        media: (position of the item's first placeholder run, item).
        runs: (first position, count) of every placeholder run, in order.
        sources: (position of a token that is to be predicted, where it was said before).
    """

    ids: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    skills: list[str] = field(default_factory=list)
    media: list[Media] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)
    sources: list[tuple[int, int]] = field(default_factory=list)

    def copy(self) -> Encoded:
        return Encoded(
            list(self.ids),
            list(self.answer),
            list(self.skills),
            list(self.media),
            list(self.runs),
            list(self.sources),
        )


class Encoder:
    """Tokenizes ASCII text and lays out conversations.

    Args:
        tokenizer_json: of the tiny checkpoint.
    """

    def __init__(self, tokenizer_json: Path) -> None:
        model = json.loads(tokenizer_json.read_text(encoding="utf-8"))["model"]
        self._vocab: dict[str, int] = model["vocab"]
        self._ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
        self._letters = tiny_tokenizer.byte_letters()
        self._cache: dict[str, list[int]] = {}
        self._openings: dict[tuple[str, str], Encoded] = {}
        self._image = tiny_tokenizer.token_id(tiny_tokenizer.IMAGE)
        self._video = tiny_tokenizer.token_id(tiny_tokenizer.VIDEO)
        self._start = tiny_tokenizer.token_id("]<]start of image[>[")
        self._end = tiny_tokenizer.token_id("]<]end of image[>[")

    def text_ids(self, text: str) -> list[int]:
        """Ids of a text, control tokens in it meant as such."""
        assert text.isascii(), text
        ids: list[int] = []
        begin = 0
        for match in _ADDED.finditer(text):
            self._plain(text[begin : match.start()], ids)
            ids.append(tiny_tokenizer.token_id(match.group()))
            begin = match.end()
        self._plain(text[begin:], ids)
        return ids

    def opening(self, mode: str, tools: tuple[Mapping[str, Any], ...] = ()) -> Encoded:
        """System and developer block, with which every conversation begins."""
        text = opening_text(mode, tools)
        key = (mode, text)
        if key not in self._openings:
            if len(self._openings) > 512:
                self._openings.clear()
            encoded = Encoded()
            self._append(encoded, self.text_ids(text))
            self._openings[key] = encoded
        return self._openings[key].copy()

    def conversation(self, conversation: Conversation) -> Encoded:
        """A whole conversation."""
        encoded = self.opening(conversation.mode, conversation.tools)
        for turn in conversation.turns:
            self.add_turn(encoded, turn, conversation.mode)
        return encoded

    def add_turn(self, encoded: Encoded, turn: Turn, mode: str) -> None:
        """Appends a message to a conversation that is laid out already."""
        if turn.role == "assistant":
            self._add_answer(encoded, turn, mode)
            return
        pending = "]~b]tool\n<response>" if turn.role == "tool" else f"]~b]{turn.role}\n"
        for part in turn.parts:
            if isinstance(part, str):
                pending += part
                continue
            for pending_ids in self._media(encoded, part, pending):
                self._append(encoded, pending_ids)
            pending = ""
        pending += "</response>" if turn.role == "tool" else ""
        self._append(encoded, self.text_ids(f"{pending}{_END}\n"))

    def _add_answer(self, encoded: Encoded, turn: Turn, mode: str) -> None:
        opening, answer = "]~b]ai\n", answer_text(turn)
        for given in {"enabled": ("<mm:think>",), "disabled": ("</mm:think>",)}.get(mode, ()):
            if answer.startswith(given):
                opening, answer = opening + given, answer[len(given) :]
        self._append(encoded, self.text_ids(opening))
        number = -1
        if turn.skill:
            number = len(encoded.skills)
            encoded.skills.append(turn.skill)
        if turn.told:
            encoded.sources += self._sources(encoded.ids, turn, answer)
        self._append(encoded, self.text_ids(answer + _END), number)
        self._append(encoded, self.text_ids("\n"))

    def _sources(self, ids: list[int], turn: Turn, answer: str) -> Iterator[tuple[int, int]]:
        """Where each token of the value will stand, and where it was told."""
        value = self.text_ids(f" {turn.value}")
        first = len(ids) + len(self.text_ids(answer.removesuffix(f" {turn.value}.")))
        # a sentence begins with a space, but for the first of a message; the last one's full stop
        # is one token with the line's end
        for begin in (" ", ""):
            told = self.text_ids(begin + turn.told.removesuffix("."))
            at = last_run(ids, told)
            if at >= 0:
                at += last_run(told, value)
                yield from zip(
                    range(first, first + len(value)), range(at, at + len(value)), strict=True
                )
                return

    def _media(self, encoded: Encoded, item: Media, before: str) -> Iterator[list[int]]:
        patches, height, width = item.grid_thw
        count = height * width // _MERGE**2
        token = self._video if item.is_clip else self._image
        encoded.media.append(item)
        for index in range(patches):
            stamp = f"]<]{2 * index:.1f} seconds[>[" if item.is_clip else ""
            ids = self.text_ids(before + stamp)
            before = ""
            encoded.runs.append((len(encoded.ids) + len(ids) + 1, count))
            yield [*ids, self._start, *([token] * count), self._end]

    def _append(self, encoded: Encoded, ids: list[int], answer: int = -1) -> None:
        encoded.ids += ids
        encoded.answer += [answer] * len(ids)

    def _plain(self, text: str, ids: list[int]) -> None:
        for piece in _SPLIT.findall(text):
            found = self._cache.get(piece)
            if found is None:
                found = self._cache[piece] = self._merge(piece)
            ids += found

    def _merge(self, piece: str) -> list[int]:
        parts = [self._letters[value] for value in piece.encode()]
        while len(parts) > 1:
            ranks = [self._ranks.get(pair) for pair in pairwise(parts)]
            best = min((rank for rank in ranks if rank is not None), default=None)
            if best is None:
                break
            at = ranks.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [self._vocab[part] for part in parts]


def last_run(ids: list[int], run: list[int]) -> int:
    """Where a run of ids stands for the last time, or -1."""
    there, wanted = (array("i", values).tobytes() for values in (ids, run))
    size, end = array("i").itemsize, len(there)
    while (at := there.rfind(wanted, 0, end)) % size:
        if at < 0:
            return -1
        # ids begin at multiples of their size alone
        end = at + len(wanted) - 1
    return at // size


def opening_text(mode: str, tools: tuple[Mapping[str, Any], ...]) -> str:
    """System and developer block as text."""
    text = f"]~!b[]~b]system\n{_IDENTITY}{_THINKING}{_MODES[mode]}</thinking_instructions>{_END}\n"
    text += "]~b]developer\nYou are a helpful assistant."
    if tools:
        listed = "".join(f"<tool>{json.dumps(tool)}</tool>\n" for tool in tools)
        pairs = [{"key-a": "val-a", "key-b": "val-b"}]
        example = (
            Call("tool-name-1", {"param-1": "value-1", "param-2": pairs}),
            Call("tool-name-2", {"param-1": "value-1"}),
        )
        text += (
            f"{_TOOLS}{listed}</tools>\n\nTo call tools, wrap all invocations in a single "
            f"{MARK}<tool_call>{MARK}</tool_call> block. Parameter values containing nested "
            f"objects or arrays are recursively expanded into XML elements. Example:\n\n"
            f"{calls_text(example)}"
        )
    return f"{text}{_END}\n"


def answer_text(turn: Turn) -> str:
    """What the model writes in an assistant's turn, thinking tags included."""
    thought = f"<mm:think>{turn.reasoning}</mm:think>" if turn.reasoning else "</mm:think>"
    return thought + turn.text + (calls_text(turn.calls) if turn.calls else "")


def calls_text(calls: tuple[Call, ...]) -> str:
    """The block of tool calls."""
    invokes = "".join(
        f'{MARK}<invoke name="{call.name}">{_value_text(call.arguments)}{MARK}</invoke>\n'
        for call in calls
    )
    return f"{MARK}<tool_call>\n{invokes}{MARK}</tool_call>"


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "".join(
            f"{MARK}<{key}>{_value_text(inner)}{MARK}</{key}>" for key, inner in value.items()
        )
    if isinstance(value, list | tuple):
        return "".join(f"{MARK}<item>{_value_text(inner)}{MARK}</item>" for inner in value)
    return str(value)


def patches_of(item: Media) -> Pixels:
    """An item's patch rows, uint8 [t*h*w, 3 * frames * 14 * 14], as the gateway sends them.

    A still has one frame a row, a clip two; an odd clip repeats its last frame.
    """
    frames = item.frames
    per_patch = 2 if item.is_clip else 1
    if frames.shape[0] % per_patch:
        frames = np.concatenate([frames, frames[-1:]])
    t, h, w = frames.shape[0] // per_patch, frames.shape[1] // _SQUARE, frames.shape[2] // _SQUARE
    cut = frames.reshape(t, per_patch, h, _MERGE, _PATCH, w, _MERGE, _PATCH, 3)
    #      t  by bx iy ix  c tau  y  x
    order = (0, 2, 5, 3, 6, 8, 1, 4, 7)
    return np.ascontiguousarray(cut.transpose(order)).reshape(t * h * w * _MERGE**2, -1)
