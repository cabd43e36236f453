"""How the rows of `bench multi-gpu` are shown: lines, JSON, picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

Row = dict[str, Any]

JSON_NAME, PICTURE_NAME = "multi-gpu.json", "multi-gpu.svg"
COLOURS = ("#9aa5b1", "#1f6feb", "#2da44e", "#d29922", "#8250df", "#cf222e", "#0a7d91", "#57606a")


def write(folder: Path, rows: Sequence[Row], command: str) -> None:
    """Writes JSON and picture anew."""
    kept = [{key: _rounded(value) for key, value in row.items()} for row in rows]
    document = {"command": command, "rows": kept}
    (folder / JSON_NAME).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (folder / PICTURE_NAME).write_text(picture(kept), encoding="utf-8")


def _rounded(value: object) -> object:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def line(row: Row) -> str:
    """One row for a person."""
    named = f"{row['kind']:<12}{row['arm']:<14}"
    values = [
        f"{key}={_rounded(value)}" for key, value in row.items() if key not in ("kind", "arm")
    ]
    return named + " ".join(values)


def text(rows: Sequence[Row]) -> str:
    """All rows for a person."""
    return "\n".join(map(line, rows))


def picture(rows: Sequence[Row]) -> str:
    """Bars of a layer's decode time by arm, a group for each batch and context, as SVG."""
    timed = [row for row in rows if row["kind"] == "decode"]
    arms = list(dict.fromkeys(row["arm"] for row in timed))
    cases = list(dict.fromkeys((row["rows"], row["context"]) for row in timed))
    left, width, bar, gap = 150, 560, 13, 14
    group = bar * len(arms) + gap
    top = 24 + 16 * len(arms)
    height = top + group * len(cases) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 170}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        '<text x="10" y="16">decode, one sparse layer, microseconds: whole bar with collectives, '
        "dark end without, line: floor</text>",
    ]
    for index, arm in enumerate(arms):
        y, colour = 24 + 16 * index, COLOURS[index % len(COLOURS)]
        parts.append(f'<rect x="10" y="{y}" width="12" height="12" fill="{colour}"/>')
        note = "" if _is_real(timed, arm) else " (shapes of one rank, collectives of fewer GPUs)"
        parts.append(f'<text x="28" y="{y + 10}">{escape(arm + note)}</text>')
    for number, case in enumerate(cases):
        y = top + number * group
        parts.append(f'<text x="10" y="{y + 12}">batch {case[0]}, {case[1] // 1024}k</text>')
        here = {row["arm"]: row for row in timed if (row["rows"], row["context"]) == case}
        longest = max(row["layer_us"] for row in here.values())
        for index, arm in enumerate(arms):
            if arm in here:
                colour = COLOURS[index % len(COLOURS)]
                parts += _bar(here[arm], left, y + index * bar, width / longest, colour)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bar(row: Row, left: float, y: float, scale: float, colour: str) -> list[str]:
    whole, silent = row["layer_us"] * scale, row["silent_layer_us"] * scale
    floor = left + row["layer_floor_us"] * scale
    return [
        f'<rect x="{left}" y="{y}" width="{whole:.1f}" height="11" fill="{colour}" '
        'fill-opacity="0.45"/>',
        f'<rect x="{left}" y="{y}" width="{min(silent, whole):.1f}" height="11" fill="{colour}"/>',
        f'<line x1="{floor:.1f}" x2="{floor:.1f}" y1="{y}" y2="{y + 11}" stroke="black"/>',
        f'<text x="{left + whole + 4:.1f}" y="{y + 10}">{row["layer_us"]:.0f}</text>',
    ]


def _is_real(rows: Sequence[Row], arm: str) -> bool:
    return all(row["is_real"] for row in rows if row["arm"] == arm)
