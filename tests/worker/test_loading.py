"""A worker that is told to stop before it is ready ends at once, whatever loading is doing."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from m3stack.checkpoints import builtin_checkpoint
from m3stack.errors import LoadingStoppedError, StartupError
from m3stack.loading import Loading

# what a worker does whose loading waits for something that never comes, as for a compiler
HANGS = """
import sys, threading
from m3stack import serve
from m3stack.flags import load_config
def assemble(config, model, hardware, around):
    print("loading hangs", file=sys.stderr, flush=True)
    threading.Event().wait()
serve.assemble = assemble
sys.exit(serve.run_worker(load_config(sys.argv[1:])))
"""


@contextmanager
def worker(program: list[str], *settings: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, *program, "--listen", "127.0.0.1:0", "--device", "cpu"]
    command += ["--model-path", str(builtin_checkpoint("tiny"))]
    for setting in settings:
        command += ["--set", setting]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def stopped_at(process: subprocess.Popen[str], line_part: str) -> str:
    """What the worker says after SIGTERM, which it gets when it says something else."""
    assert process.stderr is not None
    seen: list[str] = []
    for line in process.stderr:
        seen.append(line)
        if line_part in line:
            break
    else:
        raise AssertionError("".join(seen))
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate()
    return rest


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stop_ends_the_first_steps(ranks: int) -> None:
    program = ["-m", "m3stack", "worker", "--tensor-parallel", str(ranks)]
    # far more steps than a CPU can run while the signal is on its way
    settings = ("first_steps_s=600", "num_pages=9000", "max_batch_tokens=8192")
    with worker(program, *settings) as process:
        rest = stopped_at(process, "first_steps_begun")
        assert process.returncode == 0, rest
    assert "stopped_while_loading" in rest
    assert "ready model" not in rest
    assert "failed" not in rest


def test_a_stop_ends_a_worker_whose_loading_does_not_look_up() -> None:
    with worker(["-c", HANGS]) as process:
        rest = stopped_at(process, "loading hangs")
        assert process.returncode == 0, rest
    assert "stopped_while_loading hangs=True" in rest


def test_what_loading_raises_reaches_who_waits_for_it() -> None:
    def load() -> int:
        raise ValueError("no such checkpoint")

    with pytest.raises(ValueError, match="no such checkpoint"):
        asyncio.run(Loading("m").run(load, asyncio.Event()))
    assert asyncio.run(Loading("m").run(lambda: 3, asyncio.Event())) == 3


def test_loading_that_looks_up_is_waited_for() -> None:
    loading = Loading("m")
    began = threading.Event()

    def load() -> None:
        began.set()
        while True:
            loading.check()

    async def scenario() -> None:
        stop = asyncio.Event()
        running = asyncio.create_task(loading.run(load, stop))
        await asyncio.to_thread(began.wait)
        loading.stop()
        stop.set()
        await running

    with pytest.raises(LoadingStoppedError):
        asyncio.run(scenario())
    assert not loading.hangs


@pytest.mark.parametrize("looks_up", [True, False])
def test_loading_that_cannot_end_well_is_given_up_by_name(looks_up: bool) -> None:
    loading = Loading("m")
    began, freed = threading.Event(), threading.Event()

    def load() -> None:
        began.set()
        while looks_up:
            loading.check()
        # as for a rank that never comes
        freed.wait()

    async def scenario() -> None:
        running = asyncio.create_task(loading.run(load, asyncio.Event()))
        await asyncio.to_thread(began.wait)
        await asyncio.to_thread(loading.fail, RuntimeError("host 3 is silent"))
        await running

    with pytest.raises(StartupError, match="while loading: host 3 is silent"):
        asyncio.run(scenario())
    assert loading.hangs is not looks_up
    freed.set()
