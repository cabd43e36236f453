"""Asks the questions and counts; writes the counts as JSON, as a table and as a picture."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from m3stack.eval.questions import HELD_OUT, Question, Skill

REQUEST_TIMEOUT_S = 1800.0
MAX_ANSWER_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Row:
    """The score of a skill and of its control; None where a control was not asked."""

    skill: str
    accuracy: float
    n: int
    control: str
    control_accuracy: float | None
    chance: float
    bar: float

    @property
    def reaches_bar(self) -> bool:
        return self.accuracy >= self.bar


class Asker:
    """Sends questions to one server.

    Args:
        url: of the gateway.
        at_once: requests under way.
    """

    def __init__(self, url: str, *, at_once: int = 4) -> None:
        self._client = httpx.Client(base_url=url, timeout=REQUEST_TIMEOUT_S)
        self._at_once = at_once
        self._model = self._client.get("/v1/models").raise_for_status().json()["data"][0]["id"]

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def share_right(self, questions: Iterable[Question], *, at_once: int | None = None) -> float:
        """Share of questions that are answered truly.

        Raises:
            httpx.HTTPStatusError: a request was refused.
        """
        with ThreadPoolExecutor(at_once or self._at_once) as pool:
            right = list(pool.map(self._is_right, questions))
        return sum(right) / len(right)

    def message(self, question: Question) -> dict[str, Any]:
        """The answer, greedily, without thinking."""
        body: dict[str, Any] = {
            "model": self._model,
            "messages": list(question.messages),
            "temperature": 0.0,
            "max_tokens": MAX_ANSWER_TOKENS,
            "thinking": {"type": "disabled"},
        }
        if question.tools:
            body["tools"] = list(question.tools)
        answer = self._client.post("/v1/chat/completions", json=body)
        answer.raise_for_status()
        return answer.json()["choices"][0]["message"]

    def _is_right(self, question: Question) -> bool:
        return question.is_answered_by(self.message(question))


def score(
    skill: Skill, count: int, asker: Asker, control_asker: Asker | None, *, control_count: int
) -> Row:
    """Asks `count` questions of a skill, and its control's."""
    # long documents one after the other, so that each is read once
    at_once = 1 if skill.name.startswith("needle") else None
    accuracy = asker.share_right(skill.make(source(skill), count), at_once=at_once)
    control: float | None = None
    if skill.control_make is not None:
        control = asker.share_right(skill.control_make(source(skill), control_count))
    elif control_asker is not None:
        questions = skill.make(source(skill), control_count)
        control = control_asker.share_right(questions, at_once=at_once)
    return Row(
        skill.name,
        round(accuracy, 4),
        count,
        skill.control,
        None if control is None else round(control, 4),
        round(skill.chance, 4),
        skill.bar,
    )


def source(skill: Skill) -> random.Random:
    """Choices of a skill's questions, the same in every evaluation and never those of training."""
    return random.Random(f"{HELD_OUT}/{skill.name}")


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]


def table(rows: Sequence[Row]) -> str:
    """The scores as a Markdown table."""
    lines = [
        "| skill | right | n | bar | control | right | chance |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        control = "not asked" if row.control_accuracy is None else f"{row.control_accuracy:.0%}"
        mark = "" if row.reaches_bar else " **(below)**"
        lines.append(
            f"| {row.skill} | {row.accuracy:.1%}{mark} | {row.n} | {row.bar:.0%} | {row.control} "
            f"| {control} | {row.chance:.0%} |"
        )
    return "\n".join(lines)


def picture(rows: Sequence[Row]) -> str:
    """The scores as bars in an SVG: the skill's above its control's, a stroke at the bar."""
    left, width, height = 150, 360, 30
    scale: Callable[[float], float] = lambda share: left + width * share  # noqa: E731
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 60}" '
        f'height="{height * len(rows) + 30}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for index, row in enumerate(rows):
        top = 14 + index * height
        colour = "#2ea043" if row.reaches_bar else "#d29922"
        parts.append(f'<text x="{left - 8}" y="{top + 12}" text-anchor="end">{row.skill}</text>')
        parts.append(_bar(left, top, width * row.accuracy, 11, colour))
        if row.control_accuracy is not None:
            parts.append(_bar(left, top + 12, width * row.control_accuracy, 6, "#b0b8c0"))
        at = scale(row.bar)
        parts.append(f'<path d="M{at:.1f} {top - 1}v20" stroke="#222" stroke-width="1.5"/>')
        parts.append(f'<text x="{scale(1) + 8}" y="{top + 11}">{row.accuracy:.0%}</text>')
    parts.append(
        f'<text x="{left}" y="{height * len(rows) + 22}" fill="#555">'
        "grey: control; stroke: the bar</text></svg>\n"
    )
    return "\n".join(parts)


def _bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width:.1f}" height="{height}" fill="{colour}"/>'
