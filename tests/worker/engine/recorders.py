"""Recorders for a CPU, which has nothing to record on."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from m3stack.engine.graphs import Recording


class Again:
    """Stands in for a recording on a CPU: the same inputs, computed again, into one output."""

    num_bytes = 100

    def __init__(self, run: Callable[[], Tensor], num_bytes: int = num_bytes) -> None:
        self._run = run
        self._output = run()
        self.num_bytes = num_bytes
        self.is_released = False

    def replay(self) -> Tensor:
        assert not self.is_released
        self._output.copy_(self._run())
        return self._output

    def release(self) -> None:
        self.is_released = True


class AgainRecorder:
    """Notes what it made."""

    def __init__(self, num_bytes: int = Again.num_bytes) -> None:
        self._num_bytes = num_bytes
        self.made: list[Again] = []

    def warm_up(self, run: Callable[[], Tensor]) -> None:
        run()

    def record(self, run: Callable[[], Tensor]) -> Recording:
        # collectives in it are queued alike on all ranks, as where they are only recorded
        self.made.append(Again(run, self._num_bytes))
        return self.made[-1]


class RefusingRecorder:
    """Fails where a capture would, behind the collectives that it meets."""

    def __init__(self) -> None:
        self.attempts = 0

    def warm_up(self, run: Callable[[], Tensor]) -> None:
        run()

    def record(self, run: Callable[[], Tensor]) -> Recording:
        self.attempts += 1
        run()
        raise RuntimeError("cannot be recorded")
