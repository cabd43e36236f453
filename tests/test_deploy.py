"""The example settings are known to both programs, and are their defaults."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from m3stack.config import resolve, setting_specs

EXAMPLE = Path(__file__).parents[1] / "deploy" / "m3stack.example.toml"


def test_the_worker_knows_every_key_of_the_example() -> None:
    config = resolve(flags={}, environ={}, file=EXAMPLE)
    assert config.listen == "127.0.0.1:50051"


def test_the_example_shows_the_defaults_of_the_worker() -> None:
    table = tomllib.loads(EXAMPLE.read_text())["worker"]
    defaults = {spec.name: spec.default for spec in setting_specs()}
    shown = {name: value for name, value in table.items() if name != "metrics_listen"}
    assert shown == {name: defaults[name] for name in shown}


def test_the_gateway_knows_every_key_of_the_example() -> None:
    # the model directory of the example is not there: the complaint must be about that alone
    done = subprocess.run(
        [sys.executable, "-m", "m3stack", "gateway", "--config", str(EXAMPLE)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode != 0
    assert "/models/MiniMax-M3" in done.stderr
    assert "unknown" not in done.stderr
