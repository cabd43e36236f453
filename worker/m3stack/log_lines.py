"""How the package logs: one line an event, to one stream."""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO


class _LineFormatter(logging.Formatter):
    """`time level logger message`, UTC, one line, then the traceback if there is one."""

    converter = time.gmtime

    def __init__(self) -> None:
        super().__init__(
            fmt="%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s %(message)s",
            datefmt="%Y-%m-%dT%H:%M:%S",
        )


def set_up_logging(level: str, stream: TextIO = sys.stderr) -> None:
    """Sends everything the package logs at `level` or above to `stream`.

    Args:
        level: debug, info, warn or error.
        stream: where lines go.
    """
    logger = logging.getLogger("m3stack")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_LineFormatter())
    logger.addHandler(handler)
    logger.setLevel({"warn": "WARNING"}.get(level, level.upper()))
    logger.propagate = False
