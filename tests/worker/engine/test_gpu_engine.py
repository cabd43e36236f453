"""On a GPU: replayed decode steps, steps queued ahead, and no wait between launch and sampling."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from m3stack.assemble import Assembly, Surroundings, assemble
from m3stack.cache.media import MediaLedger
from m3stack.checkpoints import builtin_checkpoint
from m3stack.config import WorkerConfig
from m3stack.engine.graphs import USES_BEFORE_RECORDING, CudaRecorder, DecodeGraphs
from m3stack.engine.runner import ModelRunner
from m3stack.engine.sequence import Sequence
from m3stack.hardware import choose_hardware
from m3stack.kernels.select import build_kernels
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.weights import load_model
from m3stack.rank_model import kernel_shape
from m3stack.telemetry import WorkerMetrics
from m3stack.types import Request, WorkerState
from tests.worker.engine.history_model import sampling
from tests.worker.served import Served, config, serve_around
from tests.worker.support import PagedRunner, Track

pytestmark = pytest.mark.gpu

TINY = Path(builtin_checkpoint("tiny"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replayed_steps_equal_plain_ones(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    model_config = M3Config.from_dir(TINY)
    model = load_model(
        TINY,
        config=model_config,
        kernels=build_kernels("auto", shape=kernel_shape(model_config, dtype), device=device),
        device=device,
        dtype=dtype,
        progress=lambda done, total: None,
    )
    runner = PagedRunner(model, num_pages=64)
    graphs = DecodeGraphs(
        model.forward,
        runner.cache,
        record=CudaRecorder(device),
        page_tokens=model_config.block_tokens,
        max_sequences=4,
        budget_bytes=1 << 30,
    )
    tracks = [Track() for _ in range(3)]
    for number, track in enumerate(tracks):
        runner.feed(track, [(7 * index + number) % 300 for index in range(100 * number + 30)])
    with torch.inference_mode():
        for step in range(3 * USES_BEFORE_RECORDING):
            batch = runner.batch([(track, [step]) for track in tracks])
            replayed = graphs(batch, runner.cache).clone()
            # the same keys are written again: a step may be run twice
            plain = model(batch, runner.cache)
            # the recorded batch has one row more, and may be summed in another order
            atol = 1e-4 if dtype is torch.float32 else 5e-2
            torch.testing.assert_close(replayed, plain, rtol=0, atol=atol)
    assert graphs.num_replays > USES_BEFORE_RECORDING, "no step was replayed"
    assert graphs.num_bytes < 1 << 30


def test_a_recording_that_fails_leaves_the_device_as_it_was() -> None:
    device = torch.device("cuda")
    recorder, x = CudaRecorder(device), torch.ones(1 << 20, device=device)
    before, stream = torch.cuda.memory_reserved(device), torch.cuda.current_stream(device)

    def waits() -> torch.Tensor:
        return (x + 1) * float((2 * x).sum().item())

    def breaks() -> torch.Tensor:
        x.add(1)
        raise ValueError("not the device's fault")

    for run, error in ((waits, torch.AcceleratorError), (breaks, ValueError)):
        # every later one would fail as well, were anything left of the first
        for _ in range(2):
            recorder.warm_up(lambda: x + 1)
            with pytest.raises(error):
                recorder.record(run)
            torch.cuda.synchronize(device)
            assert torch.cuda.current_stream(device) == stream
            assert 0 <= float(torch.rand((), device=device)) < 1
    x.fill_(4)
    # one that is given up, as where another rank has none, does not keep the next from being made
    for _ in range(2):
        made = recorder.record(lambda: x + 1)
        assert bool((made.replay() == 5).all())
        made.release()
    freed = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    del freed
    torch.cuda.empty_cache()
    # pages of a few recordings, and not the large one
    assert torch.cuda.memory_reserved(device) - before < 128 << 20


def assembly(**changes: object) -> Assembly:
    settings = WorkerConfig(
        model_path=str(TINY),
        device="cuda",
        num_pages=64,
        max_sequences=8,
        first_steps_s=0.0,
        step_overlap="on",
        **changes,  # type: ignore[arg-type]
    )
    around = Surroundings(MediaLedger(1 << 20), WorkerMetrics(), lambda done, total: None)
    return assemble(settings, M3Config.from_dir(TINY), choose_hardware(settings), around)


def test_the_host_never_waits_between_launch_and_sampling() -> None:
    made = assembly()
    scheduler, runner = made.parts.scheduler, made.parts.ahead
    assert isinstance(runner, ModelRunner)
    rules = [
        sampling(max_tokens=60),
        sampling(max_tokens=60, temperature=1.0, seed=3, top_p=0.9),
        sampling(max_tokens=60, temperature=0.8, top_k=20, min_p=0.05),
        sampling(max_tokens=60, repetition_penalty=1.3, frequency_penalty=0.4),
        sampling(max_tokens=60, logprobs=True, top_logprobs=5),
    ]
    for handle, rule in enumerate(rules):
        request = Request(f"r{handle}", tuple(range(20 + handle)), rule)
        runner.begin(handle, request, stop_ids=frozenset())
        scheduler.add(
            Sequence(
                handle,
                request,
                page_tokens=made.settings.page_tokens,
                stop_ids=frozenset(),
                max_context_tokens=1000,
            )
        )
    plan = scheduler.plan()
    step = runner.launch(plan)
    runner.sample(step)
    for number in range(40):
        following = scheduler.plan_ahead(plan)
        assert following is not None
        # what is compiled or recorded at first use may wait; nothing after it
        is_strict = number > 2 * USES_BEFORE_RECORDING + 10
        try:
            torch.cuda.set_sync_debug_mode("error" if is_strict else "default")
            behind = runner.launch(following, step)
            torch.cuda.set_sync_debug_mode("default")
            scheduler.commit(plan, runner.collect(step))
            torch.cuda.set_sync_debug_mode("error" if is_strict else "default")
            runner.sample(behind)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        plan, step = following, behind
    made.constraints.close()


def test_tokens_do_not_depend_on_overlap_and_recordings() -> None:
    requests = [
        Request(
            f"r{number}",
            tuple((number * 13 + 7 * index) % 300 for index in range(5 + 40 * number)),
            sampling(max_tokens=40, temperature=float(number % 2), seed=number),
        )
        for number in range(6)
    ]
    told: list[list[list[int]]] = []

    def scenario(served: Served) -> None:
        served.wait_until(WorkerState.READY)
        with ThreadPoolExecutor(6) as pool:
            told.append(list(pool.map(served.tokens, requests)))

    # twice as it is by default: a race shows as a difference between the two
    for overlap, graph_bytes in (("off", 0), ("on", 0), ("auto", -1), ("auto", -1)):
        settings = config(
            TINY,
            device="cuda",
            dtype="float32",
            step_overlap=overlap,
            decode_graph_bytes=graph_bytes,
            # every size that is met is compiled anyway
            first_steps_s=0.0,
        )
        assert serve_around(settings, scenario) == 0
    assert told[1] == told[0], "steps queued ahead"
    assert told[2] == told[3] == told[0], "recorded steps"
