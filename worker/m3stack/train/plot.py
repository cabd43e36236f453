"""Curves of training logs, as an SVG."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, TOP = 640, 300, 60, 30
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
