"""Curves of training logs, and maps of attention, as SVG."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, TOP = 640, 300, 60, 30
CELL = 6
_COLOURS = ("#0969da", "#cf222e", "#1a7f37", "#8250df", "#bf8700", "#57606a")


def loss_plot(logs: Sequence[Path]) -> str:
    """Loss of the answers' tokens and of the index branch over steps, logs one after the other."""
    records: list[dict[str, Any]] = []
    offset = 0
    for log in logs:
        lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        lines = [line for line in lines if math.isfinite(line["loss"])]
        records += [{**line, "step": line["step"] + offset} for line in lines]
        offset = records[-1]["step"] if records else offset
    curves = {
        "loss a token of the answers": [
            (r["step"], _mean_loss(r)) for r in records if r.get("skills")
        ],
        "index loss (KL, a layer)": [
            (r["step"], r["index_loss"]) for r in records if "index_loss" in r
        ],
    }
    return _chart(curves, "step", logarithmic=True)


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Mean attention of tokens (rows) on tokens (columns), in square cells.

    Attributes:
        cells: [N, N] shares of a row's attention.
        media: [N] share of a cell's tokens that are a picture's.
    """

    cells: Sequence[Sequence[float]]
    media: Sequence[float]


def heat_maps(maps: Mapping[str, HeatMap]) -> str:
    """Maps side by side, darker for more, by logarithm; a stroke marks a picture's columns."""
    side = max((len(heat.cells) for heat in maps.values()), default=0) * CELL
    width = (side + 20) * len(maps) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{side + 50}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for index, (name, heat) in enumerate(maps.items()):
        left, top = 20 + index * (side + 20), 30
        parts.append(f'<text x="{left}" y="16">{name}</text>')
        for row, line in enumerate(heat.cells):
            for column, share in enumerate(line[: row + 1]):
                depth = min(1.0, max(0.0, 1 + math.log10(max(share, 1e-9)) / 3))
                if depth > 0:
                    x, y = left + column * CELL, top + row * CELL
                    parts.append(
                        f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" '
                        f'fill="#0969da" opacity="{depth:.2f}"/>'
                    )
        for column, share in enumerate(heat.media):
            if share > 0:
                x = left + column * CELL
                parts.append(f'<path d="M{x} {top - 4}h{CELL}" stroke="#cf222e" stroke-width="4"/>')
        parts.append(
            f'<rect x="{left}" y="{top}" width="{side}" height="{side}" fill="none" stroke="#999"/>'
        )
    return "\n".join([*parts, "</svg>\n"])


def _mean_loss(record: dict[str, Any]) -> float:
    """Over everyday skills: drills and long documents would hide their course."""
    losses = [
        scores["loss"]
        for name, scores in record["skills"].items()
        if not name.startswith(("needle_", "drill_")) or name == "needle_short"
    ]
    return sum(losses) / len(losses) if losses else record["loss"]


def _chart(curves: dict[str, list[tuple[float, float]]], x_name: str, *, logarithmic: bool) -> str:
    points = [point for curve in curves.values() for point in curve]
    last = max((x for x, _ in points), default=1) or 1
    values = [max(y, 1e-4) for _, y in points] or [1e-4, 1.0]
    low, high = (math.log10(v) if logarithmic else v for v in (min(values), max(values)))
    span = (high - low) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        value = math.log10(max(y, 1e-4)) if logarithmic else y
        return LEFT + WIDTH * x / last, TOP + HEIGHT * (1 - (value - low) / span)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + LEFT + 20}" '
        f'height="{HEIGHT + TOP + 50}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>',
    ]
    for power in range(math.ceil(low), math.floor(high) + 1):
        y = TOP + HEIGHT * (1 - (power - low) / span)
        parts.append(f'<path d="M{LEFT} {y:.1f}h{WIDTH}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
        )
    for index, (name, curve) in enumerate(curves.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in curve))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}"/>')
        x = LEFT + 10 + 260 * index
        parts.append(f'<text x="{x}" y="{TOP - 10}" fill="{colour}">{name}</text>')
    foot = TOP + HEIGHT + 20
    parts.append(f'<text x="{LEFT}" y="{foot}">0</text>')
    parts.append(f'<text x="{LEFT + WIDTH}" y="{foot}" text-anchor="end">{last:g} {x_name}s</text>')
    return "\n".join([*parts, "</svg>\n"])
