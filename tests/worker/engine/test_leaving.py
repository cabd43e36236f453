"""Who leaves while a step computes, and what comes of it when letting go fails."""

from __future__ import annotations

import pytest

from m3stack.engine.leaving import Leaving


class _Requests:
    """Requests by handle; letting go of those in `stubborn` fails."""

    def __init__(self, *handles: int, stubborn: frozenset[int] = frozenset()) -> None:
        self.running = set(handles)
        self.forgotten: list[int] = []
        self._stubborn = stubborn

    def end(self, handle: int) -> bool:
        if handle not in self.running:
            return False
        self.running.remove(handle)
        return True

    def forget(self, handle: int) -> None:
        self.forgotten.append(handle)
        if handle in self._stubborn:
            raise ConnectionError(f"nobody to tell of {handle}")


def _leaving(requests: _Requests) -> Leaving:
    leaving = Leaving(requests.end, requests.forget)
    leaving.take()
    return leaving


def test_whoever_asked_while_the_thread_was_at_work_leaves_when_the_step_begins() -> None:
    requests = _Requests(1, 2)
    leaving = _leaving(requests)
    leaving.ask(1)
    assert requests.running == {1, 2}
    with leaving.waiting():
        assert requests.running == {2}
        leaving.ask(2)
        assert not requests.running
        assert requests.forgotten == []
    assert requests.forgotten == [1, 2]


def test_who_is_not_known_yet_is_left_to_the_message_behind_the_submission() -> None:
    requests = _Requests()
    leaving = _leaving(requests)
    with leaving.waiting():
        leaving.ask(7)
    assert requests.forgotten == []


def test_each_is_let_go_of_once_though_it_fails() -> None:
    requests = _Requests(1, 2, stubborn=frozenset({1}))
    leaving = _leaving(requests)
    step = leaving.waiting()
    step.__enter__()
    leaving.ask(1)
    leaving.ask(2)
    with pytest.raises(ConnectionError, match="of 1"):
        step.__exit__(None, None, None)
    with leaving.waiting():
        pass
    assert requests.forgotten == [1, 2]


def test_a_step_that_fails_keeps_nobody() -> None:
    requests = _Requests(1)
    leaving = _leaving(requests)

    def step() -> None:
        with leaving.waiting():
            leaving.ask(1)
            raise ValueError("the step")

    with pytest.raises(ValueError, match="the step"):
        step()
    assert requests.forgotten == [1]
