"""`m3stack worker`: settings from flags, environment and file, then serve until a signal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from m3stack.config import load_config
from m3stack.errors import StartupError
from m3stack.serve import run_worker


def main(argv: Sequence[str]) -> int:
    """Runs one worker.

    Returns:
        0 after a drained stop, 1 if it could not start or failed.
    """
    try:
        return run_worker(load_config(argv))
    except StartupError as error:
        print(f"m3stack worker: {error}", file=sys.stderr)
        return 1
