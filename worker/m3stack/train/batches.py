"""Training batches: rows of one conversation each, a pure function of seed and number."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from m3stack.train import drills, needles, pictures, text_tasks
from m3stack.train.encode import Encoded, Encoder, Media, Turn, patches_of

SHORT_TOKENS = 1024
"""Length of a row of everyday conversation."""

TAIL_TOKENS = 16
"""Positions at the end of a row that no conversation reaches."""

NO_ANSWER = -1

NEEDLE_THOUSANDS = (1, 2, 4, 8, 16, 32, 64)
"""Thousands of tokens of the long documents."""

NEEDLES_OF = {1: (6, 10), 2: (14, 24), 4: (16, 28), 8: (16, 28)}
"""Fewest and most passwords of a document of so many thousand tokens; longer ones have more."""

SKILLS = (
    *("arithmetic", "clip_colour", "clip_flashes", "clip_motion", "clip_order", "copy"),
    *("count_kind", "drill_copy", "drill_recall", "needle_short", "picture_cell"),
    *("picture_colour", "picture_count"),
    *("picture_description", "picture_digit", "picture_position", "picture_shape", "refusal"),
    *("text_qa", "tool_call", "tool_result"),
    *(f"needle_{thousands}k" for thousands in NEEDLE_THOUSANDS),
)
"""What an answer can be an example of; a batch has their numbers."""

_NUMBERS = {name: number for number, name in enumerate(SKILLS)}


@dataclass(frozen=True, slots=True)
class BatchKind:
    """What a batch is to hold.

    Attributes:
        num_rows, num_tokens: its shape; `num_tokens` is a multiple of the block.
        num_media_rows: rows that may hold pictures and clips; the others hold text.
        is_needle: rows are long documents with passwords to find.
        is_drill: rows say everything twice (`drills`).
    """

    num_rows: int
    num_tokens: int
    num_media_rows: int = 0
    is_needle: bool = False
    is_drill: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of token ids, what is to be predicted where, and the media in them.

    Attributes:
        ids_T: int64 [rows * tokens]; after a conversation's end, its last id repeats.
        kind: the shape.
        loss_rows_S: int64, rows of the step whose next token is to be predicted.
        targets_S: int64, those tokens.
        answers_S: int64, number of the answer each belongs to.
        skills_A: int64, number in `SKILLS` of each answer's skill.
        told_rows_N: int64, rows of the step whose next token was said before, by the text.
        sources_N: int64, where in its sequence that was.
        patches: grid -> uint8 [items * t*h*w, values] of all items of that grid.
        media_rows: grid -> int64, rows of the step that the items' features replace.
    """

    ids_T: Tensor
    kind: BatchKind
    loss_rows_S: Tensor
    targets_S: Tensor
    answers_S: Tensor
    skills_A: Tensor
    told_rows_N: Tensor
    sources_N: Tensor
    patches: Mapping[tuple[int, int, int], Tensor]
    media_rows: Mapping[tuple[int, int, int], Tensor]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The same with every tensor changed."""
        return replace(
            self,
            ids_T=change(self.ids_T),
            loss_rows_S=change(self.loss_rows_S),
            targets_S=change(self.targets_S),
            answers_S=change(self.answers_S),
            skills_A=change(self.skills_A),
            told_rows_N=change(self.told_rows_N),
            sources_N=change(self.sources_N),
            patches={grid: change(x) for grid, x in self.patches.items()},
            media_rows={grid: change(x) for grid, x in self.media_rows.items()},
        )

    def pin_memory(self) -> Batch:
        """In memory that a GPU can copy from on its own; the data loader calls this."""
        return self.mapped(Tensor.pin_memory)


class BatchMaker:
    """Makes batches; equal arguments give equal batches, on every machine.

    Args:
        encoder: of the tiny tokenizer.
        seed: of everything.
    """

    def __init__(self, encoder: Encoder, seed: int) -> None:
        self._encoder, self._seed = encoder, seed
        self._sentences = needles.plain_sentences()
        self._sentence_ids = [encoder.text_ids(f" {text}") for text in self._sentences]
        self._lengths = [len(ids) for ids in self._sentence_ids]
        self._known = dict(zip(self._sentences, self._sentence_ids, strict=True))

    def make(self, number: int, kind: BatchKind) -> Batch:
        """Batch `number` of a kind."""
        rows: list[Encoded] = []
        for row in range(kind.num_rows):
            rng = random.Random(f"{self._seed}/{number}/{row}/{kind.num_tokens}")
            if kind.is_needle:
                rows.append(self._needle_row(rng, kind.num_tokens))
            elif kind.is_drill:
                rows.append(drills.drill_row(rng, self._encoder, self._sentences))
            else:
                rows.append(
                    self._short_row(rng, kind.num_tokens, has_media=row < kind.num_media_rows)
                )
        return collate(rows, kind)

    def _short_row(self, rng: random.Random, num_tokens: int, *, has_media: bool) -> Encoded:
        mode = rng.choices(("disabled", "adaptive", "enabled"), (6, 2, 2))[0]
        tools = ()
        if not has_media and rng.random() < 0.45:
            tools = text_tasks.tool_choice(rng)
        encoded = self._encoder.opening(mode, tools)
        failures = 0
        while failures < 2:
            before = encoded.copy()
            for turn in self._episode(rng, mode, tools, has_media=has_media):
                self._encoder.add_turn(encoded, turn, mode)
            if len(encoded.ids) > num_tokens - TAIL_TOKENS:
                encoded = before
                failures += 1
        return encoded

    def _episode(
        self,
        rng: random.Random,
        mode: str,
        tools: tuple[text_tasks.Tool, ...],
        *,
        has_media: bool,
    ) -> list[Turn]:
        thinks = mode == "enabled"
        if has_media:
            if rng.random() < 0.72:
                turns = pictures.picture_episode(rng)
            else:
                turns = pictures.clip_episode(rng)
            return _thinking(turns) if thinks else turns
        draw = rng.random()
        if tools and draw < 0.75:
            return _thinking(text_tasks.tool_use(rng, tools, thinks=thinks), thinks=thinks)
        draw = rng.random()
        if draw < 0.12:
            turns = text_tasks.copying(rng)
        elif draw < 0.3:
            # thinking is optional in adaptive mode; sums are worth it
            return text_tasks.arithmetic(rng, thinks=mode != "disabled")
        elif draw < 0.58:
            turns = text_tasks.passage(rng, thinks=thinks)
        else:
            turns = self._short_needle(rng)
        return _thinking(turns) if thinks else turns

    def _short_needle(self, rng: random.Random) -> list[Turn]:
        stack = needles.haystack(
            rng,
            self._sentences,
            self._lengths,
            num_tokens=rng.randint(30, 400),
            num_needles=rng.randint(1, 5),
        )
        turns = needles.question_turns(rng, list(stack.hidden), 4, "needle_short")
        first = Turn("user", (f"{stack.text}\n{turns[0].text}",))
        return [first, *turns[1:]]

    def _needle_row(self, rng: random.Random, num_tokens: int) -> Encoded:
        # many questions a document: a single one would hardly teach to search
        fewest, most = NEEDLES_OF.get(num_tokens // 1024, (40, 60))
        num_needles = rng.randint(fewest, most)
        reserve = 100 + 45 * num_needles
        encoded = self._encoder.opening("disabled")
        stack = needles.haystack(
            rng,
            self._sentences,
            self._lengths,
            num_tokens=num_tokens - len(encoded.ids) - reserve,
            num_needles=num_needles,
        )
        skill = f"needle_{num_tokens // 1024}k"
        turns = needles.question_turns(rng, list(stack.hidden), num_needles, skill)
        # the document's ids are joined from its sentences', which is much faster
        ids = self._encoder.text_ids("]~b]user\n" + stack.sentences[0])
        for sentence in stack.sentences[1:]:
            found = self._known.get(sentence)
            ids += self._encoder.text_ids(f" {sentence}") if found is None else found
        ids += self._encoder.text_ids(f"\n{turns[0].text}[e~[\n")
        encoded.ids += ids
        encoded.answer += [NO_ANSWER] * len(ids)
        for turn in turns[1:]:
            self._encoder.add_turn(encoded, turn, "disabled")
        assert len(encoded.ids) <= num_tokens, (len(encoded.ids), num_tokens)
        return encoded


def _thinking(turns: list[Turn], *, thinks: bool = True) -> list[Turn]:
    """The same with a short thought where a turn has none and the mode demands one."""
    if not thinks:
        return turns
    return [
        Turn(turn.role, turn.parts, turn.skill, turn.reasoning or "I look.", turn.calls)
        if turn.role == "assistant"
        else turn
        for turn in turns
    ]


def collate(rows: list[Encoded], kind: BatchKind) -> Batch:
    """Rows side by side, cut or padded to the batch's length."""
    length = kind.num_tokens
    ids = np.empty((len(rows), length), np.int64)
    answers = np.full((len(rows), length), NO_ANSWER, np.int64)
    skills: list[str] = []
    told: list[tuple[int, int]] = []
    stills: dict[tuple[int, int, int], list[Media]] = {}
    places: dict[tuple[int, int, int], list[int]] = {}
    for index, row in enumerate(rows):
        count = min(len(row.ids), length)
        ids[index, :count] = row.ids[:count]
        ids[index, count:] = ids[index, count - 1]
        numbered = np.array(row.answer[:count])
        answers[index, :count] = np.where(numbered >= 0, numbered + len(skills), NO_ANSWER)
        skills += row.skills
        told += [(index * length + at - 1, source) for at, source in row.sources if at < count]
        runs = iter(row.runs)
        for item in row.media:
            grid = item.grid_thw
            stills.setdefault(grid, []).append(item)
            slots = places.setdefault(grid, [])
            for _ in range(grid[0]):
                start, many = next(runs)
                slots += range(index * length + start, index * length + start + many)
    # row t predicts token t + 1
    row_index, column = np.nonzero(answers[:, 1:] >= 0)
    told_rows, sources = torch.tensor(told, dtype=torch.int64).view(-1, 2).unbind(1)
    return Batch(
        ids_T=torch.from_numpy(ids.reshape(-1)),
        kind=kind,
        loss_rows_S=torch.from_numpy(row_index * length + column),
        targets_S=torch.from_numpy(ids[row_index, column + 1]),
        answers_S=torch.from_numpy(answers[row_index, column + 1]),
        told_rows_N=told_rows.contiguous(),
        sources_N=sources.contiguous(),
        skills_A=torch.tensor([_NUMBERS[name] for name in skills], dtype=torch.int64),
        patches={
            grid: torch.from_numpy(np.concatenate([patches_of(item) for item in items]))
            for grid, items in stills.items()
        },
        media_rows={grid: torch.tensor(slots) for grid, slots in places.items()},
    )
