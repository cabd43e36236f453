"""Checkpoints that ship inside the package."""

from __future__ import annotations

from pathlib import Path


def builtin_checkpoint(name: str) -> Path:
    """Directory of a shipped checkpoint in the released layout.

    Raises:
        FileNotFoundError: no checkpoint of that name ships with the package.
    """
    path = Path(__file__).parent / name
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"no built-in checkpoint is called {name!r}")
    return path
