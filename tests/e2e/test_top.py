"""`m3stack top` shows running programs, and says which do not answer."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

from m3stack.cli.metrics_page import Between, parse
from m3stack.cli.top import WORKER_COLUMNS, Board, Program
from m3stack.life_metrics import LifeMetrics
from m3stack.local_ports import free_port
from m3stack.types import WorkerState
from tests.e2e.conftest import MODEL_NAME, Server


def top(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "m3stack", "top", "--once", "--interval-s", "0.2", *flags]
    environment = {"COLUMNS": "160", "PATH": ""}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)


def test_a_view_names_each_program_and_what_it_does(
    gateway: Server, worker: Server, tmp_path: Path
) -> None:
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60).raise_for_status()
    picture = tmp_path / "top.svg"
    done = top(
        "--gateway", gateway.address, "--worker", worker.metrics_address, "--svg", str(picture)
    )
    assert (done.returncode, done.stderr) == (0, "")
    for part in (gateway.address, worker.metrics_address, "1 ready", "pages", "ttft ms"):
        assert part in done.stdout
    row = next(line for line in done.stdout.splitlines() if worker.metrics_address in line)
    # what it does; that it is ready and healthy needs no word
    assert row.split()[1:3] == ["all", "0"]
    assert "<svg" in picture.read_text()


def test_a_program_that_does_not_answer_is_shown_with_the_reason(worker: Server) -> None:
    silent = f"127.0.0.1:{free_port()}"
    done = top("--gateway", silent, "--worker", worker.metrics_address)
    assert done.returncode == 0
    assert "refused" in next(line for line in done.stdout.splitlines() if silent in line)
    assert worker.metrics_address in done.stdout


def test_if_nobody_answers_the_exit_code_says_so() -> None:
    silent = f"127.0.0.1:{free_port()}"
    assert top("--gateway", silent, "--worker", silent).returncode == 1


@pytest.mark.parametrize(
    ("role", "state", "is_healthy", "shown"),
    [
        ("prefill", WorkerState.READY, True, "prefill"),
        ("decode", WorkerState.DRAINING, False, "decode draining"),
        ("encode", WorkerState.LOADING, False, "encode loading"),
        ("all", WorkerState.READY, False, "all stuck"),
    ],
)
def test_a_worker_is_shown_with_what_it_does_and_how_it_is(
    role: str, state: WorkerState, is_healthy: bool, shown: str
) -> None:
    registry = CollectorRegistry()
    life = LifeMetrics(registry, role)
    life.set_state(state)
    life.set_healthy(is_healthy)
    page = parse(generate_latest(registry).decode(), 1.0)
    assert str(dict(WORKER_COLUMNS)["role"](Between(page, page))) == shown


def test_roles_and_states_are_whole_words_on_a_terminal_of_80_columns() -> None:
    registry = CollectorRegistry()
    life = LifeMetrics(registry, "prefill")
    life.set_state(WorkerState.DRAINING)
    page = parse(generate_latest(registry).decode(), 1.0)
    board = Board([Program("127.0.0.1:9100", is_gateway=False, between=Between(page, page))])
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(board.render())
    words = console.export_text().split()
    assert {"127.0.0.1:9100", "prefill", "draining", "cached", "evict"} <= set(words)


def test_a_worker_that_tells_no_role_is_shown_all_the_same() -> None:
    page = parse("", 1.0)
    assert str(dict(WORKER_COLUMNS)["role"](Between(page, page))) == "–"
