"""Draws docs/bench/routing.svg and writes routing.json from the lines of the routing simulation.

`cargo run --release -p gateway-core --example routing_simulation | python scripts/draw_routing.py`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent.parent / "docs" / "bench"
WAYS = {
    "round_robin": ("in turn", "#9aa0a6"),
    "least_wait": ("least wait, blind to caches", "#e8a33d"),
    "cache_told": ("least wait, caches told", "#1f77b4"),
    "cache_remembered": ("least wait, caches guessed", "#7fb3d8"),
}
PANELS = (
    ("hit_rate", "prompt pages found in a cache", 100.0, "%"),
    ("wait_mean_ms", "mean wait for the first token", 1.0, " ms"),
    ("busiest_over_mean", "busiest worker's requests over the mean", 1.0, "x"),
)
WIDTH, PANEL_HEIGHT, LEFT, TOP = 900, 190, 20, 70


def draw(rows: list[dict[str, Any]]) -> str:
    """One panel a figure, one group of bars a fleet."""
    fleets = sorted({row["workers"] for row in rows})
    group = (WIDTH - 2 * LEFT) / len(fleets)
    bar = group / (len(WAYS) + 1.2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} '
        f'{TOP + PANEL_HEIGHT * len(PANELS)}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="16">A fleet in simulated time: ways of choosing a '
        "worker</text>",
    ]
    for index, (name, color) in enumerate(WAYS.values()):
        x = LEFT + index * 210
        parts.append(f'<rect x="{x}" y="38" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{x + 17}" y="48">{name}</text>')
    for place, (key, title, scale, unit) in enumerate(PANELS):
        top = TOP + place * PANEL_HEIGHT
        base = top + PANEL_HEIGHT - 32
        most = max(row[key] for row in rows)
        parts.append(f'<text x="{LEFT}" y="{top + 12}" font-size="13">{title}</text>')
        parts.append(f'<path d="M{LEFT} {base}H{WIDTH - LEFT}" stroke="#444"/>')
        for number, fleet in enumerate(fleets):
            left = LEFT + number * group + bar / 2
            middle = left + bar * len(WAYS) / 2
            parts.append(
                f'<text x="{middle:.0f}" y="{base + 16}" text-anchor="middle">{fleet} workers'
                "</text>"
            )
            for index, (way, (_, color)) in enumerate(WAYS.items()):
                value = next(r[key] for r in rows if (r["workers"], r["way"]) == (fleet, way))
                height = value / most * (PANEL_HEIGHT - 75)
                x = left + index * bar
                parts.append(
                    f'<rect x="{x:.1f}" y="{base - height:.1f}" width="{bar - 3:.1f}" '
                    f'height="{height:.1f}" fill="{color}"/>'
                )
                label = f"{value * scale:.3g}{unit}"
                parts.append(
                    f'<text x="{x + bar / 2 - 1:.1f}" y="{base - height - 4:.1f}" '
                    f'text-anchor="middle" font-size="11">{label}</text>'
                )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    rows = [json.loads(line) for line in sys.stdin if line.startswith("{")]
    (TARGET / "routing.json").write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    (TARGET / "routing.svg").write_text(draw(rows))


if __name__ == "__main__":
    main()
