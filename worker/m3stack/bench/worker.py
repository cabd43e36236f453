"""`m3stack bench worker`: decode rate of one worker over gRPC, beside the bare model's.

The ceiling is the same checkpoint's forward in a plain loop in this process: one row a step, no
scheduler, no sampling beyond argmax, no wire. The ratio says what everything around it costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from m3stack.batch import DeviceBatch
from m3stack.cache.pool import KvPool, PageShape
from m3stack.checkpoints import builtin_checkpoint
from m3stack.client import AsyncWorkerClient, WorkerClient, default_sampling
from m3stack.kernels.interface import PagedRows
from m3stack.kernels.reference_table import reference_kernels
from m3stack.local_ports import free_port
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.model import M3Model
from m3stack.models.minimax_m3.weights import load_model
from m3stack.types import Request, Tokens

PROMPT_TOKENS = 100
OUTPUT_TOKENS = 200
CONCURRENCIES = (1, 8, 32)
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Row:
    """Median and range over the repeats."""

    name: str
    tokens_per_s: float
    low: float
    high: float
    ratio_to_bare: float


def main(argv: Sequence[str]) -> int:
    """Measures and prints; 0 measured, 1 the worker did not answer as it must."""
    parser = argparse.ArgumentParser(prog="m3stack bench worker", description=__doc__)
    parser.add_argument("--model", type=Path, default=None, metavar="DIR")
    parser.add_argument("--json", type=Path, default=None, help="file for the rows")
    arguments = parser.parse_args(argv)
    model = arguments.model if arguments.model is not None else builtin_checkpoint("tiny")
    bare = sorted(bare_rate(model) for _ in range(REPEATS))
    ceiling = statistics.median(bare)
    rows = [Row("bare forward, 1 row", ceiling, bare[0], bare[-1], 1.0)]
    print_row(rows[0])
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "m3stack", "worker", "--model-path", str(model)]
    command += ["--listen", address, "--device", "cpu", "--log-level", "error"]
    worker = subprocess.Popen(command)
    try:
        wait_ready(address)
        for concurrency in CONCURRENCIES:
            rates = sorted(served_rate(address, concurrency) for _ in range(REPEATS))
            median = statistics.median(rates)
            name = f"worker, {concurrency} at once"
            rows.append(Row(name, median, rates[0], rates[-1], median / ceiling))
            print_row(rows[-1])
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait(60)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


def print_row(row: Row) -> None:
    print(
        f"{row.name:<22}{row.tokens_per_s:8.0f} tokens/s  ({row.low:.0f} to {row.high:.0f})"
        f"  {row.ratio_to_bare:5.2f} x bare",
        flush=True,
    )


def prompt(number: int) -> tuple[int, ...]:
    """Different prompts, so that no prefix is shared."""
    return tuple(1 + (7 * number + 13 * place) % 250 for place in range(PROMPT_TOKENS))


def served_rate(address: str, concurrency: int) -> float:
    """Output tokens a second of that many greedy requests at once, prefill included."""
    counts = [0] * concurrency
    barrier = threading.Barrier(concurrency + 1)

    def run(number: int) -> None:
        with WorkerClient(address) as client:
            client.info()
            sampling = default_sampling(OUTPUT_TOKENS, ignore_eos=True)
            request = Request(f"bench-{time.monotonic_ns()}-{number}", prompt(number), sampling)
            barrier.wait()
            for event in client.generate(request):
                if isinstance(event, Tokens):
                    counts[number] += len(event.token_ids)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(concurrency)]
    for thread in threads:
        thread.start()
    barrier.wait()
    began = time.monotonic()
    for thread in threads:
        thread.join()
    taken = time.monotonic() - began
    if counts != [OUTPUT_TOKENS] * concurrency:
        raise SystemExit(f"requests ended early: {counts} of {OUTPUT_TOKENS} tokens")
    return sum(counts) / taken


def bare_rate(path: Path) -> float:
    """Greedy tokens a second of the model's forward alone, on one thread."""
    torch.set_num_threads(1)
    config = M3Config.from_dir(path)
    device = torch.device("cpu")
    model = load_model(
        path,
        config=config,
        kernels=reference_kernels(),
        device=device,
        dtype=torch.float32,
        progress=lambda _done, _total: None,
    )
    num_pages = -(-(PROMPT_TOKENS + OUTPUT_TOKENS) // config.block_tokens)
    shape = PageShape(
        sparse_layers=config.sparse_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        index_dim=config.index_dim,
        page_tokens=config.block_tokens,
        dtype=torch.float32,
    )
    pool = KvPool(shape, num_pages, device)
    with torch.inference_mode():
        token = forward(model, pool, list(prompt(0)), 0, num_pages)
        began = time.monotonic()
        for step in range(OUTPUT_TOKENS):
            token = forward(model, pool, [token], PROMPT_TOKENS + step, num_pages)
        return OUTPUT_TOKENS / (time.monotonic() - began)


def forward(model: M3Model, pool: KvPool, ids: list[int], start: int, num_pages: int) -> int:
    """Feeds ids at their positions; the most probable next id."""
    places = torch.arange(start, start + len(ids))
    rows = PagedRows(
        query_start_S1=torch.tensor([0, len(ids)], dtype=torch.int32),
        seq_lens_S=torch.tensor([start + len(ids)], dtype=torch.int32),
        page_table_SJ=torch.arange(num_pages, dtype=torch.int32)[None],
        max_query_len=len(ids),
        max_seq_len=start + len(ids),
    )
    batch = DeviceBatch(
        token_ids_T=torch.tensor(ids),
        positions_T=places,
        slots_T=places,
        rows=rows,
        sample_rows_S=torch.tensor([len(ids) - 1]),
        media=(),
    )
    return int(model.forward(batch, pool.layers)[0].argmax())


def wait_ready(address: str) -> None:
    """Returns when the worker takes requests."""

    async def wait() -> None:
        async with AsyncWorkerClient(address) as client:
            await client.wait_ready(120)

    # the port opens a moment after the process starts
    deadline = time.monotonic() + 60
    while True:
        try:
            with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), 1):
                break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    asyncio.run(wait())
