"""How many kernels Triton compiled while something was timed: such time is the compiler's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec


@dataclass(slots=True)
class Compiled:
    """Attributes:
    kernels: compiled anew; those found in the compiler's cache do not count.
    """

    kernels: int = 0


@contextmanager
def counted() -> Iterator[Compiled]:
    """Counts in its block, in every thread; without Triton nothing is compiled."""
    count = Compiled()
    if find_spec("triton") is None:
        yield count
        return
    from triton import knobs

    before = knobs.compilation.listener

    def listen(*, cache_hit: bool, **named: object) -> None:
        if not cache_hit:
            count.kernels += 1
        if before is not None:
            before(cache_hit=cache_hit, **named)  # type: ignore[arg-type]

    knobs.compilation.listener = listen  # type: ignore[assignment]
    try:
        yield count
    finally:
        knobs.compilation.listener = before
