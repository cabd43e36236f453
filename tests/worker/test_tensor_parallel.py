"""A worker whose model is split over processes: same tokens, and no rank outlives another."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from m3stack.config import WorkerConfig
from m3stack.engine.leader import LeaderRunner
from m3stack.engine.plan import StepPlan, StepResult
from m3stack.engine.runner import Runner
from m3stack.errors import ErrorKind, StartupError, WorkerError
from m3stack.group import RankGroup, RankLostError
from m3stack.local_ranks import Joined, LocalRanks, Setup, StorePlace
from m3stack.serve import EXIT_DRAINED, EXIT_FAILED, run_worker
from m3stack.types import Request, Started, WorkerState
from tests.parity import golden
from tests.worker.served import Served, config, serve_around
from tests.worker.test_serve import HeldSteps, image_request, metric, text_request, video_request

# a bound on hangs: what is waited for ends far sooner
DEATH_S = 60


def requests_of_all_sorts() -> list[Request]:
    return [
        text_request(40, max_tokens=6),
        text_request(300, max_tokens=4, temperature=1.0, top_p=0.95, seed=5),
        image_request(max_tokens=4),
        video_request(max_tokens=4, temperature=0.8, seed=4),
    ]


def tokens_with(ranks: int, **flags: object) -> list[list[int]]:
    """What each request gives, all at once, from a worker of so many ranks."""
    results: list[list[int]] = []

    def scenario(served: Served) -> None:
        served.wait_until(WorkerState.READY)
        with ThreadPoolExecutor(4) as pool:
            results.extend(pool.map(served.tokens, requests_of_all_sorts()))

    assert (
        serve_around(config(golden.DIRECTORY, tensor_parallel=ranks, **flags), scenario)
        == EXIT_DRAINED
    )
    return results


FLAGS = {"max_batch_tokens": 200, "max_encode_patches": 50}


@pytest.fixture(scope="module")
def whole_tokens() -> list[list[int]]:
    return tokens_with(1, **FLAGS)


# with four ranks, each has one of four KV heads, with eight, two share one
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, {}),
        (2, {"expert_parallel": 2, "shard_index_keys": True}),
        (4, {"expert_parallel": 2, "shard_index_keys": True}),
        (2, {"step_overlap": "on"}),
        (4, {"expert_parallel": 2, "shard_index_keys": True, "step_overlap": "on"}),
        pytest.param(4, {}, marks=pytest.mark.soak),
        pytest.param(4, {"expert_parallel": 4}, marks=pytest.mark.soak),
        pytest.param(4, {"shard_index_keys": True}, marks=pytest.mark.soak),
        pytest.param(8, {}, marks=pytest.mark.soak),
        pytest.param(8, {"expert_parallel": 8}, marks=pytest.mark.soak),
        pytest.param(8, {"expert_parallel": 4, "shard_index_keys": True}, marks=pytest.mark.soak),
    ],
)
def test_split_models_give_the_tokens_of_the_whole_one(
    ranks: int, flags: dict[str, object], whole_tokens: list[list[int]]
) -> None:
    assert tokens_with(ranks, **FLAGS, **flags) == whole_tokens


def test_ranks_preempt_offload_and_restore_together(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldSteps(monkeypatch)

    def scenario(served: Served) -> None:
        served.wait_until(WorkerState.READY)
        older, newer = text_request(200, max_tokens=70), text_request(250, max_tokens=20)
        alone = [served.tokens(request) for request in (older, newer)]
        assert held.together(served, [older, newer]) == alone
        assert metric(served, "m3stack_worker_offloaded_bytes_total") > 0

    settings = config(
        tensor_parallel=2, num_pages=4, host_cache_bytes=1 << 24, metrics_listen="127.0.0.1:0"
    )
    assert serve_around(settings, scenario) == EXIT_DRAINED


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("is_busy", [True, False])
def test_a_dead_rank_ends_the_worker_with_its_name(
    is_busy: bool, overlap: str, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("m3stack.group").addHandler(caplog.handler)

    def scenario(served: Served) -> None:
        served.wait_until(WorkerState.READY)
        running = served.client.generate(text_request(20, max_tokens=8000))
        if is_busy:
            assert isinstance(next(running), Started)
        else:
            running.close()
        (follower,) = multiprocessing.active_children()
        assert follower.pid is not None
        os.kill(follower.pid, signal.SIGKILL)
        if is_busy:
            with pytest.raises(WorkerError) as failed:
                list(running)
            assert failed.value.kind is ErrorKind.INTERNAL
        # the worker ends by itself: the report does, too
        for _ in served.client.watch():
            pass

    settings = config(tensor_parallel=2, step_overlap=overlap)
    assert serve_around(settings, scenario) == EXIT_FAILED
    logging.getLogger("m3stack.group").removeHandler(caplog.handler)
    assert "rank 1 ended with exit code -9" in caplog.text
    assert not multiprocessing.active_children()


def test_all_who_ask_at_once_are_told_how_a_rank_ended() -> None:
    ranks = LocalRanks(config(), range(1, 2), StorePlace("127.0.0.1", 1), build=_no_runner)
    (follower,) = multiprocessing.active_children()
    assert follower.pid is not None
    answers: list[str | None] = []

    def ask() -> None:
        answers.append(ranks.ended(60.0))

    askers = [threading.Thread(target=ask) for _ in range(16)]
    for asker in askers:
        asker.start()
    os.kill(follower.pid, signal.SIGKILL)
    for asker in askers:
        asker.join()
    ranks.stop(0.0)
    assert answers == ["rank 1 ended with exit code -9"] * 16


def _no_runner(_config: WorkerConfig, _joined: Joined, _setup: Callable[[], Setup]) -> Runner:
    raise AssertionError("it is killed before it joins")


def test_followers_end_when_the_leader_is_gone() -> None:
    command = [sys.executable, "-m", "m3stack", "worker", "--listen", "127.0.0.1:0"]
    command += ["--model-path", str(golden.DIRECTORY), "--device", "cpu"]
    command += ["--tensor-parallel", "2", "--set", "num_pages=8"]
    leader = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert leader.stderr is not None
    try:
        for line in leader.stderr:
            if "rank_ready rank=1" in line:
                break
        followers = psutil.Process(leader.pid).children(recursive=True)
        assert followers
        leader.kill()
        gone, alive = psutil.wait_procs(followers, timeout=DEATH_S)
        assert len(gone) == len(followers), alive
    finally:
        leader.kill()
        leader.wait()
        leader.stderr.close()


def test_a_model_that_cannot_be_split_so_is_refused() -> None:
    # eight heads, four KV heads
    with pytest.raises(StartupError, match=r"cannot be (split|shared)"):
        run_worker(config(tensor_parallel=3))
    assert not multiprocessing.active_children()


class Unstartable:
    """Ends the process that takes it over."""

    def __reduce__(self) -> tuple[object, tuple[int]]:
        return os._exit, (7,)

    def __call__(self, *_: object) -> Runner:
        raise AssertionError("never called")


def test_a_rank_that_does_not_start_is_named_at_once() -> None:
    with pytest.raises(StartupError, match="rank 1 ended with exit code 7"):
        RankGroup(config(tensor_parallel=2), Unstartable())
    assert not multiprocessing.active_children()


class OneStep:
    """A runner whose step succeeds."""

    def begin(self, handle: int, request: Request, *, stop_ids: frozenset[int]) -> None: ...

    def forget(self, handle: int) -> None: ...

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult({}, {}, (), ())


def test_what_a_broken_off_step_gave_is_not_taken() -> None:
    lost = RankLostError("rank 3 ended with exit code -9")
    known: list[RankLostError] = []
    leader = LeaderRunner(
        OneStep(),
        send=lambda command: None,
        explain=lambda: None,
        noticed=lambda: known[0] if known else None,
    )
    plan = StepPlan(())
    assert leader.execute(plan) == OneStep().execute(plan)
    known.append(lost)
    with pytest.raises(RankLostError, match="rank 3"):
        leader.execute(plan)
