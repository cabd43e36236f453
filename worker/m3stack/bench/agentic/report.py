"""The text and the picture of `m3stack bench agentic`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from m3stack.bench.agentic import shares_report
from m3stack.bench.agentic.arms import ARMS

Row = dict[str, Any]
COLOURS = ("#1f6feb", "#2da44e", "#d29922", "#cf222e", "#8250df", "#bf3989", "#1b7c83", "#8b949e")
# whose throughput others are a multiple of: as engines run today, in either format of weights
PEERS = ("portable", "portable_mxfp8")
WIDTH, HEIGHT, MARGIN = 720, 360, 60


def write_report(source: Path) -> None:
    """Writes a `.md` and pictures beside what was found."""
    document = json.loads(source.read_text())
    rows: list[Row] = document["rows"]
    name = source.stem
    if rows:
        source.with_suffix(".svg").write_text(picture(rows))
    sections = [text(document, f"{name}.svg")] if rows else []
    sections += [part(document[key]) for key, part in _PARTS.items() if key in document]
    if "shares" in document:
        picture_name = f"{name}-shares.svg"
        source.with_name(picture_name).write_text(shares_report.picture(document["shares"]))
        sections.append(shares_report.text(document["shares"], picture_name))
    source.with_suffix(".md").write_text("\n".join(sections))


def _beside(rows: list[Row]) -> str:
    first = rows[0]
    lines = [
        "## A long prompt beside decode\n",
        f"{first['decoding']} requests decode while {first['stretch']:,} tokens of a prompt are "
        "computed, at several places of it. What stands before a place is passed over as if it "
        "were cached (pages hold random numbers). Sparse layers alone. Gaps are those between two "
        f"tokens of a request; {first['compiled']} kernels were compiled meanwhile.\n",
        "| tokens before | alone, tokens/s | beside, tokens/s | share kept | between tokens idle "
        "p50 / p99 ms | beside p50 / p99 / longest ms | gaps | p99 over idle p99 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        kept = row["beside_tokens_per_s"] / row["solo_tokens_per_s"]
        lines.append(
            f"| {'all places' if row['before'] < 0 else format(row['before'], ',')} | "
            f"{row['solo_tokens_per_s']:,.0f} | {row['beside_tokens_per_s']:,.0f} | {kept:.1%} | "
            f"{row['idle_p50_ms']:.1f} / {row['idle_p99_ms']:.1f} | "
            f"{row['beside_p50_ms']:.1f} / {row['beside_p99_ms']:.1f} / "
            f"{row['beside_max_ms']:.1f} | {row['gaps']} | "
            f"{row['beside_p99_ms'] / row['idle_p99_ms']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def _tier(rows: list[Row]) -> str:
    first = rows[0]
    lines = [
        "## Keys and values of cold pages in host memory\n",
        f"{first['requests']} requests decode at {first['context']:,} tokens each, sparse layers "
        "alone. Hits are of the parts of pages (a page of a KV group) that attention asked for; "
        "random weights choose blocks nearly at random, so hits follow the share of hot pages.\n",
        "| hot pages | of all | hits | tokens/s | of all resident | equal tokens |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        share = f"{row['hot_share']:.0%}" if row["hot_share"] else "no tier"
        lines.append(
            f"| {row['hot_pages']:,} | {share} | {row['hit_share']:.1%} | "
            f"{row['tokens_per_s']:,.0f} | {row['of_resident']:.0%} | {row['equal_tokens']:.0%} |"
        )
    return "\n".join(lines) + "\n"


def _full_cache(rows: list[Row]) -> str:
    first = rows[0]
    lines = [
        "## More conversations than the cache holds\n",
        f"A pool of {first['num_pages']:,} pages, which hold {first['held']} conversations at "
        "their longest, and host memory behind it.\n",
        "| concurrency | output tokens/s | of the peak | between tokens p99 ms | cached | "
        "preemptions |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['concurrency']} | {row['output_tokens_per_s']:.1f} | {row['of_peak']:.0%} | "
            f"{row['itl_p99_ms']:.1f} | {row['cached_share']:.0%} | {row['preemptions']} |"
        )
    return "\n".join(lines) + "\n"


_PARTS: dict[str, Callable[[list[Row]], str]] = {
    "beside": _beside,
    "beside_bf16": _beside,
    "tier": _tier,
    "full_cache": _full_cache,
}


def text(document: dict[str, Any], picture_name: str) -> str:
    """Tables in Markdown."""
    rows: list[Row] = document["rows"]
    lines = [
        "# An agentic trace, arm against arm\n",
        f"`{document['command']}` on {document['machine']}. Conversations share a long beginning, "
        "which is computed before the time is taken; each turn adds a tool's answer. As many run "
        "at once as said all the time: one that ends makes room for the next. The model has the "
        "released widths, few layers and random weights, so ratios between arms are those of "
        "these layers, not of the whole model.\n",
        f"![output tokens per second]({picture_name})\n",
        "| arm | concurrency | output tokens/s | "
        + "".join(f"of `{peer}` | " for peer in PEERS)
        + "first token p50 ms | between tokens p99 ms | cached | compiled meanwhile |",
        "|---" * (7 + len(PEERS)) + "|",
    ]
    for arm, concurrency in dict.fromkeys((row["arm"], row["concurrency"]) for row in rows):
        of_arm = _taken(rows, arm, concurrency)
        rate = median(row["output_tokens_per_s"] for row in of_arm)
        rates = f"{rate:,.1f}"
        if len(of_arm) > 1:
            each = [row["output_tokens_per_s"] for row in of_arm]
            rates += f" ({min(each):,.0f} to {max(each):,.0f}, {len(each)} runs)"
        ratios = [
            f"{rate / median(row['output_tokens_per_s'] for row in other):.2f}x" if other else "-"
            for other in (_taken(rows, peer, concurrency) for peer in PEERS)
        ]
        lines.append(
            f"| {arm} | {concurrency} | {rates} | {' | '.join(ratios)} | "
            f"{median(row['ttft_p50_ms'] for row in of_arm):.1f} | "
            f"{median(row['itl_p99_ms'] for row in of_arm):.2f} | "
            f"{median(row['cached_share'] for row in of_arm):.0%} | "
            f"{sum(row['compiled'] for row in of_arm)} |"
        )
    arms = dict.fromkeys(row["arm"] for row in rows)
    lines += ["", *(f"- `{arm}`: {ARMS[arm].what}." for arm in arms)]
    return "\n".join(lines) + "\n"


def _taken(rows: list[Row], arm: str, concurrency: int) -> list[Row]:
    return [row for row in rows if row["arm"] == arm and row["concurrency"] == concurrency]


def picture(rows: list[Row]) -> str:
    """Output tokens a second over concurrency, a line an arm, as SVG."""
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    steps = sorted({row["concurrency"] for row in rows})
    top = max(row["output_tokens_per_s"] for row in rows) * 1.05
    inner_width, inner_height = WIDTH - 220, HEIGHT - 2 * MARGIN

    def place(concurrency: int, rate: float) -> tuple[float, float]:
        across = steps.index(concurrency) / max(1, len(steps) - 1)
        up = rate / top
        return MARGIN + across * inner_width, HEIGHT - MARGIN - up * inner_height

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{MARGIN}" y="24">output tokens a second over concurrency</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = HEIGHT - MARGIN - share * inner_height
        parts.append(
            f'<line x1="{MARGIN}" x2="{MARGIN + inner_width}" y1="{y}" y2="{y}" stroke="#ddd"/>'
            f'<text x="4" y="{y + 4}">{top * share:.0f}</text>'
        )
    for index, step in enumerate(steps):
        x = MARGIN + index / max(1, len(steps) - 1) * inner_width
        parts.append(f'<text x="{x - 6}" y="{HEIGHT - MARGIN + 18}">{step}</text>')
    for index, arm in enumerate(arms):
        colour = COLOURS[index % len(COLOURS)]
        concurrencies = sorted({row["concurrency"] for row in rows if row["arm"] == arm})
        points = [
            place(step, median(row["output_tokens_per_s"] for row in _taken(rows, arm, step)))
            for step in concurrencies
        ]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        y = MARGIN + 18 * index
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
            f'<text x="{WIDTH - 150}" y="{y}" fill="{colour}">{arm}</text>'
        )
    return "\n".join(parts) + "\n</svg>\n"
