"""A worker that keeps an int8 copy of its index keys answers as one that does not."""

from __future__ import annotations

import pytest

from m3stack.config import resolve
from m3stack.errors import StartupError
from m3stack.serve import EXIT_DRAINED
from m3stack.types import WorkerState
from tests.worker.served import Served, config, serve_around
from tests.worker.test_serve import text_request


def tokens_with(index_copy: str) -> list[list[int]]:
    results: list[list[int]] = []

    def scenario(served: Served) -> None:
        served.wait_until(WorkerState.READY)
        for length in (300, 20):
            results.append(served.tokens(text_request(length, max_tokens=4)))

    # so few pages that some go to the host and back
    settings = config(index_copy=index_copy, host_cache_bytes=1 << 24, num_pages=8)
    assert serve_around(settings, scenario) == EXIT_DRAINED
    return results


def test_a_worker_with_a_copy_of_its_index_keys_gives_the_same_tokens() -> None:
    assert tokens_with("int8") == tokens_with("none")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"index_copy": "fp8"}, "index_copy.*one of none, int8"),
        (
            {"index_copy": "int8", "tensor_parallel": 2, "shard_index_keys": True},
            "index_copy is int8, but index keys that ranks hold in parts",
        ),
    ],
)
def test_a_copy_that_cannot_be_is_refused(flags: dict[str, object], said: str) -> None:
    with pytest.raises(StartupError, match=said):
        resolve(flags=flags, environ={})
