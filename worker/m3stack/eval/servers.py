"""Gateway and worker as processes of their own, for as long as an evaluation takes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch
from safetensors.torch import load_file

from m3stack.errors import StartupError
from m3stack.local_ports import free_port
from m3stack.models.minimax_m3 import tiny

READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0


@contextmanager
def served(model: Path, *, device: str = "cpu") -> Iterator[str]:
    """A model behind REST; gives the URL.

    Raises:
        StartupError: it was not ready in time, or ended.
    """
    port = free_port()
    command = [sys.executable, "-m", "m3stack", "up", "--model", str(model)]
    command += ["--port", str(port), "--device", device]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(server, url)
        yield url
    finally:
        server.terminate()
        server.wait(STOP_TIMEOUT_S)


def without_index(model: Path, directory: Path) -> None:
    """A copy of a tiny checkpoint whose index branch chooses by weights that learned nothing."""
    for file in model.iterdir():
        if file.is_file() and file.name != "model.safetensors":
            shutil.copy(file, directory / file.name)
    weights = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, tensor in weights.items():
        if "index_" not in name:
            continue
        drawn = torch.randn(tensor.shape, generator=generator)
        # norms scale by one plus their weight
        weights[name] = (drawn * 0.1 if tensor.dim() > 1 else drawn * 0).to(tensor.dtype)
    config = json.loads((model / "config.json").read_text())
    tiny.save_weights(weights, config, directory)


def _wait(server: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise StartupError(f"`m3stack up` ended with exit code {server.returncode}")
        try:
            if httpx.get(f"{url}/ready", timeout=2.0).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise StartupError(f"`m3stack up` was not ready after {READY_TIMEOUT_S:.0f} s")
