"""Ranks on GPUs, one each, over NCCL: the same tokens, and none that outlives another."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from m3stack.checkpoints import builtin_checkpoint
from m3stack.client import WorkerClient
from m3stack.errors import ErrorKind, WorkerError
from m3stack.serve import EXIT_DRAINED, EXIT_FAILED
from m3stack.types import Request, Tokens, WorkerState
from tests.parity import golden
from tests.worker.served import Served, config, serve_around
from tests.worker.test_serve import metric, text_request
from tests.worker.test_tensor_parallel import DEATH_S, requests_of_all_sorts

TINY = builtin_checkpoint("tiny")
# as is promised of a worker that has lost a rank
END_S = 10

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def tokens_with(
    path: Path, requests: list[Request], **flags: object
) -> tuple[list[list[int]], int]:
    """What each request gives in fp32, all at once, and how many steps were replayed."""
    results: list[list[int]] = []
    replayed: list[float] = []

    def scenario(served: Served) -> None:
        served.wait_until(WorkerState.READY)
        with ThreadPoolExecutor(4) as pool:
            results.extend(pool.map(served.tokens, requests))
        if flags.get("decode_graph_bytes") != 0:
            replayed.append(metric(served, "m3stack_worker_recorded_steps_total"))

    settings = config(
        path,
        device="cuda",
        dtype="float32",
        # every size that is met is compiled anyway
        first_steps_s=0.0,
        metrics_listen="127.0.0.1:0",
        # what it says is shown where a test fails
        log_level="info",
        **flags,
    )
    assert serve_around(settings, scenario) == EXIT_DRAINED
    return results, int(sum(replayed))


# one step after the other, none recorded
PLAIN = {"step_overlap": "off", "decode_graph_bytes": 0}
BOTH = {"expert_parallel": 2, "shard_index_keys": True}


def long_requests() -> list[Request]:
    return [
        text_request(40, max_tokens=40),
        text_request(130, max_tokens=30),
        text_request(300, max_tokens=30, temperature=1.0, top_p=0.95, seed=5),
        text_request(70, max_tokens=40, temperature=0.8, seed=6),
    ]


def test_steps_queued_ahead_and_replayed_on_two_gpus_give_the_tokens_of_plain_ones_on_one() -> None:
    whole, _ = tokens_with(TINY, long_requests(), **PLAIN)
    # as it is by default
    tokens, replayed = tokens_with(TINY, long_requests(), tensor_parallel=2)
    assert tokens == whole
    assert replayed > 10, "hardly any step was replayed"


def test_steps_that_cannot_be_recorded_go_on_as_they_are_on_two_gpus() -> None:
    # candidates are chosen by plain torch in widths other than M3's, which asks for lengths
    flags = {"tensor_parallel": 2, **BOTH}
    plain, _ = tokens_with(TINY, long_requests(), **flags, **PLAIN)
    tokens, replayed = tokens_with(TINY, long_requests(), **flags)
    assert tokens == plain
    assert replayed == 0


def test_two_gpus_give_the_tokens_of_one_in_plain_torch() -> None:
    plain = {"kernels": "reference", **PLAIN}
    requests = requests_of_all_sorts()
    whole, _ = tokens_with(golden.DIRECTORY, requests, **plain)
    for flags in ({}, BOTH):
        tokens, _ = tokens_with(golden.DIRECTORY, requests, tensor_parallel=2, **plain, **flags)
        assert tokens == whole


def test_a_killed_rank_ends_the_worker_out_of_its_recorded_collectives() -> None:
    command = [sys.executable, "-m", "m3stack", "worker", "--listen", "127.0.0.1:0"]
    command += ["--model-path", str(TINY), "--device", "cuda", "--dtype", "float32"]
    command += ["--tensor-parallel", "2", "--set", "num_pages=80", "--set", "first_steps_s=0"]
    lines: list[str] = []
    leader = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert leader.stderr is not None
    try:
        port = 0
        for line in leader.stderr:
            lines.append(line)
            found = re.search(r"listening address=127\.0\.0\.1:(\d+)", line)
            port = int(found[1]) if found else port
            if "ready model=" in line:
                break
        with WorkerClient(f"127.0.0.1:{port}") as client:
            running = client.generate(text_request(20, max_tokens=8000))
            told = (event for event in running if isinstance(event, Tokens))
            for _ in range(40):
                next(told)
            follower = next(
                child
                for child in psutil.Process(leader.pid).children()
                if "spawn_main" in " ".join(child.cmdline())
            )
            killed_at = time.monotonic()
            os.kill(follower.pid, signal.SIGKILL)
            with pytest.raises(WorkerError) as failed:
                list(told)
            assert failed.value.kind is ErrorKind.INTERNAL
            lines += leader.stderr
            assert leader.wait(DEATH_S) == EXIT_FAILED
            assert time.monotonic() - killed_at < END_S
        assert any("graph_recorded" in line for line in lines), lines
        assert any("rank 1 ended with exit code -9" in line for line in lines), lines
    finally:
        leader.kill()
        leader.wait()
        leader.stderr.close()
