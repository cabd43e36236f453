"""`m3stack bench agentic`: an agentic trace through the whole engine, arm against arm.

Conversations share a long beginning; each turn adds a tool's answer and is asked as soon as the
last one was answered. The model has the released widths, one dense and a few sparse layers, and
random weights; `--toy` is the built-in checkpoint's size and a trace that a CPU replays in
seconds. Every request must be answered in full, or the run fails. Other parts measure what the
engine promises beside that: see `PARTS`.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from m3stack.bench.agentic import beside, full_cache, shares, tier
from m3stack.bench.agentic.arms import ARMS
from m3stack.bench.agentic.compiled import conversation_steps, counted, long_prompt_steps
from m3stack.bench.agentic.models import Models, truncated, without_dense_layers
from m3stack.bench.agentic.replay import Replay, ReplayError
from m3stack.bench.agentic.report import write_report
from m3stack.bench.agentic.step_profile import profiled
from m3stack.bench.agentic.step_times import summary
from m3stack.bench.agentic.trace import (
    Conversation,
    TraceShape,
    conversations,
    shared_prefix,
)
from m3stack.bench.agentic.worker import Sizes, page_shape, running_engine
from m3stack.checkpoints import builtin_checkpoint
from m3stack.first_steps import Bounds, run_first_steps
from m3stack.gpu_steps import GPU_SLOWDOWN
from m3stack.kernels.build import KernelUnavailableError
from m3stack.memory_plan import released_model_config
from m3stack.models.minimax_m3.config import M3Config

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
SPARSE_LAYERS = 4
# arms whose kernels no other arm has
COMPILED = ("full", "full_bf16", "portable", "portable_mxfp8", "dense", "query_major")
COMPILING_S = 600.0
TOY = TraceShape(shared=300, new=(10, 40), output=(4, 10), turns=2)
TOY_BESIDE = beside.BesideShape(
    decoding=2,
    decoding_context=40,
    befores=(0, 256),
    stretch=512,
    max_mixed_tokens=64,
    max_batch_tokens=64,
    idle_tokens=20,
)
TOY_TIER = tier.TierShape(
    requests=2, context=1024, hot_shares=(1.0,), settling=6, tokens=6, max_batch_tokens=256
)


@dataclass(slots=True)
class Document:
    """What is written: rows of the trace, and of every other part under its name."""

    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    parts: dict[str, Any] = field(default_factory=dict[str, Any])


class Bench:
    """One run: its sizes, its models, and what it has found so far."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        self.arguments, self.device = arguments, device
        shape = TOY if arguments.toy else TraceShape()
        low, high = shape.output
        self.shape = TraceShape(
            arguments.shared_tokens or shape.shared,
            shape.new,
            (max(1, int(low * arguments.output_scale)), max(1, int(high * arguments.output_scale))),
            arguments.turns or shape.turns,
        )
        config = (
            M3Config.from_dir(builtin_checkpoint("tiny"))
            if arguments.toy
            else truncated(released_model_config(), arguments.sparse_layers)
        )
        if arguments.experts:
            config = replace(config, num_experts=arguments.experts)
        self.models = Models(config, arguments.kernels, device)
        self.document = Document()
        share, _, of = (arguments.compile_only or "0/1").partition("/")
        self.share = int(share), int(of)

    def compile(self, arm_name: str) -> None:
        """Runs steps of all sizes of an arm, for what is compiled at first use."""
        model = self.models.get(ARMS[arm_name])
        most = max([*self.arguments.concurrency, 64])
        jobs = [(model, conversation_steps(self.shape.longest, num_decoding=most))]
        if arm_name.startswith("full"):
            # the other parts run in the whole arms alone
            jobs.append((without_dense_layers(model), long_prompt_steps(num_decoding=most)))
        number, of = self.share
        began_at, count = time.monotonic(), 0
        for part, wanted in jobs:
            shape = page_shape(part.config, model.embedding.dtype)
            count += run_first_steps(part, shape, wanted[number::of], Bounds(COMPILING_S))
        say(f"{arm_name:16} {count} sizes of steps run in {time.monotonic() - began_at:.1f} s")

    def trace(self, arm_name: str, runs: Sequence[tuple[int, int]]) -> None:
        """Rows of one arm, for pairs of concurrency and turns."""
        arm, shape, config = ARMS[arm_name], self.shape, self.models.config
        most = max(concurrency for concurrency, _ in runs)
        growing = shape.turns * (shape.new[1] + shape.output[1])
        pages = -(-shape.shared // config.block_tokens)
        own = -(-growing // config.block_tokens) + 2
        if not arm.prefix_cache:
            own += pages
        batch, mixed = self._step_tokens(most)
        sizes = Sizes(
            num_pages=self.arguments.pages or pages + most * own,
            max_batch_tokens=batch,
            max_mixed_tokens=mixed,
            max_sequences=most,
            slowdown=self.arguments.slowdown if arm.paced else 0.0,
            prefix_cache=arm.prefix_cache,
            prefill_first=arm.prefill_first,
            overlap=arm.overlap,
            graph_bytes=arm.graph_bytes,
        )
        model = self.models.get(arm)
        shared = shared_prefix(shape, config.vocab_size - 64)
        with running_engine(model, sizes) as running:
            replay = Replay(running.engine, running.mailbox, shared)
            replay.warm(most, (64, growing))
            asked = 0
            for concurrency, turns in runs:
                scripts = self._scripts(concurrency, turns, asked)
                asked += len(scripts)
                first = len(running.times)
                with counted() as compiled:
                    row = replay.measure(arm_name, scripts, concurrency)
                steps = summary([step for step in running.times[first:] if step.collected_at])
                found = {**asdict(row), "compiled": compiled.kernels, "steps": steps}
                self.document.rows.append(found)
                say(
                    f"{arm_name:16} concurrency {concurrency:3d}: "
                    f"{row.output_tokens_per_s:9.1f} tokens/s, "
                    f"first token {row.ttft_p50_ms:8.1f} ms, between tokens p99 "
                    f"{row.itl_p99_ms:7.2f} ms, cached {row.cached_share:.0%}, "
                    f"compiled {compiled.kernels}"
                )
                for kind, means in steps.items():
                    say(f"{'':16} {kind:7} {_line(means)}")
            for concurrency, turns in runs if arm_name in self.arguments.profile else ():
                scripts = self._scripts(concurrency, turns, asked)
                asked += len(scripts)
                with profiled(running, self.models.operations) as profile:
                    replay.measure(arm_name, scripts, concurrency)
                part = {"arm": arm_name, "concurrency": concurrency, **profile}
                self.document.parts.setdefault("profile", []).append(part)
                say(f"{arm_name:16} profile at {concurrency}: {json.dumps(profile)}")
            if running.graphs is not None:
                say(
                    f"{arm_name:16} recorded steps replayed {running.graphs.num_replays} times, "
                    f"{running.graphs.num_bytes >> 20} MiB of {arm.graph_bytes >> 20}"
                )

    def beside(self, arm_name: str = "full") -> None:
        """A long prompt beside decode, in sparse layers alone."""
        shape = TOY_BESIDE if self.arguments.toy else beside.BesideShape()
        shape = replace(shape, slowdown=self.arguments.slowdown)
        model = without_dense_layers(self.models.get(ARMS[arm_name]))
        name = "beside" if arm_name == "full" else f"beside_{arm_name.removeprefix('full_')}"
        operations = self.models.operations if name in self.arguments.profile else None
        found = beside.measure(model, shape, operations)
        self._add(name, [asdict(row) for row in found.rows])
        self._add(f"{name}_steps", [{"kind": kind, **row} for kind, row in found.times.items()])
        if found.profile:
            part = {"arm": arm_name, "beside": True, **found.profile}
            self.document.parts.setdefault("profile", []).append(part)
        if self.arguments.steps is not None:
            with self.arguments.steps.open("a") as file:
                for step in found.steps:
                    print(json.dumps({"part": name, **asdict(step)}), file=file)

    def beside_bf16(self) -> None:
        """The same with weights in bf16."""
        self.beside("full_bf16")

    def full_cache(self) -> None:
        """Throughput at twice the concurrency that fills the cache."""
        shape = full_cache.FullCacheShape(self.shape, slowdown=self.arguments.slowdown)
        if self.arguments.toy:
            shape = full_cache.FullCacheShape(
                self.shape, 2, (1, 2, 4), 16, max_batch_tokens=64, max_mixed_tokens=32, slowdown=0
            )
        model = self.models.get(ARMS["full"])
        self._add("full_cache", [asdict(row) for row in full_cache.measure(model, shape)])

    def tier(self) -> None:
        """Keys and values of cold pages in host memory, in sparse layers alone."""
        shape = TOY_TIER if self.arguments.toy else tier.TierShape()
        self._add("tier", [asdict(row) for row in tier.measure(self.models, shape)])

    def shares(self) -> None:
        """Kernel times of decode steps, dense beside MSA."""
        found: dict[str, Any] = {}
        requests, context, steps = (2, 300, 4) if self.arguments.toy else (8, 60_032, 60)
        for name in ("full", "dense"):
            model = self.models.get(ARMS[name])
            found[name] = shares.measure(model, requests=requests, context=context, steps=steps)
        self._add("shares", found)

    def _add(self, name: str, found: Any) -> None:
        self.document.parts[name] = found
        for row in found if isinstance(found, list) else ():
            say(f"{name:16} {_line(row)}")

    def _scripts(self, concurrency: int, turns: int, first: int) -> list[Conversation]:
        shape = replace(self.shape, turns=turns)
        vocab_size = self.models.config.vocab_size - 64
        return conversations(shape, 2 * concurrency, vocab_size, first=first)

    def _step_tokens(self, most: int) -> tuple[int, int]:
        batch, mixed = (64, 32) if self.arguments.toy else (8192, 2048)
        return max(batch, 2 * most), max(mixed, 2 * most)


PARTS: dict[str, Callable[[Bench], None]] = {
    "beside": Bench.beside,
    "beside_bf16": Bench.beside_bf16,
    "tier": Bench.tier,
    "full_cache": Bench.full_cache,
    "shares": Bench.shares,
}


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
    parts: list[str] = []
    for part in arguments.parts:
        parts += (arguments.arms or able) if part == "trace" else [part]
    named = {part.partition(":")[0] for part in parts}
    unable = sorted(named & (ARMS.keys() - set(able))) + sorted(named - {*ARMS, *PARTS})
    if unable:
        print(
            f"m3stack bench agentic: no {', '.join(unable)} here; there are the arms "
            f"{', '.join(able)} and the parts trace, {', '.join(PARTS)}"
        )
        return 2
    bench = Bench(arguments, device)
    jobs: list[tuple[str, Callable[[], None]]] = []
    compiled: set[str] = set()
    for part in parts:
        # the weights of one format are there at a time: what is needed is compiled just before
        for arm in dict.fromkeys(_arms_of(part)):
            if device.type == "cuda" and arm in COMPILED and arm not in compiled:
                compiled.add(arm)
                jobs.append((f"compile {arm}", _compile_job(bench, arm)))
        if not arguments.compile_only:
            is_arm = part.partition(":")[0] in ARMS
            jobs.append((part, (_arm_job if is_arm else _part_job)(bench, part)))
    is_good = True
    for name, job in jobs:
        is_good &= _try(name, job)
        if arguments.json is not None:
            _write(arguments.json, bench, argv)
    has_found = bench.document.rows or bench.document.parts or arguments.compile_only
    return 0 if is_good and has_found else 1


def say(line: str) -> None:
    print(f"{time.monotonic():10.1f} {line}", flush=True)


def _arms_of(part: str) -> tuple[str, ...]:
    """The arms that a part runs in."""
    name = part.partition(":")[0]
    others = {"beside_bf16": ("full_bf16",), "shares": ("full", "dense")}
    return (name,) if name in ARMS else others.get(name, ("full",))


def _arm_job(bench: Bench, name: str) -> Callable[[], None]:
    arm, _, given = name.partition(":")
    runs = [(concurrency, bench.shape.turns) for concurrency in bench.arguments.concurrency]
    if given:
        pairs = [part.partition("x") for part in given.split(",")]
        runs = [(int(count), int(turns or bench.shape.turns)) for count, _, turns in pairs]
    return lambda: bench.trace(arm, runs)


def _compile_job(bench: Bench, name: str) -> Callable[[], None]:
    return lambda: bench.compile(name)


def _part_job(bench: Bench, name: str) -> Callable[[], None]:
    return lambda: PARTS[name](bench)


def _try(name: str, job: Callable[[], None]) -> bool:
    """Whether a job has ended well; what went wrong is printed, and others go on."""
    began_at = time.monotonic()
    try:
        job()
    except (ReplayError, KernelUnavailableError, torch.OutOfMemoryError) as error:
        print(f"{name:16} failed: {error}", file=sys.stderr, flush=True)
        return False
    say(f"{name:16} done in {time.monotonic() - began_at:.1f} s")
    return True


def _line(row: Mapping[str, object]) -> str:
    return " ".join(f"{key}={_short(value)}" for key, value in row.items())


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="m3stack bench agentic", description=__doc__)
    parser.add_argument("--toy", action="store_true", help="a small trace and model, on the CPU")
    parser.add_argument(
        "--parts",
        nargs="+",
        default=["trace"],
        metavar="PART",
        help=f"what to measure, in this order: trace, an ARM of it, {', '.join(PARTS)}",
    )
    parser.add_argument(
        "--arms",
        nargs="+",
        default=None,
        metavar="ARM",
        help="of the trace; ARM:8,32x1 has concurrencies of its own, the latter with one turn",
    )
    parser.add_argument("--concurrency", nargs="+", type=int, default=list(CONCURRENCIES))
    parser.add_argument("--shared-tokens", type=int, default=None, help="of the shared beginning")
    parser.add_argument("--turns", type=int, default=None, help="of each conversation")
    parser.add_argument("--output-scale", type=float, default=1.0, help="of the turns' outputs")
    parser.add_argument("--sparse-layers", type=int, default=SPARSE_LAYERS)
    parser.add_argument(
        "--experts", type=int, default=0, help="of each layer; fewer are no measurement"
    )
    parser.add_argument("--pages", type=int, default=0, help="of the cache; 0: as many as it takes")
    parser.add_argument(
        "--slowdown",
        type=float,
        default=GPU_SLOWDOWN,
        help="of steps with prompts, in arms that bound it; 0: bounded by tokens alone",
    )
    parser.add_argument("--steps", type=Path, default=None, help="a line a step beside a prompt")
    parser.add_argument(
        "--compile-only",
        default=None,
        metavar="N/OF",
        help="compiles what the named arms need, the Nth of OF shares of it, and ends",
    )
    parser.add_argument(
        "--profile",
        nargs="+",
        default=[],
        metavar="PART",
        help="arms, or beside, that run once more under a profiler, kinds of steps apart",
    )
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--json", type=Path, default=None, help="rows; text and picture beside it")
    return parser


def _write(path: Path, bench: Bench, argv: Sequence[str]) -> None:
    device = bench.device
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    document = {
        "command": "m3stack bench agentic " + " ".join(argv),
        "machine": f"{machine}, torch {torch.__version__}",
        "rows": bench.document.rows,
        **bench.document.parts,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    write_report(path)
