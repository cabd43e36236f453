"""Ranks on GPUs, one each, over NCCL: the same tokens, and none that outlives another."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from m3stack.client import WorkerClient
from m3stack.errors import ErrorKind, WorkerError
from m3stack.serve import EXIT_DRAINED, EXIT_FAILED
from m3stack.types import Started, WorkerState
from tests.parity import golden
from tests.worker.served import Served, config, serve_around
from tests.worker.test_serve import text_request
from tests.worker.test_tensor_parallel import DEATH_S, requests_of_all_sorts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def tokens_with(
    *, tensor_parallel: int, expert_parallel: int = 1, shard_index_keys: bool = False
) -> list[list[int]]:
    """What each request gives in fp32 and plain torch, so that only the division differs."""
    results: list[list[int]] = []

    def scenario(served: Served) -> None:
        served.wait_until(WorkerState.READY)
        with ThreadPoolExecutor(4) as pool:
            results.extend(pool.map(served.tokens, requests_of_all_sorts()))

    settings = config(
        device="cuda",
        dtype="float32",
        kernels="reference",
        tensor_parallel=tensor_parallel,
        expert_parallel=expert_parallel,
        shard_index_keys=shard_index_keys,
    )
    assert serve_around(settings, scenario) == EXIT_DRAINED
    return results


def test_two_gpus_give_the_tokens_of_one() -> None:
    whole = tokens_with(tensor_parallel=1)
    assert tokens_with(tensor_parallel=2) == whole
    assert tokens_with(tensor_parallel=2, expert_parallel=2, shard_index_keys=True) == whole


def test_a_killed_rank_ends_the_worker_out_of_its_collective() -> None:
    command = [sys.executable, "-m", "m3stack", "worker", "--listen", "127.0.0.1:0"]
    command += ["--model-path", str(golden.DIRECTORY), "--device", "cuda", "--dtype", "float32"]
    command += ["--kernels", "reference", "--tensor-parallel", "2", "--set", "num_pages=80"]
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
            assert isinstance(next(running), Started)
            follower = next(
                child
                for child in psutil.Process(leader.pid).children()
                if "spawn_main" in " ".join(child.cmdline())
            )
            killed_at = time.monotonic()
            os.kill(follower.pid, signal.SIGKILL)
            with pytest.raises(WorkerError) as failed:
                list(running)
            assert failed.value.kind is ErrorKind.INTERNAL
            lines += leader.stderr
            assert leader.wait(DEATH_S) == EXIT_FAILED
            assert time.monotonic() - killed_at < DEATH_S
        assert any("rank 1 ended with exit code -9" in line for line in lines), lines
    finally:
        leader.kill()
        leader.wait()
        leader.stderr.close()
