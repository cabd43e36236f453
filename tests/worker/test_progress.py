"""Progress is a bar on a terminal and a few lines in a log, with bytes, rate and time left."""

from __future__ import annotations

import io

import pytest

from m3stack.progress import GIB, TransferProgress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(steps: list[tuple[float, int]], total: int) -> list[str]:
    """What a log shows for (seconds since the last, bytes done) steps."""
    clock, stream = Clock(), io.StringIO()
    with TransferProgress("loading m", stream=stream, clock=clock) as progress:
        for seconds, done in steps:
            clock.now += seconds
            progress(done, total)
    return stream.getvalue().splitlines()


def test_a_log_shows_the_beginning_every_few_seconds_and_the_end() -> None:
    steps = [(0.0, 0)] + [(0.5, n * GIB // 2) for n in range(1, 41)]
    assert lines(steps, 20 * GIB) == [
        "loading m: 0.00 of 20.00 GiB (0%)",
        "loading m: 5.00 of 20.00 GiB (25%), 1.00 GiB/s, 15 s left",
        "loading m: 10.00 of 20.00 GiB (50%), 1.00 GiB/s, 10 s left",
        "loading m: 15.00 of 20.00 GiB (75%), 1.00 GiB/s, 5 s left",
        "loading m: 20.00 of 20.00 GiB (100%) in 20 s, 1.00 GiB/s",
    ]


def test_a_resumed_transfer_does_not_count_what_was_there() -> None:
    shown = lines([(0.0, 10 * GIB), (10.0, 11 * GIB)], 20 * GIB)
    assert shown[1].endswith("0.10 GiB/s, 1 min 30 s left")


@pytest.mark.parametrize(
    ("rate", "left"), [(1.0, "16 min 40 s"), (0.1, "2 h 46 min"), (25.0, "40 s")]
)
def test_time_left_is_readable(rate: float, left: str) -> None:
    total = 1000 * GIB
    done = int(10 * rate * GIB)
    line = lines([(0.0, 0), (10.0, done)], total + done)[1]
    assert line.endswith(f" {left} left")


def test_the_end_is_said_once_and_nothing_at_all_is_done_at_once() -> None:
    assert lines([(0.0, 0), (1.0, 5), (9.0, 5)], 5) == [
        "loading m: 0.00 of 0.00 GiB (0%)",
        "loading m: 0.00 of 0.00 GiB (100%) in 1 s, 0.00 GiB/s",
    ]
    assert lines([(0.0, 0)], 0) == ["loading m: 0.00 of 0.00 GiB (100%)"]


def test_a_terminal_gets_a_bar_that_ends_at_the_total() -> None:
    stream = Terminal()
    with TransferProgress("loading m", stream=stream) as progress:
        progress(0, 3 * GIB)
        progress(3 * GIB, 3 * GIB)
    shown = stream.getvalue()
    assert "loading m" in shown
    assert "100%" in shown
    assert "3.0/3.0 GiB" in shown
