"""A worker whose cache has an int8 copy of its index keys, or K and V in e4m3."""

from __future__ import annotations

import pytest

from m3stack.config import resolve
from m3stack.errors import StartupError
from m3stack.serve import EXIT_DRAINED
from m3stack.types import WorkerState
from tests.worker.served import Served, config, serve_around
from tests.worker.test_serve import text_request


def tokens_with(**cache: object) -> list[list[int]]:
    results: list[list[int]] = []

    def scenario(served: Served) -> None:
        served.wait_until(WorkerState.READY)
        for length in (300, 20):
            results.append(served.tokens(text_request(length, max_tokens=4)))

    # so few pages that some go to the host and back
    settings = config(host_cache_bytes=1 << 24, num_pages=8, **cache)
    assert serve_around(settings, scenario) == EXIT_DRAINED
    return results


def test_a_worker_with_a_copy_of_its_index_keys_gives_the_same_tokens() -> None:
    assert tokens_with(index_copy="int8") == tokens_with()


def test_a_worker_with_e4m3_keys_and_values_answers_in_full() -> None:
    # random weights: the tokens are not those of a wider cache
    first, again = tokens_with(kv_dtype="fp8"), tokens_with(kv_dtype="fp8")
    assert [len(tokens) for tokens in first] == [4, 4]
    assert first == again


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"kv_dtype": "int4"}, "kv_dtype.*one of auto, fp8"),
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
