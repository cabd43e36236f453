"""Command `python -m m3stack.bench.kernels`: times the kernels on the current GPU and reports."""

from __future__ import annotations

import argparse
import fnmatch
import shlex
import sys
from pathlib import Path

import torch

from m3stack.bench.kernels import decode, fp8_prefill, layouts, moe, prefill, prologue, report
from m3stack.bench.kernels.harness import Case, measure_ceilings, run_case

CASES: tuple[Case, ...] = (
    *decode.CASES,
    *layouts.CASES,
    *prefill.CASES,
    *fp8_prefill.CASES,
    *prologue.CASES,
)


def main(arguments: list[str]) -> int:
    """Runs the named cases; returns 1 if any was refused. `moe` has a report of its own."""
    if arguments[:1] == ["moe"]:
        return moe.main(arguments[1:])
    parser = argparse.ArgumentParser(prog="python -m m3stack.bench.kernels", description=__doc__)
    parser.add_argument("cases", nargs="*", default=["*"], help="row names or patterns")
    parser.add_argument("--out", type=Path, default=None, help="folder for JSON and picture")
    parser.add_argument("--list", action="store_true", help="names the rows and stops")
    options = parser.parse_args(arguments)
    chosen = [
        case
        for case in CASES
        if any(fnmatch.fnmatch(case.name, pattern) for pattern in options.cases)
    ]
    if options.list or not chosen:
        for case in CASES:
            print(f"{case.name:34} {case.shape}")
        return 0 if options.list else 2
    if not torch.cuda.is_available():
        print("the kernel bench needs a CUDA device; torch sees none", file=sys.stderr)
        return 2
    ceilings = measure_ceilings()
    command = "python -m m3stack.bench.kernels " + shlex.join(options.cases)
    rows = []
    for case in chosen:
        rows.append(run_case(case, ceilings))
        torch.cuda.empty_cache()
        print(report.text_table(rows[-1:], ceilings).splitlines()[-1], flush=True)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            report.write_json(options.out / "msa-h200.json", rows, ceilings, command)
            report.write_picture(options.out / "msa-h200.svg", rows)
    print(report.text_table(rows, ceilings))
    return 1 if any(row.us is None for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
