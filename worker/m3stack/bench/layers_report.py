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
# four KV heads on eight ranks: two ranks hold, and score, the same one
KV_SHARE, HEAD_SHARE = 1 / 4, 1 / 8
# of a released sparse layer: index key and index heads, chosen tokens, KV and query heads of 128
INDEX_BYTES, INDEX_HEADS, CHOSEN, KV_HEADS, HEADS, DIM = 256, 4, 2048, 4, 64, 128
# two all-reduces a layer; of decode's few rows, and bytes over NVLink for a chunk's
REDUCE_US, REDUCE_GB_PER_S = 12.0, 300.0


def write_report(source: Path, out: Path) -> None:
    """Writes `layer-h200.md` and `layer-h200.svg` beside the rows they are made of.

    Where the folder holds the report of the attention kernels, which times a library's dense
    attention over the same chunk, the faster of the two dense figures is used.
    """
    document = json.loads(source.read_text())
    rows = with_library_dense(document["rows"], out / "msa-h200.json")
    (out / "layer-h200.svg").write_text(picture(rows))
    (out / "layer-h200.md").write_text(text(rows, document["machine"]))


def with_library_dense(rows: list[Row], report: Path) -> list[Row]:
    """The rows, dense attention of prefill replaced by a library's where that is faster."""
    if not report.exists():
        return rows
    found = {row["name"]: row.get("dense_us") for row in json.loads(report.read_text())}
    names = {131072: "prefill_8k_after_128k", 1048576: "prefill_8k_after_1m"}
    replaced = []
    for row in rows:
        library_us = found.get(names.get(row["context"], ""))
        saved = row["dense_attention_us"] - (library_us or row["dense_attention_us"])
        if row["phase"] == "prefill" and saved > 0:
            changed = {key: row[key] - saved for key in ("dense_attention_us", "dense_layer_us")}
            replaced.append(row | changed)
        else:
            replaced.append(row)
    return replaced


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


def attention_share(row: Row) -> float:
    """What one of eight ranks does of a sparse layer's attention.

    In decode, by bytes: every rank reads the whole index key, and the keys of one KV head. In
    prefill, by operations: scores of one index head of four, attention of an eighth of the heads.
    """
    context, tokens = row["context"], row["tokens"]
    chosen = min(context, CHOSEN)
    if row["phase"] == "decode":
        index, keys = context * INDEX_BYTES, chosen * KV_HEADS * DIM * 4
        return (index + keys * KV_SHARE) / (index + keys)
    index = 2 * INDEX_HEADS * DIM * (context - tokens / 2)
    attend = 4 * HEADS * DIM * chosen
    return (index * KV_SHARE + attend * HEAD_SHARE) / (index + attend)


def whole_model_us(row: Row) -> float:
    """60 layers on 8 tensor-parallel GPUs."""
    tokens = row["batch"] * row["tokens"]
    reduce_us = 2 * max(
        REDUCE_US, tokens * 6144 * 2 * 2 * (GPUS - 1) / GPUS / REDUCE_GB_PER_S / 1e3
    )
    # what no part accounts for is a difference of times, and may fall below zero
    sparse = (row["moe_us"] + row["projections_us"]) / GPUS + max(row["rest_us"], 0.0)
    sparse += row["attention_us"] * attention_share(row)
    dense = (row["dense_layer_us"] - row["dense_attention_us"]) / GPUS
    dense += row["dense_attention_us"] * (KV_SHARE if row["phase"] == "decode" else HEAD_SHARE)
    return SPARSE * (sparse + reduce_us) + DENSE * (dense + reduce_us) + row["ends_us"] / GPUS


def _extrapolation(rows: list[Row]) -> str:
    lines = [
        "## What 60 layers on 8 GPUs would give by this measure\n",
        f"Not a measurement. Taken over: {SPARSE} sparse layers and {DENSE} dense ones; "
        f"projections, "
        "experts, embedding and head at an eighth of their one-GPU time. Four KV heads on eight "
        "ranks "
        "stand on two each: in decode a rank reads the whole index key and a quarter of the keys "
        "and "
        "values, in prefill it scores one index head of four and attends with an eighth of the "
        "query "
        "heads. (With index keys in parts a rank reads an eighth of them; not counted.) The rest "
        "of a "
        f"sparse layer whole; two all-reduces a layer of {REDUCE_US:.0f} us, or of their bytes at "
        f"{REDUCE_GB_PER_S:.0f} GB/s: assumed, not measured. Left out: scheduling, sampling, and "
        f"that "
        "an eighth of a small product may take more than an eighth of its time.\n",
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
