"""`m3stack bench agentic`: an agentic trace through the whole engine, arm against arm.

Conversations share a long beginning; each turn adds a tool's answer and is asked as soon as the
last one was answered. The model has the released widths, one dense and a few sparse layers, and
random weights; `--toy` is the built-in checkpoint's size and a trace that a CPU replays in
seconds. Every request must be answered in full, or the run fails.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from m3stack.bench.agentic.arms import ARMS
from m3stack.bench.agentic.replay import Measured, Replay, ReplayError
from m3stack.bench.agentic.report import write_report
from m3stack.bench.agentic.trace import TraceShape, conversations, shared_prefix
from m3stack.bench.agentic.worker import Sizes, build_model, running_engine, truncated
from m3stack.checkpoints import builtin_checkpoint
from m3stack.kernels.build import KernelUnavailableError
from m3stack.memory_plan import released_model_config
from m3stack.models.minimax_m3.config import M3Config

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
SPARSE_LAYERS = 4
TOY = TraceShape(shared=300, new=(10, 40), output=(4, 10), turns=2)


def main(argv: Sequence[str]) -> int:
    """Measures and prints; 0 measured, 1 a request was not answered, 2 it cannot run here."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING)
    device = torch.device("cuda" if torch.cuda.is_available() and not arguments.toy else "cpu")
    if device.type == "cpu" and not arguments.toy:
        print("m3stack bench agentic: there is no CUDA device; --toy runs on a CPU")
        return 2
    if device.type == "cpu":
        # a model this small only loses time by sharing its operations between threads
        torch.set_num_threads(1)
    able = [name for name, arm in ARMS.items() if device.type == "cuda" or not arm.needs_cuda]
    names = arguments.arms or able
    unable = sorted(set(names) - set(able))
    if unable:
        print(
            f"m3stack bench agentic: no arm {', '.join(unable)} here; there are {', '.join(able)}"
        )
        return 2
    rows: list[Measured] = []
    failed = False
    for name in names:
        try:
            rows += _measure_arm(name, arguments, device)
        except (ReplayError, KernelUnavailableError, torch.OutOfMemoryError) as error:
            print(f"{name:16} failed: {error}", file=sys.stderr, flush=True)
            failed = True
        gc.collect()
        if arguments.json is not None:
            _write(arguments.json, rows, argv, device)
    return 1 if failed or not rows else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="m3stack bench agentic", description=__doc__)
    parser.add_argument("--toy", action="store_true", help="a small trace and model, on the CPU")
    parser.add_argument("--arms", nargs="+", default=None, metavar="ARM")
    parser.add_argument("--concurrency", nargs="+", type=int, default=list(CONCURRENCIES))
    parser.add_argument("--shared-tokens", type=int, default=None, help="of the shared beginning")
    parser.add_argument("--turns", type=int, default=None, help="of each conversation")
    parser.add_argument("--sparse-layers", type=int, default=SPARSE_LAYERS)
    parser.add_argument("--pages", type=int, default=0, help="of the cache; 0: as many as it takes")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--json", type=Path, default=None, help="rows; text and picture beside it")
    return parser


def _measure_arm(name: str, arguments: argparse.Namespace, device: torch.device) -> list[Measured]:
    arm, shape = ARMS[name], TOY if arguments.toy else TraceShape()
    shape = TraceShape(
        arguments.shared_tokens or shape.shared,
        shape.new,
        shape.output,
        arguments.turns or shape.turns,
    )
    config = (
        M3Config.from_dir(builtin_checkpoint("tiny"))
        if arguments.toy
        else truncated(released_model_config(), arguments.sparse_layers)
    )
    most = max(arguments.concurrency)
    growing = shape.turns * (shape.new[1] + shape.output[1])
    pages = -(-shape.shared // config.block_tokens)
    own = -(-growing // config.block_tokens) + 2
    if not arm.prefix_cache:
        own += pages
    sizes = Sizes(
        num_pages=arguments.pages or pages + most * own,
        max_batch_tokens=max(64 if arguments.toy else 8192, 2 * most),
        max_mixed_tokens=max(32 if arguments.toy else 2048, 2 * most),
        max_sequences=most,
    )
    model = build_model(config, arm, arguments.kernels, device)
    shared = shared_prefix(shape, config.vocab_size - 64)
    rows: list[Measured] = []
    with running_engine(model, arm, sizes) as (engine, mailbox):
        replay = Replay(engine, mailbox, shared)
        replay.warm()
        for concurrency in arguments.concurrency:
            scripts = conversations(shape, concurrency, config.vocab_size - 64)
            row = replay.measure(name, scripts)
            rows.append(row)
            print(
                f"{name:16} concurrency {concurrency:3d}: {row.output_tokens_per_s:9.1f} tokens/s, "
                f"first token {row.ttft_p50_ms:8.1f} ms, between tokens p99 "
                f"{row.itl_p99_ms:7.2f} ms, cached {row.cached_share:.0%}",
                flush=True,
            )
    return rows


def _write(path: Path, rows: Sequence[Measured], argv: Sequence[str], device: torch.device) -> None:
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    document = {
        "command": "m3stack bench agentic " + " ".join(argv),
        "machine": f"{machine}, torch {torch.__version__}",
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    write_report(path)
