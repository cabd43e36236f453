"""Draws the dashboard as a picture, from what a Prometheus server has recorded.

Usage: draw_dashboard.py PROMETHEUS_URL FILE.svg SECONDS

Every panel's own queries are evaluated by that server over the last SECONDS.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass
from html import escape
from pathlib import Path

import httpx

BOARD = Path(__file__).parents[1] / "deploy/helm/m3stack/files/dashboard.json"
NUM_POINTS = 120
# series beyond so many are named only if they were ever above zero
MOST_NAMED = 4
# what Grafana would put in place of its variables
VARIABLES = {"$__rate_interval": "20s", "$namespace": ".*", "$gateway": ".*", "$worker": ".*"}
CELL, ROW = 40, 26
PAGE_WIDTH = 24 * CELL
COLOURS = ("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff", "#ffcb7d")
INK, FAINT, GROUND, PANEL = "#ccccdc", "#6e6f7a", "#111217", "#181b1f"
SCALES = {
    "s": ((1, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "bytes": ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")),
    "percentunit": ((0.01, "%"),),
    "reqps": ((1, "/s"),),
    "short": ((1e6, "M"), (1e3, "k"), (1, "")),
}


@dataclass(frozen=True, slots=True)
class Line:
    """One series: points as (share of the time shown, value)."""

    name: str
    points: list[tuple[float, float]]


def lines_of(client: httpx.Client, panel: dict, start_s: float, seconds: float) -> list[Line]:
    """What the server says to a panel's queries.

    Raises:
        httpx.HTTPStatusError: it refuses one.
    """
    lines: list[Line] = []
    for target in panel["targets"]:
        expression = target["expr"]
        for name, value in VARIABLES.items():
            expression = expression.replace(name, value)
        end_s = start_s + seconds
        asked = {
            "query": expression,
            "start": str(start_s),
            "end": str(end_s),
            "step": str(seconds / NUM_POINTS),
        }
        reply = client.get("/api/v1/query_range", params=asked).raise_for_status()
        for series in reply.json()["data"]["result"]:
            name = target["legendFormat"]
            for label, value in series["metric"].items():
                name = name.replace("{{" + label + "}}", value)
            points = [
                ((at - start_s) / seconds, float(value))
                for at, value in series["values"]
                if math.isfinite(float(value))
            ]
            if points:
                lines.append(Line(name, points))
    return lines


def draw(panels: list[tuple[dict, list[Line]]], caption: str) -> str:
    """The whole picture."""
    bottom = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel, _ in panels)
    height = bottom * ROW + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {PAGE_WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" font-size="11">',
        f'<rect width="{PAGE_WIDTH}" height="{height}" fill="{GROUND}"/>',
        f'<text x="8" y="{height - 14}" fill="{FAINT}">{escape(caption)}</text>',
    ]
    for panel, lines in panels:
        place = panel["gridPos"]
        left, top = place["x"] * CELL, place["y"] * ROW
        if panel["type"] == "row":
            parts.append(
                f'<text x="{left + 8}" y="{top + 18}" fill="{INK}" font-size="14" '
                f'font-weight="600">{escape(panel["title"])}</text>'
            )
            continue
        parts += _panel(
            panel, lines, (left + 3, top + 3, place["w"] * CELL - 6, place["h"] * ROW - 6)
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: dict, lines: list[Line], box: tuple[int, int, int, int]) -> list[str]:
    left, top, width, height = box
    plot_left, plot_top = left + 52, top + 28
    plot_width, plot_height = width - 62, height - 62
    highest = max((value for line in lines for _, value in line.points), default=0.0)
    ceiling = _round_up(highest)
    factor, unit = _scale(panel["fieldConfig"]["defaults"]["unit"], ceiling)
    parts = [
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="3" fill="{PANEL}"/>',
        f'<text x="{left + 8}" y="{top + 17}" fill="{INK}" font-weight="600">'
        f"{escape(panel['title'])}</text>",
    ]
    for step in range(3):
        y = plot_top + plot_height * (1 - step / 2)
        value = f"{ceiling * step / 2 / factor:.3g} {unit}".strip()
        parts.append(
            f'<line x1="{plot_left}" x2="{plot_left + plot_width}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke="#2c3235"/><text x="{plot_left - 5}" y="{y + 4:.1f}" fill="{FAINT}" '
            f'text-anchor="end">{value}</text>'
        )
    legend = []
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(
            f"{plot_left + x * plot_width:.1f},{plot_top + plot_height * (1 - y / ceiling):.1f}"
            for x, y in line.points
        )
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.3"/>'
        )
        if len(lines) <= MOST_NAMED or any(y for _, y in line.points):
            legend.append(f'<tspan fill="{colour}">▬</tspan> {escape(line.name)}  ')
    if not lines:
        legend.append("nothing recorded")
    parts.append(
        f'<text x="{left + 8}" y="{top + height - 8}" fill="{INK}" font-size="10" '
        f'xml:space="preserve">{"".join(legend[:7])}</text>'
    )
    return parts


def _round_up(value: float) -> float:
    """The next of 1, 2, 5, 10, ... that is not below."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * 0.999)


def _scale(unit: str, ceiling: float) -> tuple[float, str]:
    scales = SCALES[unit]
    return next(((factor, name) for factor, name in scales if ceiling >= factor), scales[-1])


def main() -> int:
    url, target, seconds_text = sys.argv[1:]
    seconds = float(seconds_text)
    start_s = time.time() - seconds
    board = json.loads(BOARD.read_text())
    with httpx.Client(base_url=url, timeout=30) as client:
        panels = [
            (panel, [] if panel["type"] == "row" else lines_of(client, panel, start_s, seconds))
            for panel in board["panels"]
        ]
    caption = f"{BOARD.name} over {seconds:.0f} recorded seconds, drawn by {Path(__file__).name}"
    Path(target).write_text(draw(panels, caption))
    empty = [panel["title"] for panel, lines in panels if panel["type"] != "row" and not lines]
    if empty:
        print(f"nothing recorded for: {', '.join(empty)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
