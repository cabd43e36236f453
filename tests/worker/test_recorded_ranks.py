"""Ranks replay their decode steps together or not at all; on CPUs, where replaying is computing."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from m3stack import assemble
from m3stack.config import WorkerConfig
from m3stack.engine.graphs import Agree, DecodeGraphs
from m3stack.engine.runner import Forward, Runner
from m3stack.errors import ErrorKind, WorkerError
from m3stack.local_ranks import Joined, Setup
from m3stack.models.minimax_m3.model import M3Model
from m3stack.serve import EXIT_DRAINED, EXIT_FAILED
from m3stack.types import Request, Tokens, WorkerState
from tests.parity import golden
from tests.worker.engine.recorders import Again, AgainRecorder, RefusingRecorder
from tests.worker.served import Served, config, serve_around
from tests.worker.test_serve import image_request, text_request

FLAGS = {"max_batch_tokens": 200, "max_encode_patches": 50}
BUDGET_BYTES = 1 << 20
# what a recording takes on ranks that follow; on the leading one less
FOLLOWERS_BYTES = 3 * Again.num_bytes


def requests() -> list[Request]:
    return [
        text_request(40, max_tokens=30),
        text_request(300, max_tokens=24, temperature=1.0, top_p=0.95, seed=5),
        text_request(130, max_tokens=20),
        image_request(max_tokens=12),
    ]


def tokens_with(**flags: object) -> list[list[int]]:
    """What each request gives, all at once."""
    results: list[list[int]] = []

    def scenario(served: Served) -> None:
        served.wait_until(WorkerState.READY)
        with ThreadPoolExecutor(4) as pool:
            results.extend(pool.map(served.tokens, requests()))

    assert serve_around(config(golden.DIRECTORY, **FLAGS, **flags), scenario) == EXIT_DRAINED
    return results


@dataclass
class Recorded:
    """Puts recordings where a GPU's would be; also in the processes of ranks that follow.

    Attributes:
        forwards: that were made in this process.
    """

    num_bytes: int
    refuses: bool
    forwards: list[DecodeGraphs]

    def forward_of(
        self, config: WorkerConfig, model: M3Model, pool: object, *, agree: Agree | None = None
    ) -> Forward:
        recorder = RefusingRecorder() if self.refuses else AgainRecorder(self.num_bytes)
        made = DecodeGraphs(
            model.forward,
            pool.layers,  # type: ignore[attr-defined]
            record=recorder,
            page_tokens=model.config.block_tokens,
            max_sequences=config.max_sequences,
            budget_bytes=BUDGET_BYTES,
            agree=agree,
        )
        self.forwards.append(made)
        return made


# as it is in a process of its own, where nothing is replaced
_build_follower = assemble.build_follower


def build_recording(
    config: WorkerConfig, joined: Joined, receive_setup: Callable[[], Setup]
) -> Runner:
    assemble.forward_of = Recorded(FOLLOWERS_BYTES, False, []).forward_of
    return _build_follower(config, joined, receive_setup)


def build_refusing(
    config: WorkerConfig, joined: Joined, receive_setup: Callable[[], Setup]
) -> Runner:
    assemble.forward_of = Recorded(FOLLOWERS_BYTES, True, []).forward_of
    return _build_follower(config, joined, receive_setup)


@pytest.fixture
def leader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    recorded = Recorded(Again.num_bytes, False, [])
    monkeypatch.setattr(assemble, "forward_of", recorded.forward_of)
    monkeypatch.setattr(assemble, "build_follower", build_recording)
    yield recorded
    # nothing is left that would keep a communicator from closing
    assert all(forward.num_recordings == 0 for forward in recorded.forwards)


@pytest.fixture(scope="module")
def whole_tokens() -> list[list[int]]:
    return tokens_with()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "flags",
    [
        {"step_overlap": "off"},
        {"step_overlap": "on", "expert_parallel": 2, "shard_index_keys": True},
    ],
)
def test_ranks_that_replay_give_the_tokens_of_one_that_does_not(
    flags: dict[str, object],
    whole_tokens: list[list[int]],
    leader: Recorded,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert tokens_with(tensor_parallel=2, **flags) == whole_tokens
    # an orderly end is no failure of those that follow
    assert "rank_failed" not in capfd.readouterr().err
    (forward,) = leader.forwards
    assert forward.num_replays > 10, "hardly any step was replayed"
    # the bound is for the rank where recordings take the most
    assert forward.num_bytes % FOLLOWERS_BYTES == 0
    assert forward.num_bytes > 0


@pytest.mark.timeout(120)
def test_what_one_rank_cannot_record_none_replays(
    whole_tokens: list[list[int]], leader: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "build_follower", build_refusing)
    assert tokens_with(tensor_parallel=2, step_overlap="on") == whole_tokens
    (forward,) = leader.forwards
    assert forward.num_replays == 0
    assert forward.num_bytes == 0


@pytest.mark.timeout(120)
def test_a_rank_lost_among_replays_ends_the_worker(
    leader: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("m3stack.group").addHandler(caplog.handler)

    def scenario(served: Served) -> None:
        served.wait_until(WorkerState.READY)
        running = served.client.generate(text_request(20, max_tokens=8000))
        (follower,) = multiprocessing.active_children()
        assert follower.pid is not None
        told = (event for event in running if isinstance(event, Tokens))
        for _ in range(20):
            next(told)
        assert leader.forwards[0].num_recordings == 1
        os.kill(follower.pid, signal.SIGKILL)
        with pytest.raises(WorkerError) as failed:
            list(told)
        assert failed.value.kind is ErrorKind.INTERNAL

    settings = config(golden.DIRECTORY, tensor_parallel=2, step_overlap="on", **FLAGS)
    assert serve_around(settings, scenario) == EXIT_FAILED
    logging.getLogger("m3stack.group").removeHandler(caplog.handler)
    assert "rank 1 ended with exit code -9" in caplog.text
