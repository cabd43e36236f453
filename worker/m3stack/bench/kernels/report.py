"""How rows of the bench are shown: text table, JSON list, picture."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path

from m3stack.bench.kernels.harness import Ceilings, Row


def text_table(rows: Sequence[Row], ceilings: Ceilings) -> str:
    """Measured, floor, share of floor and ratio to dense, one line a row."""
    machine = (
        f"{ceilings.device}, {ceilings.versions}; ceilings of this run: "
        f"copy {ceilings.copy_bytes_per_s / 1e12:.2f} TB/s, "
        f"bf16 matrix product {ceilings.matmul_flops_per_s / 1e12:.0f} TFLOP/s"
    )
    header = (
        f"{'name':34} {'us':>9} {'spread':>15} {'floor':>9} {'of floor':>8} "
        f"{'dense':>9} {'ratio':>6} {'TFLOP/s':>8}  peers"
    )
    return "\n".join([machine, header, *map(_line, rows)])


def _line(row: Row) -> str:
    if row.us is None or row.floor_us is None:
        return f"{row.name:34} {row.error}"
    peers = ", ".join(f"{name} {value:.1f}" for name, value in row.peers_us.items())
    return (
        f"{row.name:34} {row.us:9.2f} {row.low_us:7.1f}-{row.high_us:7.1f} {row.floor_us:9.2f} "
        f"{row.floor_us / row.us:8.0%} {_number(row.dense_us):>9} "
        f"{_number(row.dense_us / row.us if row.dense_us else None):>6} "
        f"{_number(row.tflops):>8}  {peers} {row.notes}"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


# fields that every row has, null where they say nothing of it
COMMON = ("name", "us", "floor_us", "dense_us", "overlap")


def write_json(path: Path, rows: Sequence[Row], ceilings: Ceilings, command: str) -> None:
    """Writes the rows as a list; rows of other names already in the file are kept."""
    kept: dict[str, dict] = {}
    if path.exists():
        kept = {row["name"]: row for row in json.loads(path.read_text())}
    for row in rows:
        record = {
            key: value
            for key, value in asdict(row).items()
            if key in COMMON or value not in (None, "", {})
        }
        record["command"] = command
        record["device"] = ceilings.device
        record["copy_tb_per_s"] = round(ceilings.copy_bytes_per_s / 1e12, 3)
        record["matmul_tflops"] = round(ceilings.matmul_flops_per_s / 1e12, 1)
        kept[row.name] = {key: _rounded(value) for key, value in record.items()}
    _share_dense(kept)
    path.write_text(json.dumps(list(kept.values()), indent=1) + "\n")


def _share_dense(rows: dict[str, dict]) -> None:
    """Dense attention knows no selection: rows of other selections take it from the plain row.

    Only within one command, whose rows are of one run.
    """
    for name, row in rows.items():
        plain = rows.get(name.removesuffix("_identical").removesuffix("_disjoint"), row)
        is_of_run = plain["command"] == row["command"]
        if row["dense_us"] is None and is_of_run:
            row["dense_us"] = plain["dense_us"]


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return value


def write_picture(path: Path, rows: Sequence[Row]) -> None:
    """Bars of floor, measured and dense on a logarithmic axis, as SVG."""
    timed = [row for row in rows if row.us is not None]
    bars = [
        (
            row,
            [
                ("floor", row.floor_us, "#9aa5b1"),
                ("measured", row.us, "#1f6feb"),
                ("dense", row.dense_us, "#d29922"),
            ],
        )
        for row in timed
    ]
    values = [value for _, parts in bars for _, value, _ in parts if value]
    if not values:
        return
    low, high = min(values) * 0.7, max(values) * 1.3
    left, width, step = 230, 620, 54
    height = step * len(bars) + 50
    size = f'width="{left + width + 110}" height="{height}"'
    legend = "microseconds, logarithmic: floor (grey), measured (blue), dense attention (amber)"
    parts_svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="white"/><text x="10" y="20">{legend}</text>',
    ]
    for index, (row, parts) in enumerate(bars):
        top = 36 + index * step
        parts_svg.append(f'<text x="10" y="{top + 22}">{escape(row.name)}</text>')
        for lane, (_, value, colour) in enumerate(parts):
            if not value:
                continue
            length = width * math.log(value / low) / math.log(high / low)
            y = top + lane * 14
            parts_svg.append(
                f'<rect x="{left}" y="{y}" width="{length:.1f}" height="12" fill="{colour}"/>'
                f'<text x="{left + length + 4:.1f}" y="{y + 10}">{value:.1f}</text>'
            )
    path.write_text("\n".join(parts_svg) + "\n</svg>\n")
