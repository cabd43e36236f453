"""`m3stack gateway`: hands the arguments to the compiled gateway and waits for it."""

from __future__ import annotations

from collections.abc import Sequence

from m3stack import _gateway


def main(argv: Sequence[str]) -> int:
    """Runs the gateway until SIGINT or SIGTERM.

    Returns:
        The gateway's exit code; 0 after a drained stop.
    """
    return _gateway.serve(list(argv))
