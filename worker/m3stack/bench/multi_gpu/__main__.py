"""Command `m3stack bench multi-gpu`: one model divided over GPUs in several ways, each compared.

Every way is first compared with the undivided model in fp32 and plain torch; then steps of decode
and prefill are timed with and without their collectives, beside the least time that bytes and
products allow. Ways that need more GPUs than there are run with the shapes of one of their ranks
and the collectives of those there are; they say so.

With `--engine`, whole engines over all GPUs are timed instead, step by step.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from m3stack.bench.multi_gpu import report
from m3stack.bench.multi_gpu.arms import arms_of
from m3stack.bench.multi_gpu.engine_steps import MODES, run_engines
from m3stack.bench.multi_gpu.measure import Row
from m3stack.bench.multi_gpu.run import Options, open_store, run_rank

# a divided model may be that much farther from fp32 than the undivided one is
MAX_RATIO = 2.0
# where rounding moves no more than this, it moves no token either
FP32_ERROR = 1e-5


def main(argv: Sequence[str]) -> int:
    """Measures and reports; 0 all equal, 1 an arm differs, 2 it cannot run here."""
    parser = argparse.ArgumentParser(prog="m3stack bench multi-gpu", description=__doc__)
    parser.add_argument("--world", type=int, default=0, help="GPUs; default: all there are")
    parser.add_argument("--small", action="store_true", help="the tiny model on CPUs, for a try")
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"), help="with --small"
    )
    parser.add_argument("--layers", type=int, default=4, help="of the truncated model")
    parser.add_argument(
        "--arms", nargs="*", default=[], help="to time, for example tp2 'tp2 parts'"
    )
    parser.add_argument(
        "--engine", action="store_true", help="decode steps of whole engines of --layers"
    )
    parser.add_argument(
        "--modes", nargs="*", default=[], help="of --engine, for example 'queued ahead'"
    )
    parser.add_argument("--deadline", type=float, default=0.0, help="seconds; 0: none")
    parser.add_argument("--out", type=Path, default=Path("docs/bench"), help="folder for results")
    parsed = parser.parse_args(argv)
    world = parsed.world or (2 if parsed.small else torch.cuda.device_count())
    if not parsed.small and (not world or world > torch.cuda.device_count()):
        print(f"{world} GPUs are needed, torch sees {torch.cuda.device_count()}", file=sys.stderr)
        return 2
    for given, known in (
        (parsed.arms, [arm.name for arm in arms_of(world)]),
        (parsed.modes, [mode.name for mode in MODES]),
    ):
        unknown = [name for name in given if name not in known]
        if unknown:
            print(f"no such way: {unknown[0]}; there are {', '.join(known)}", file=sys.stderr)
            return 2
    command = "m3stack bench multi-gpu " + shlex.join(argv)
    parsed.out.mkdir(parents=True, exist_ok=True)
    if parsed.engine:
        run_engines(
            parsed.out,
            world=world,
            num_layers=parsed.layers,
            is_small=parsed.small,
            modes=parsed.modes,
            command=command,
        )
        return 0
    store = open_store(0, world, is_leader=True)
    options = Options(
        world=world,
        small=parsed.small,
        dtype=parsed.dtype,
        num_layers=parsed.layers,
        arms=tuple(parsed.arms),
        deadline_s=time.monotonic() + parsed.deadline if parsed.deadline else float("inf"),
        port=store.port,
        out=parsed.out,
    )
    if world == 1:
        run_rank(0, options, command)
    else:
        context = multiprocessing.get_context("spawn")
        ranks = [
            context.Process(target=run_rank, args=(rank, options, command)) for rank in range(world)
        ]
        for process in ranks:
            process.start()
        if not _all_end_well(ranks):
            return 1
    rows = json.loads((parsed.out / report.JSON_NAME).read_text())["rows"]
    print(report.text(rows))
    return 0 if are_equal(rows) else 1


def _all_end_well(ranks: Sequence[BaseProcess]) -> bool:
    """Waits for all ranks; where one fails, the others would wait for it, and are ended."""
    running = list(ranks)
    while running:
        ended = wait([process.sentinel for process in running])
        for process in [process for process in running if process.sentinel in ended]:
            process.join()
            running.remove(process)
            if process.exitcode:
                for other in running:
                    other.kill()
    return not any(process.exitcode for process in ranks)


def are_equal(rows: Sequence[Row]) -> bool:
    """Whether every arm is as near to fp32 as the undivided model; in fp32, to the token.

    Steps that were replayed are to be as near to those as they come.
    """
    compared = [row for row in rows if row["kind"] == "equality"]
    if not compared:
        return True
    # the undivided model comes first
    whole = compared[0]["relative_error"]
    if whole <= FP32_ERROR and any(row["equal_tokens"] < row["tokens"] for row in compared):
        return False
    limit = max(MAX_RATIO * whole, FP32_ERROR)
    replayed = [row for row in rows if row["kind"] == "replayed"]
    if any(not row["replays"] for row in replayed):
        return False
    return all(row["relative_error"] <= limit for row in (*compared, *replayed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
