"""A client that leaves, whatever its request was doing: everything it held is free again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import Stack
from tests.e2e.leaving import PHASES, Fleet, leave


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    stack = Stack(tmp_path_factory.mktemp("leaving"))
    try:
        with Fleet.start(stack) as fleet:
            yield fleet
    finally:
        stack.close()


@pytest.mark.parametrize("phase", PHASES)
def test_whoever_leaves_leaves_nothing(fleet: Fleet, phase: str) -> None:
    # `python -m tests.e2e.leaving` tells how long it took; here it is bounded, and zero at the end
    leave(fleet, phase)
    assert fleet.held() == {}
