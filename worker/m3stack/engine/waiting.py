"""The queue: who may leave it next, by priority, age and tenant."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator

from m3stack.engine.sequence import Sequence

MAX_PRIORITY = 10
AGING_STEPS = 64
"""One level of priority is worth that many steps of waiting."""

# before every order that a priority and a step can make
_FIRST = -(1 << 60)


def order_of(step: int, priority: int, arrival: int) -> tuple[int, int]:
    """Where a request stands among all others; smaller goes first.

    A request of priority p that arrives at step s stands as if it had arrived at step
    s - p * AGING_STEPS. Priorities therefore age: nobody who comes more than
    (p' - p) * AGING_STEPS steps later with priority p' passes it any more.
    """
    assert abs(priority) <= MAX_PRIORITY
    return step - priority * AGING_STEPS, arrival


def promoted_order(order: tuple[int, int]) -> tuple[int, int]:
    """Before everybody who has not been promoted; among those, by age."""
    return order if order[0] <= _FIRST else (_FIRST, order[1])


def order_key(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


class WaitingQueue:
    """Sequences that wait, in order."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self.prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __getitem__(self, index: int) -> Sequence:
        return self._sequences[index]

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence at the place its order gives it."""
        insort(self._sequences, sequence, key=order_key)
        self.prompt_tokens += sequence.num_prompt

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._sequences, sequence.order, key=order_key)
        assert self._sequences[index] is sequence
        del self._sequences[index]
        self.prompt_tokens -= sequence.num_prompt


class TenantCaps:
    """How many sequences each tenant runs, and whether that is all it may.

    Args:
        max_running: of one tenant; 0 sets no limit.
    """

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._running: Counter[str] = Counter()

    def allows(self, tenant: str) -> bool:
        """Whether one more sequence of a tenant may run."""
        return not self._max_running or self._running[tenant] < self._max_running

    def started(self, tenant: str) -> None:
        self._running[tenant] += 1

    def stopped(self, tenant: str) -> None:
        self._running[tenant] -= 1
        assert self._running[tenant] >= 0
        if not self._running[tenant]:
            del self._running[tenant]

    def check(self, running: list[Sequence]) -> None:
        """Raises AssertionError unless exactly these run."""
        assert Counter(s.request.tenant for s in running) == self._running
