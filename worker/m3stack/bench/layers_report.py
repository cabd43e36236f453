"""The text and the picture of `m3stack bench layers`: tables, the whole model, published claims."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

Row = dict[str, Any]
PARTS = ("attention", "moe", "projections", "rest")
COLOURS = {
    "attention": "#1f6feb", "moe": "#d29922", "projections": "#2da44e", "rest": "#8b949e",
}  # fmt: skip
SPARSE, DENSE = 57, 3
GPUS = 8
LONG = 1048576
# ranks that hold the same KV head read its keys each: of 4 heads on 8 ranks, a quarter on each
KV_SHARE = 1 / 4
# two all-reduces a layer; of decode's few rows, and bytes over NVLink for a chunk's
REDUCE_US, REDUCE_GB_PER_S = 12.0, 300.0


def write_report(source: Path, out: Path) -> None:
    """Writes `layer-h200.md` and `layer-h200.svg` beside the rows they are made of."""
    document = json.loads(source.read_text())
    rows: list[Row] = document["rows"]
    (out / "layer-h200.svg").write_text(picture(rows))
    (out / "layer-h200.md").write_text(text(rows, document["machine"]))


def text(rows: list[Row], machine: dict[str, Any]) -> str:
    """The whole report in Markdown."""
    sections = [
        "# One layer at a time: a truncated model of the released widths on an H200\n",
        "Command: `m3stack bench layers --out docs/bench` (rows in "
        "[layer-h200.json](layer-h200.json)). One dense and four sparse layers, all 128 experts, "
        "random weights drawn on the GPU; a layer's figure is the mean of the four. Decode steps "
        "are "
        "CUDA graph replays, prefill chunks of 8,192 tokens run eagerly; medians of three. Floors "
        "are "
        "the larger of bytes over this run's copy bandwidth "
        f"({machine['copy_bytes_per_s'] / 1e12:.2f} TB/s) and operations over its bf16 matrix rate "
        f"({machine['matmul_flops_per_s'] / 1e12:.0f} TFLOP/s); {machine['device']}, "
        f"{machine['versions']}.\n",
        "![parts of a layer](layer-h200.svg)\n",
        _decode_table(rows),
        _prefill_table(rows),
        _extrapolation(rows),
        _claims(rows),
    ]
    return "\n".join(sections)


def _decode_table(rows: list[Row]) -> str:
    lines = [
        "## Decode: microseconds of one sparse layer\n",
        "| weights | batch | context | layer | floor | attention | MoE | projections | rest | "
        "attention dense | dense layer | embedding and head |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['form']} | {row['batch']} | {row['context']:,} | {row['layer_us']:.0f} | "
        f"{sum(row['floors_us'].values()):.0f} | {_with_floor(row, 'attention')} | "
        f"{_with_floor(row, 'moe')} | {_with_floor(row, 'projections')} | {row['rest_us']:.0f} | "
        f"{row['dense_attention_us']:.0f} | {row['dense_layer_us']:.0f} | {row['ends_us']:.0f} |"
        for row in _of(rows, "decode")
    ]
    return "\n".join([*lines, "", "In brackets: the part's floor.\n"])


def _prefill_table(rows: list[Row]) -> str:
    lines = [
        "## Prefill: one sparse layer over a chunk of 8,192 tokens\n",
        "| weights | context after it | tokens/s | ms | floor ms | attention | MoE | projections | "
        "rest | attention dense | dense layer |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['form']} | {row['context']:,} | {row['tokens'] / row['layer_us'] * 1e6:,.0f} | "
        f"{row['layer_us'] / 1e3:.2f} | {sum(row['floors_us'].values()) / 1e3:.2f} | "
        f"{_with_floor(row, 'attention', 1e3)} | {_with_floor(row, 'moe', 1e3)} | "
        f"{_with_floor(row, 'projections', 1e3)} | {row['rest_us'] / 1e3:.2f} | "
        f"{row['dense_attention_us'] / 1e3:.2f} | {row['dense_layer_us'] / 1e3:.2f} |"
        for row in _of(rows, "prefill")
    ]
    return "\n".join([*lines, ""])


def whole_model_us(row: Row) -> float:
    """60 layers on 8 tensor-parallel GPUs: weights' parts an eighth, keys a quarter, two sums."""
    tokens = row["batch"] * row["tokens"]
    reduce_us = 2 * max(
        REDUCE_US, tokens * 6144 * 2 * 2 * (GPUS - 1) / GPUS / REDUCE_GB_PER_S / 1e3
    )
    # a sparse layer's rest is done by every rank
    sparse = (row["moe_us"] + row["projections_us"]) / GPUS + row["rest_us"]
    is_decode = row["phase"] == "decode"
    sparse += row["attention_us"] * (KV_SHARE if is_decode else 1 / GPUS)
    dense = (row["dense_layer_us"] - row["dense_attention_us"]) / GPUS
    dense += row["dense_attention_us"] * (KV_SHARE if is_decode else 1 / GPUS)
    return SPARSE * (sparse + reduce_us) + DENSE * (dense + reduce_us) + row["ends_us"] / GPUS


def _extrapolation(rows: list[Row]) -> str:
    lines = [
        "## What 60 layers on 8 GPUs would give by this measure\n",
        f"Not a measurement. Taken over: {SPARSE} sparse layers and {DENSE} dense ones; "
        f"projections, "
        "experts, embedding and head at an eighth of their one-GPU time; attention at a quarter in "
        "decode (four KV heads on eight ranks stand on two each, and every rank scores its own "
        "head "
        "against the one index key) and an eighth in prefill (eight query heads a rank); the rest "
        "of "
        f"a sparse layer whole; two all-reduces a layer of {REDUCE_US:.0f} us, or of their bytes "
        f"at "
        f"{REDUCE_GB_PER_S:.0f} GB/s. Left out: scheduling, sampling, and that an eighth of a "
        f"small "
        "product may take more than an eighth of its time.\n",
        "| weights | step | context | 60 layers | rate |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        tokens, step_us = row["batch"] * row["tokens"], whole_model_us(row)
        name = f"decode, batch {row['batch']}" if row["phase"] == "decode" else "prefill, 8,192"
        lines.append(
            f"| {row['form']} | {name} | {row['context']:,} | {step_us / 1e3:.2f} ms | "
            f"{tokens / step_us * 1e6:,.0f} tokens/s |"
        )
    return "\n".join([*lines, ""])


def ratios(row: Row) -> dict[str, float]:
    """Time with dense attention in all layers over time with MSA in 57 of 60."""
    dense, sparse = row["dense_attention_us"], row["attention_us"]
    others = row["layer_us"] - sparse
    return {
        "attention_layer": dense / sparse,
        "attention_model": (SPARSE + DENSE) * dense / (SPARSE * sparse + DENSE * dense),
        "whole_layer": (others + dense) / row["layer_us"],
        "whole_model": (SPARSE + DENSE)
        * (others + dense)
        / (SPARSE * row["layer_us"] + DENSE * (others + dense)),
    }


def _claims(rows: list[Row]) -> str:
    lines = [
        "## The published claims, restated\n",
        "All are about 1M tokens of context against dense attention or against the generation "
        "before; this table knows the first kind alone: the same weights and pages, dense "
        "attention "
        "instead of block choice and block attention (norms and the cache write count on the "
        "sparse "
        "side only). Whole layers include experts in bf16 on one GPU.\n",
        "| step at 1M | published | attention, a layer | attention, 57 + 3 layers | whole layer | "
        "whole, 57 + 3 layers |",
        "|---|---|---|---|---|---|",
    ]
    published = {
        "prefill": "14.2x (paper, H800, attention of a 109B model), 9x (model card, vs M2)",
        "decode": "7.6x (paper), 15x (model card, vs M2)",
    }
    for row in rows:
        if row["context"] != LONG or row["form"] != "bf16":
            continue
        value = ratios(row)
        name = f"{row['phase']}, batch {row['batch']}"
        lines.append(
            f"| {name} | {published[row['phase']]} | {value['attention_layer']:.1f}x | "
            f"{value['attention_model']:.1f}x | {value['whole_layer']:.1f}x | "
            f"{value['whole_model']:.1f}x |"
        )
    return "\n".join([*lines, ""])


def picture(rows: list[Row]) -> str:
    """Bars of a layer's parts as shares of its time, with the floor as a line, as SVG."""
    left, wide, step = 230, 520, 24
    height = step * len(rows) + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="900" height="{height}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>',
        '<text x="10" y="20">one sparse layer: attention (blue), MoE (amber), projections (green), '
        "rest (grey); the line is the floor</text>",
    ]
    for index, row in enumerate(rows):
        top, x = 36 + index * step, float(left)
        name = f"{row['phase']} {row['form']} B={row['batch']} {row['context']:,}"
        parts.append(f'<text x="10" y="{top + 13}">{escape(name)}</text>')
        for part in PARTS:
            width = max(row[f"{part}_us"], 0.0) / row["layer_us"] * wide
            parts.append(
                f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="16" '
                f'fill="{COLOURS[part]}"/>'
            )
            x += width
        floor = left + min(sum(row["floors_us"].values()) / row["layer_us"], 1.0) * wide
        parts.append(
            f'<line x1="{floor:.1f}" x2="{floor:.1f}" y1="{top - 2}" y2="{top + 18}" '
            'stroke="black" stroke-width="2"/>'
            f'<text x="{left + wide + 8}" y="{top + 13}">{row["layer_us"]:,.0f} us</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _of(rows: list[Row], phase: str) -> list[Row]:
    return [row for row in rows if row["phase"] == phase]


def _with_floor(row: Row, part: str, unit: float = 1.0) -> str:
    digits = 0 if unit == 1.0 else 2
    return f"{row[part + '_us'] / unit:.{digits}f} ({row['floors_us'][part] / unit:.{digits}f})"
