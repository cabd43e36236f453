"""Servers and clients that come and go: nothing hangs, nothing leaks, every stream ends once."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil

from m3stack.local_ports import free_port
from tests.e2e.conftest import MODEL_NAME, STOP_TIMEOUT_S, Server, Stack, wait_for

LONG = {
    "model": MODEL_NAME,
    "messages": [{"role": "user", "content": "Talk for ever."}],
    "max_tokens": 20_000,
    "stream": True,
    "ignore_eos": True,
    "thinking": {"type": "disabled"},
}


def metric(server: Server, name: str) -> float:
    """Sum of a metric's samples."""
    text = httpx.get(f"http://{server.metrics_address or server.address}/metrics", timeout=60).text
    samples = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    assert samples, f"no metric {name} in:\n{text}"
    return sum(float(value) for value in samples)


def eventually(claim: Callable[[], bool]) -> None:
    """Waits for a claim to become true."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while not claim():
        assert time.monotonic() < deadline, "the claim never became true"
        time.sleep(0.05)


def data_lines(response: httpx.Response) -> list[str]:
    return [line[5:].strip() for line in response.iter_lines() if line.startswith("data:")]


def test_a_client_that_leaves_frees_its_pages(stack: Stack) -> None:
    worker = stack.worker("--set", "prefix_cache=false")
    gateway = stack.gateway(worker)
    wait_for(gateway, "/ready")
    with (
        httpx.Client(timeout=100) as client,
        client.stream("POST", f"{gateway.url}/v1/chat/completions", json=LONG) as response,
    ):
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)
        assert metric(worker, "m3stack_worker_running_requests") == 1
        assert metric(worker, "m3stack_worker_used_pages") > 0
    eventually(lambda: metric(worker, "m3stack_worker_running_requests") == 0)
    eventually(lambda: metric(worker, "m3stack_worker_used_pages") == 0)


def test_a_worker_gone_mid_stream_is_one_error_event_and_no_done(stack: Stack) -> None:
    worker = stack.worker()
    gateway = stack.gateway(worker)
    wait_for(gateway, "/ready")
    with (
        httpx.Client(timeout=100) as client,
        client.stream("POST", f"{gateway.url}/v1/chat/completions", json=LONG) as response,
    ):
        seen: list[str] = []
        for line in response.iter_lines():
            if line.startswith("data:"):
                seen.append(line[5:].strip())
                if len(seen) == 4:
                    worker.kill()
    assert "[DONE]" not in seen
    errors = [data for data in seen if "error" in json.loads(data)]
    assert len(errors) == 1
    assert seen[-1] == errors[0]
    # and the next request is told that nobody is there
    eventually(lambda: httpx.get(f"{gateway.url}/ready", timeout=60).status_code == 503)
    answer = httpx.post(
        f"{gateway.url}/v1/chat/completions", json={**LONG, "stream": False}, timeout=60
    )
    assert answer.status_code == 503


def test_without_a_worker_requests_are_told_what_is_missing(stack: Stack) -> None:
    gateway = stack.gateway()
    answer = httpx.post(
        f"{gateway.url}/v1/chat/completions", json={**LONG, "stream": False}, timeout=60
    )
    assert answer.status_code == 503
    assert "worker" in answer.json()["error"]["message"]
    ready = httpx.get(f"{gateway.url}/ready", timeout=60)
    assert ready.status_code == 503
    assert "worker" in ready.text


def test_sigterm_lets_running_streams_finish(stack: Stack) -> None:
    worker = stack.worker()
    gateway = stack.gateway(worker)
    wait_for(gateway, "/ready")
    body = {**LONG, "max_tokens": 60}
    with (
        httpx.Client(timeout=100) as client,
        client.stream("POST", f"{gateway.url}/v1/chat/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        gateway.process.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert rest[-1] == "data: [DONE]" or "data: [DONE]" in rest[-2:]
    assert gateway.process.wait(STOP_TIMEOUT_S) == 0
    assert worker.stop() == 0


def test_up_serves_until_interrupted_and_leaves_nothing_behind(tmp_path: Path) -> None:
    port = free_port()
    with (tmp_path / "up.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "m3stack", "up", "--port", str(port), "--device", "cpu"],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    server = Server(process, f"127.0.0.1:{port}")
    wait_for(server, "/ready")
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    process.send_signal(signal.SIGINT)
    assert process.wait(STOP_TIMEOUT_S) == 0
    assert not [child for child in children if child.is_running()]


def test_up_names_the_port_that_is_taken(gateway: Server) -> None:
    port = gateway.address.rpartition(":")[2]
    done = subprocess.run(
        [sys.executable, "-m", "m3stack", "up", "--port", port], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"{port} is in use" in done.stdout


def test_many_clients_leaving_at_once_leave_no_request_behind(stack: Stack) -> None:
    worker = stack.worker("--set", "prefix_cache=false")
    gateway = stack.gateway(worker)
    wait_for(gateway, "/ready")

    def come_and_go() -> None:
        with (
            httpx.Client(timeout=100) as client,
            client.stream("POST", f"{gateway.url}/v1/chat/completions", json=LONG) as response,
        ):
            next(response.iter_lines())

    threads = [threading.Thread(target=come_and_go) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eventually(lambda: metric(worker, "m3stack_worker_used_pages") == 0)
    assert metric(worker, "m3stack_worker_waiting_requests") == 0
