"""What keeps a program from starting, or from being ready, is said by name."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from m3stack.checkpoints import builtin_checkpoint
from m3stack.cli.worker import main as worker_main
from m3stack.local_ports import free_port
from tests.e2e.conftest import MODEL_NAME, START_TIMEOUT_S, Server, Stack, wait_for

TLS = Path(__file__).parents[1] / "data" / "tls"
CONFIG, START = 2, 1


def refused(kind: str, *flags: str) -> tuple[int, str]:
    """The exit code and the complaint of a program that must not start."""
    model = ["--model-path", str(builtin_checkpoint("tiny"))]
    command = [sys.executable, "-m", "m3stack", kind]
    command += [*(model if "--model-path" not in flags else []), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "panicked" not in done.stderr
    return done.returncode, done.stderr


def bad_certificate(folder: Path) -> str:
    shutil.copytree(TLS, folder / "tls")
    shutil.copy2(TLS / "server.key", folder / "tls" / "tls.key")
    (folder / "tls" / "tls.crt").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n")
    return str(folder / "tls")


def empty_folder(folder: Path) -> str:
    (folder / "nothing").mkdir()
    return str(folder / "nothing")


@pytest.mark.parametrize(
    ("flags", "code", "named"),
    [
        (lambda _: ["--model-path", "/no/such/model"], START, "/no/such/model"),
        (lambda folder: ["--model-path", empty_folder(folder)], START, "nothing"),
        (lambda folder: ["--tls-dir", bad_certificate(folder)], START, "tls.crt"),
        (lambda folder: ["--tls-dir", empty_folder(folder)], START, "tls.crt"),
        (lambda _: ["--api-keys", "/no/such/keys"], START, "/no/such/keys"),
        (lambda _: ["--tenant-limits", "/no/such/limits"], START, "/no/such/limits"),
        (lambda _: ["--config", "/no/such/file"], CONFIG, "/no/such/file"),
        (lambda _: ["--listen", f"0.0.0.0:{free_port()}"], CONFIG, "--allow-anonymous"),
        (lambda _: ["--workers", "ftp://somewhere:1"], CONFIG, "ftp://somewhere:1"),
        (lambda _: ["--set", "no_such_setting=1"], CONFIG, "no_such_setting"),
        (lambda _: ["--max-concurrent-requests", "0"], CONFIG, "max_concurrent_requests"),
    ],
)
def test_a_gateway_says_why_it_cannot_start(
    tmp_path: Path, flags: Callable[[Path], list[str]], code: int, named: str
) -> None:
    listen = ["--listen", f"127.0.0.1:{free_port()}"]
    chosen = flags(tmp_path)
    found, complaint = refused("gateway", *(listen if "--listen" not in chosen else []), *chosen)
    assert named in complaint
    assert found == code, complaint


@pytest.mark.parametrize(
    ("kind", "flag"),
    [
        ("gateway", "--listen"),
        ("gateway", "--admin-listen"),
        ("worker", "--listen"),
        ("worker", "--metrics-listen"),
    ],
)
def test_a_port_that_is_taken_is_named(kind: str, flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        others = [] if flag == "--listen" else ["--listen", "127.0.0.1:0"]
        code, complaint = refused(kind, flag, address, *others)
    assert address in complaint
    assert code == START


def test_metrics_are_served_on_an_address_of_the_newer_kind() -> None:
    try:
        taken = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with taken:
        address = f"[::1]:{taken.getsockname()[1]}"
        code, complaint = refused("worker", "--metrics-listen", address, "--listen", "127.0.0.1:0")
    # the address was understood: what is wrong is that it is taken
    assert "in use" in complaint
    assert code == START


def test_a_gateway_that_was_given_no_port_says_which_it_has() -> None:
    command = [sys.executable, "-m", "m3stack", "gateway", "--listen", "127.0.0.1:0"]
    command += ["--admin-listen", "127.0.0.1:0", "--workers", "127.0.0.1:1"]
    command += ["--log-format", "json", "--model-path", str(builtin_checkpoint("tiny"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        try:
            said = next(line for line in process.stdout if b"gateway listens" in line)
            told = json.loads(said)
            for name in ("address", "admin"):
                reply = httpx.get(f"http://{told[name]}/health", timeout=60)
                assert reply.status_code == 200
        finally:
            process.terminate()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (lambda _: ["--model-path", "/no/such/model"], "/no/such/model"),
        (lambda folder: ["--tls-dir", bad_certificate(folder)], "tls.crt"),
        (lambda folder: ["--tls-dir", empty_folder(folder)], "nothing/tls.key"),
    ],
)
def test_a_worker_says_why_it_cannot_start(
    tmp_path: Path, flags: Callable[[Path], list[str]], named: str
) -> None:
    found, complaint = refused(
        "worker", "--listen", f"127.0.0.1:{free_port()}", "--device", "cpu", *flags(tmp_path)
    )
    assert named in complaint
    assert found == START, complaint


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--config", "/no/such/file"], "/no/such/file"),
        (["--metrics-listen", "nonsense"], "nonsense"),
        (["--set", "no_such_setting=1"], "no_such_setting"),
        (["--max-sequences", "0"], "max_sequences"),
        (["--set", "hosts=3"], "hosts"),
    ],
)
def test_settings_of_a_worker_that_cannot_be_used_have_a_code_of_their_own(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # as in a process of its own, without its imports: nothing is begun
    assert worker_main(["--device", "cpu", "--listen", "127.0.0.1:0", *flags]) == CONFIG
    assert named in capsys.readouterr().err


def test_a_worker_with_another_model_is_refused_by_name(stack: Stack, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(builtin_checkpoint("tiny"), other)
    config = json.loads((other / "config.json").read_text())
    text = config.get("text_config", config)
    text["max_position_embeddings"] //= 2
    (other / "config.json").write_text(json.dumps(config))
    worker = stack.worker("--model-path", str(other))
    gateway = stack.gateway(worker)
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (ready := httpx.get(f"{gateway.url}/ready", timeout=60).json())["workers"]["refused"]:
        assert time.monotonic() < deadline, ready
        # /ready tells no one when it changes: it is asked again
        time.sleep(0.1)
    assert ready["workers"]["refused"] == 1
    assert worker.address in str(ready["missing"])


@pytest.mark.parametrize("kind", ["gateway", "worker"])
def test_a_full_disk_under_the_log_stops_nobody(kind: str, stack: Stack) -> None:
    def started(which: str, *flags: str) -> Server:
        address = f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "m3stack", which, "--listen", address, *flags]
        command += ["--model-path", str(builtin_checkpoint("tiny")), "--log-level", "debug"]
        command += ["--served-model-name", MODEL_NAME]
        # every write to this device fails for want of space
        with Path("/dev/full").open("wb") as full:
            process = subprocess.Popen(command, stdout=full, stderr=full)
        server = Server(process, address)
        stack.servers.append(server)
        return server

    if kind == "worker":
        gateway = stack.gateway(started("worker", "--device", "cpu"))
    else:
        worker = stack.worker()
        gateway = started("gateway", "--workers", worker.url)
    wait_for(gateway, "/ready")
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    for _ in range(3):
        reply = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60)
        assert reply.status_code == 200
    wrong = httpx.post(f"{gateway.url}/v1/chat/completions", json={"model": 1}, timeout=60)
    assert wrong.status_code == 400
