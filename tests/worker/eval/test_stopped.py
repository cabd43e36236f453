"""A stopped evaluation leaves none of its servers behind."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

from m3stack.eval.servers import READY_TIMEOUT_S


def test_a_stopped_evaluation_leaves_no_server_behind() -> None:
    command = [sys.executable, "-m", "m3stack", "eval", "--skills", "picture_colour"]
    evaluation = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    whole = psutil.Process(evaluation.pid)
    try:
        deadline = time.monotonic() + READY_TIMEOUT_S
        # `m3stack up`, the worker and the gateway
        while len(started := whole.children(recursive=True)) < 3:
            assert evaluation.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)  # nothing tells when a process has begun another: look again
    finally:
        evaluation.terminate()
    _, said = evaluation.communicate(timeout=READY_TIMEOUT_S)
    assert evaluation.returncode == 1
    assert b"stopped" in said
    _, alive = psutil.wait_procs(started, timeout=READY_TIMEOUT_S)
    assert not alive
