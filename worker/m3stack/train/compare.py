"""`python -m m3stack.train.compare DIR OUT`: what a trained model owes to its index branch, and
what training with pictures from step 0 gives; a few short runs, one JSON line a finding, and
heat-maps of attention in a file of the same name that ends in .svg.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from m3stack.models.minimax_m3 import tiny
from m3stack.models.minimax_m3.config import M3Config
from m3stack.train.batches import Batch, BatchKind, BatchMaker
from m3stack.train.encode import Encoder
from m3stack.train.loader import Loader
from m3stack.train.loop import Budget, Trainer, fast_operations, initial_student
from m3stack.train.model import Student
from m3stack.train.operations import Selection
from m3stack.train.plot import HeatMap, heat_maps
from m3stack.train.probes import (
    any_and_answering,
    index_recall,
    skill_scores,
    telling,
    vision_mass,
)
from m3stack.train.recipe import Recipe, arm_recipe, selection_recipe

PROBE_SEED = 4711
"""Of documents that no training has seen."""

RUNS = ("own", "own_no_loss", "shared", "step_0", "text_first")

TEXT_SKILLS = ("arithmetic", "copy", "needle_short", "text_qa", "tool_call", "tool_result")
"""Whose loss over a run is written down."""

HEAT_CELLS = 48
"""Side of a heat-map as it is written down."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What every finding is made with.

    Attributes:
        note: takes a finding.
        thousands: tokens of the documents that recall is measured on.
    """

    config: M3Config
    device: torch.device
    maker: BatchMaker
    note: Callable[[dict[str, Any]], None]
    thousands: int

    def student(self, weights: dict[str, Tensor]) -> Student:
        return initial_student(
            self.config, self.device, iter(weights.items()), **fast_operations(self.device)
        )

    def batch(self, number: int, kind: BatchKind) -> Batch:
        return self.maker.make(number, kind).mapped(lambda x: x.to(self.device))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m m3stack.train.compare", description=__doc__)
    parser.add_argument("directory", type=Path, help="of a trained checkpoint")
    parser.add_argument("out", type=Path, help="file that a JSON line a finding is appended to")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a run with a new index")
    parser.add_argument("--arm-seconds", type=float, default=60.0, help="of the run from step 0")
    parser.add_argument("--runs", default=",".join(RUNS), help="some of these, or none")
    parser.add_argument("--batch-tokens", type=int, default=32_768)
    parser.add_argument("--longest", type=int, default=64, help="documents of so many k tokens")
    parser.add_argument("--processes", type=int, default=0, help="that make data; 0: this one")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def main(argv: Sequence[str]) -> int:
    """Measures.

    Returns:
        0; errors are exceptions.
    """
    arguments = build_parser().parse_args(argv)
    tokenizer, device = arguments.directory / "tokenizer.json", torch.device(arguments.device)
    longest = min(16, arguments.longest)
    runs = [
        *(
            selection_recipe(
                arguments.batch_tokens, selection, has_index_loss=has_loss, longest=longest
            )
            for selection, has_loss in (
                (Selection.OWN, True),
                (Selection.OWN, False),
                (Selection.SHARED, True),
            )
        ),
        arm_recipe(arguments.batch_tokens // 2, text_first=False),
        arm_recipe(arguments.batch_tokens // 2, text_first=True),
    ]
    runs = [run for run in runs if run.name in arguments.runs.split(",")]
    maker = BatchMaker(Encoder(tokenizer), Recipe(()).seed)
    # forked before anything touches the GPU
    sources = [
        Loader(tokenizer, run, num_processes=arguments.processes, pins=device.type == "cuda")
        if arguments.processes
        else None
        for run in runs
    ]
    began = time.monotonic()

    def note(finding: dict[str, Any]) -> None:
        finding = {**finding, "at_s": round(time.monotonic() - began, 1)}
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finding) + "\n")
        print(json.dumps(finding)[:400], flush=True)

    bench = Bench(
        M3Config.from_dir(arguments.directory),
        device,
        BatchMaker(Encoder(tokenizer), PROBE_SEED),
        note,
        thousands=longest,
    )
    weights = load_file(arguments.directory / "model.safetensors")
    student = bench.student(weights)
    found_needles(bench, student, longest=arguments.longest)
    note({"run": "shipped", **recalls(bench, student)})
    taken: dict[str, int] = {}
    maps: dict[str, HeatMap] = {}
    for run, source in zip(runs, sources, strict=True):
        start = dict(weights)
        is_arm = run.name in ("step_0", "text_first")
        if is_arm:
            start = dict(tiny.initial_weights(bench.config))
        else:
            start = _with_fresh_index(start, bench.config)
        records: list[dict[str, Any]] = []
        student = bench.student(start)
        trainer = Trainer(student, run, source or maker.make, records.append, uses_graphs=True)
        budget = Budget(1 << 40, arguments.arm_seconds if is_arm else arguments.seconds)
        # as many steps as the run that it stands beside
        model_run = {"text_first": "step_0", "own_no_loss": "own", "shared": "own"}.get(run.name)
        if model_run is not None:
            budget = Budget(taken[model_run])
        trainer.run(budget)
        taken[run.name] = trainer.step
        if is_arm:
            finding: dict[str, Any] = text_and_vision(bench, student) | {
                "curve": text_losses(records)
            }
            maps[run.name] = HeatMap(finding["heat"], finding["heat_media"])
        else:
            finding = recalls(bench, student) | needle_scores(bench, student, run)
        seconds = round(trainer.elapsed_s, 1)
        note({"run": run.name, "steps": trainer.step, "seconds": seconds, **finding})
        if source is not None:
            source.close()
    arguments.out.with_suffix(".svg").write_text(heat_maps(maps), encoding="utf-8")
    return 0


def needle_kind(thousands: int, rows: int) -> BatchKind:
    return BatchKind(rows, thousands * 1024, is_needle=True)


def found_needles(bench: Bench, student: Student, *, longest: int) -> None:
    """Share of passwords told right token by token, by chosen blocks and by random ones."""
    for thousands, rows, count in ((4, 8, 2), (16, 2, 2), (64, 1, 4)):
        if thousands > longest:
            continue
        batches = [bench.batch(n, needle_kind(thousands, rows)) for n in range(count)]
        for selection in (Selection.OWN, Selection.RANDOM, Selection.ALL):
            scores = skill_scores(student, batches, selection)
            bench.note({"needle_k": thousands, "selection": selection.name, **scores})


def recalls(bench: Bench, student: Student) -> dict[str, Any]:
    """Index recall by sparse layer and group, by each way to choose, over two sets of rows."""
    batch = bench.batch(9, needle_kind(bench.thousands, 1))
    rows = {"recall": any_and_answering(batch), "telling": telling(batch)}
    return {
        f"{name}_{selection.name.lower()}": index_recall(student, batch, selection, positions)
        for name, positions in rows.items()
        for selection in (Selection.OWN, Selection.SHARED, Selection.RANDOM)
    }


def needle_scores(bench: Bench, student: Student, run: Recipe) -> dict[str, Any]:
    """Passwords found with the selection that the run trained with."""
    thousands = min(4, bench.thousands)
    batches = [bench.batch(20 + n, needle_kind(thousands, 4)) for n in range(2)]
    return skill_scores(student, batches, run.phases[-1].selection)


def text_losses(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Loss a token of every text skill, by step."""
    return [
        {"step": record["step"]}
        | {name: record["skills"][name]["loss"] for name in TEXT_SKILLS if name in record["skills"]}
        for record in records
    ]


def text_and_vision(bench: Bench, student: Student) -> dict[str, Any]:
    """Loss of every skill on text rows, and the share of attention that goes to pictures."""
    rows = 16 if bench.device.type == "cuda" else 1
    text = [bench.batch(n, BatchKind(rows, 1024)) for n in range(2)]
    media = bench.batch(3, BatchKind(rows, 1024, rows))
    masses, heat, is_media = vision_mass(student, media)
    cells = heat.unflatten(0, (HEAT_CELLS, -1)).mean(1).unflatten(1, (HEAT_CELLS, -1)).mean(-1)
    return {
        "text": skill_scores(student, text, Selection.ALL),
        "media": skill_scores(student, [media], Selection.ALL),
        "vision_mass": masses,
        "heat": [[round(value, 5) for value in row] for row in cells.tolist()],
        "heat_media": is_media.unflatten(0, (HEAT_CELLS, -1)).mean(-1).tolist(),
    }


def _with_fresh_index(weights: dict[str, Tensor], config: M3Config) -> dict[str, Tensor]:
    """The same with an index branch that learned nothing."""
    fresh = {name: x for name, x in tiny.initial_weights(config) if "index_" in name}
    return weights | fresh


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
