"""Command `python -m m3stack.bench.kernels moe`: times MoE layers in bf16 and MXFP8.

Each row is one layer of the released model, shared expert and routing included, beside the other
kernels that could compute it and, in bf16, PyTorch's grouped products, which have neither.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from html import escape
from pathlib import Path

import torch

from m3stack.bench.kernels import report
from m3stack.bench.kernels.harness import (
    Call,
    Case,
    Ceilings,
    Prepared,
    Row,
    measure_ceilings,
    run_case,
)
from m3stack.bench.kernels.moe_layers import (
    BYTES_PER_VALUE,
    LayerCheck,
    MoeLayer,
    MoeShape,
    grouped_peer,
    make_layer,
    make_tokens,
    used_experts,
)
from m3stack.kernels.moe.cuda_sizes import Path as Kernel
from m3stack.kernels.moe.cuda_sizes import choose_path
from m3stack.kernels.moe.with_cuda import CudaExperts
from m3stack.kernels.moe.with_triton import TritonExperts

TOKENS = (1, 8, 64, 256, 1024, 2048, 8192)
FORMS = ("bf16", "mxfp8")
# layers of a graph are too many bytes to repeat what one call's launches cost
GRAPH_TOKENS = 1024
# tokens from and up to which kernels are timed that `auto` does not choose there
WORTH_TIMING = {Kernel.FEW: (1, 256), Kernel.SOME: (1, 2048), Kernel.MANY: (256, 8192)}
# an expert's weights are several times the L2, so few sets of tokens suffice
TOKEN_SETS = 4


@lru_cache(maxsize=len(FORMS))
def weights(form: str) -> MoeLayer:
    """The layer that all rows of a format share."""
    return make_layer(MoeShape(1), form, torch.device("cuda"))


def prepare(shape: MoeShape, form: str, ceilings: Ceilings) -> Prepared:
    """The layer through the sm_90a kernels, checked; its peers and the floor beside it."""
    device = torch.device("cuda")
    layer, kernels = weights(form).routed_as(shape), CudaExperts(device)
    sets = [make_tokens(shape, device, seed) for seed in range(TOKEN_SETS)]
    # few tokens touch more or fewer experts by chance, and a time is a mean over the sets as well
    used = statistics.mean(used_experts(layer, x_TM) for x_TM in sets)
    portable = TritonExperts(device)
    peers: dict[str, list[Call]] = {"triton": [partial(layer.run, portable, x_TM) for x_TM in sets]}
    check = LayerCheck(layer, sets[0])
    for kernel in other_kernels(shape, form):
        others = CudaExperts(device, path=kernel)
        check(others)
        peers[kernel.value] = [partial(layer.run, others, x_TM) for x_TM in sets]
    if form == "bf16":
        peers["torch"] = [grouped_peer(layer, x_TM) for x_TM in sets]
    return Prepared(
        check=partial(check, kernels),
        calls=[partial(layer.run, kernels, x_TM) for x_TM in sets],
        floor_us=ceilings.floor_us(shape.least_bytes(used, BYTES_PER_VALUE[form]), shape.flops()),
        peers=peers,
        flops=shape.flops(),
        notes=f"{used:g} experts",
        graph=shape.tokens <= GRAPH_TOKENS,
    )


def other_kernels(shape: MoeShape, form: str) -> list[Kernel]:
    """The sm_90a kernels worth timing beside the one that `auto` chooses."""
    is_mxfp8 = form == "mxfp8"
    chosen = choose_path(shape.tokens, shape.tokens * shape.top_k, shape.experts, is_mxfp8=is_mxfp8)
    return [
        kernel
        for kernel, (least, most) in WORTH_TIMING.items()
        if least <= shape.tokens <= most
        and kernel is not chosen
        and (is_mxfp8 or kernel is not Kernel.SOME)
    ]


def _case(tokens: int, form: str, *, is_skewed: bool) -> Case:
    shape = MoeShape(tokens, is_skewed)
    name = f"moe_{tokens}_{form}{'_skewed' if is_skewed else ''}"
    return Case(name, shape.describe(form), partial(prepare, shape, form))


CASES = tuple(
    _case(tokens, form, is_skewed=is_skewed)
    for is_skewed in (False, True)
    for form in FORMS
    for tokens in TOKENS
)


@dataclass(frozen=True, slots=True)
class MoeRow:
    """One line of the report: the same tokens in both formats; None where not timed.

    Attributes:
        others_us: by format and kernel, of kernels that `auto` does not choose for these tokens.
    """

    tokens: int
    routing: str
    torch_us: float | None
    triton_bf16_us: float | None
    triton_mxfp8_us: float | None
    bf16_us: float | None
    mxfp8_us: float | None
    floor_bf16_us: float | None
    floor_mxfp8_us: float | None
    bf16_tflops: float | None
    mxfp8_tflops: float | None
    notes: str
    others_us: dict[str, float] = field(default_factory=dict)


def summarise(rows: Sequence[Row]) -> list[MoeRow]:
    """Joins the timed rows by tokens and routing."""
    by_name = {row.name: row for row in rows}
    summary = []
    for skew in ("", "_skewed"):
        for tokens in TOKENS:
            plain = by_name.get(f"moe_{tokens}_bf16{skew}")
            coded = by_name.get(f"moe_{tokens}_mxfp8{skew}")
            if plain is None and coded is None:
                continue
            summary.append(
                MoeRow(
                    tokens=tokens,
                    routing="skewed" if skew else "random",
                    torch_us=plain.peers_us.get("torch") if plain else None,
                    triton_bf16_us=plain.peers_us.get("triton") if plain else None,
                    triton_mxfp8_us=coded.peers_us.get("triton") if coded else None,
                    bf16_us=plain.us if plain else None,
                    mxfp8_us=coded.us if coded else None,
                    floor_bf16_us=plain.floor_us if plain else None,
                    floor_mxfp8_us=coded.floor_us if coded else None,
                    bf16_tflops=plain.tflops if plain else None,
                    mxfp8_tflops=coded.tflops if coded else None,
                    notes="; ".join(row.error or row.notes for row in (plain, coded) if row),
                    others_us={
                        f"{form} {name}": us
                        for form, row in zip(FORMS, (plain, coded), strict=True)
                        for name, us in (row.peers_us if row else {}).items()
                        if name in set(WORTH_TIMING)
                    },
                )
            )
    return summary


def write_json(path: Path, rows: Sequence[MoeRow], ceilings: Ceilings, command: str) -> None:
    """Writes the rows with the machine and the command that made them."""
    records = []
    for row in rows:
        values = {name: getattr(row, name) for name in MoeRow.__dataclass_fields__}
        rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in values.items()}
        machine = {
            "command": command,
            "device": ceilings.device,
            "copy_tb_per_s": round(ceilings.copy_bytes_per_s / 1e12, 3),
            "matmul_tflops": round(ceilings.matmul_flops_per_s / 1e12, 1),
        }
        records.append(rounded | machine)
    path.write_text(json.dumps(records, indent=1) + "\n")


def write_picture(path: Path, rows: Sequence[MoeRow]) -> None:
    """Bars of time over the bf16 floor, so that layers of 1 and of 8192 tokens compare, as SVG."""
    colours = {"torch": "#d29922", "bf16": "#1f6feb", "mxfp8": "#2da44e"}
    left, unit, step = 170, 180, 62
    height = step * len(rows) + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="900" height="{height}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>',
        '<text x="10" y="20">time over the bf16 floor: torch (amber, no shared expert), bf16 '
        "(blue), MXFP8 (green); the line is the floor</text>",
        f'<line x1="{left + unit}" x2="{left + unit}" y1="30" y2="{height}" stroke="#9aa5b1"/>',
    ]
    for index, row in enumerate(rows):
        top = 36 + index * step
        name = f"{row.tokens} tokens, {row.routing}"
        parts.append(f'<text x="10" y="{top + 24}">{escape(name)}</text>')
        for lane, (form, colour) in enumerate(colours.items()):
            value = getattr(row, f"{form}_us")
            if value is None or not row.floor_bf16_us:
                continue
            length = min(unit * value / row.floor_bf16_us, 650)
            y = top + lane * 16
            parts.append(
                f'<rect x="{left}" y="{y}" width="{length:.1f}" height="13" fill="{colour}"/>'
                f'<text x="{left + length + 4:.1f}" y="{y + 11}">{value:.0f} us</text>'
            )
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def main(arguments: Sequence[str]) -> int:
    """Runs all cases, or those of the token counts given; returns 1 if any was refused."""
    parser = argparse.ArgumentParser(
        prog="python -m m3stack.bench.kernels moe", description=__doc__
    )
    parser.add_argument("--tokens", type=int, nargs="*", choices=TOKENS, default=list(TOKENS))
    parser.add_argument("--out", type=Path, default=None, help="folder for JSON and picture")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("the kernel bench needs a CUDA device; torch sees none", file=sys.stderr)
        return 2
    ceilings = measure_ceilings()
    rows = []
    for case in CASES:
        if int(case.name.split("_")[1]) not in options.tokens:
            continue
        rows.append(run_case(case, ceilings))
        torch.cuda.empty_cache()
        print(report.text_table(rows[-1:], ceilings).splitlines()[-1], flush=True)
        # after every row, so that a run cut short leaves its figures
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            summary, command = summarise(rows), "python -m m3stack.bench.kernels moe"
            write_json(options.out / "moe-h200.json", summary, ceilings, command)
            write_picture(options.out / "moe-h200.svg", summary)
    print(report.text_table(rows, ceilings))
    return 1 if any(row.us is None for row in rows) else 0
