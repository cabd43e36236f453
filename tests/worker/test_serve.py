"""A whole worker with the golden checkpoint: exact answers, orderly life."""

from __future__ import annotations

import hashlib
import threading
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from torch import Tensor

import m3stack.serve
from m3stack.client import WorkerClient, default_sampling
from m3stack.engine.engine import Engine
from m3stack.engine.plan import FatalStepError, StepPlan, StepResult
from m3stack.engine.runner import ModelRunner
from m3stack.errors import ErrorKind, StartupError, WorkerError
from m3stack.models.minimax_m3.config import M3Config
from m3stack.serve import EXIT_CUT, EXIT_DRAINED, EXIT_FAILED, run_worker
from m3stack.types import (
    Event,
    Finished,
    MediaItem,
    MediaKind,
    PatchFormat,
    Request,
    Span,
    Started,
    Tokens,
    WorkerState,
)
from m3stack.worker.v1 import worker_pb2, worker_pb2_grpc
from tests.parity import golden
from tests.worker.served import TIMEOUT_S, Served, config, serve_around

FORMAT = PatchFormat(golden.MEAN, golden.STD, 3, 14, 2, 2)
# what a float32 forward may differ by from the reference's, on logits and log-probabilities
LOGIT_TOLERANCE = 5e-5
MODEL = M3Config.from_dir(golden.DIRECTORY)


def spans_of(ids: Sequence[int], token_id: int) -> list[Span]:
    """Runs of a placeholder id."""
    spans: list[Span] = []
    for position, token in enumerate(ids):
        if token != token_id:
            continue
        if spans and spans[-1].offset + spans[-1].length == position:
            spans[-1] = Span(spans[-1].offset, spans[-1].length + 1)
        else:
            spans.append(Span(position, 1))
    return spans


def item(
    kind: MediaKind, rows: Tensor, grid: tuple[int, int, int], spans: Sequence[Span]
) -> MediaItem:
    patches = bytearray(rows.contiguous().numpy().tobytes())
    return MediaItem(
        kind=kind,
        media_hash=hashlib.sha256(patches).digest(),
        grid_thw=grid,
        frames_per_patch=1 if kind is MediaKind.IMAGE else 2,
        spans=tuple(spans),
        patches=patches,
    )


def image_request(**changes: object) -> Request:
    given = golden.outputs("image")
    ids = given["input_ids"][0].tolist()
    rows = golden.still_bytes(golden.pixel_bytes(given["pixel_values"]))
    spans = spans_of(ids, MODEL.image_token_id)
    media = (
        item(MediaKind.IMAGE, rows[:80], (1, 8, 10), spans[:1]),
        item(MediaKind.IMAGE, rows[80:], (1, 4, 6), spans[1:]),
    )
    return Request("image", tuple(ids), sampling(**changes), FORMAT, media)


def video_request(**changes: object) -> Request:
    given = golden.outputs("video")
    ids = given["input_ids"][0].tolist()
    rows = golden.pixel_bytes(given["pixel_values_videos"])
    clip = item(MediaKind.VIDEO, rows, (6, 4, 6), spans_of(ids, MODEL.video_token_id))
    return Request("video", tuple(ids), sampling(**changes), FORMAT, (clip,))


def text_request(length: int, **changes: object) -> Request:
    ids = golden.outputs("decode")["input_ids"][0, :length].tolist()
    return Request(f"text-{length}", tuple(ids), sampling(**changes))


def sampling(**changes: object):
    fields: dict[str, object] = {"ignore_eos": True} | changes
    tokens = fields.pop("max_tokens", 4)
    assert isinstance(tokens, int)
    return default_sampling(tokens, **fields)


def logprobs_of(events: Sequence[Event]) -> list[dict[int, float]]:
    return [dict(e.top) for event in events if isinstance(event, Tokens) for e in event.logprobs]


def assert_first_step_equals(events: Sequence[Event], logits: Tensor) -> None:
    """The reported alternatives are those of the golden logits, and the best one was taken."""
    expected = logits.double().log_softmax(-1)
    given = logprobs_of(events)[0]
    assert len(given) == 20
    best = expected.topk(20)
    assert list(given) == best.indices.tolist()
    for token_id, value in given.items():
        assert value == pytest.approx(expected[token_id].item(), abs=LOGIT_TOLERANCE)
    first = next(event for event in events if isinstance(event, Tokens))
    assert first.token_ids[0] == int(logits.argmax())


@pytest.mark.parametrize("batch_tokens", [7, 129, 512])
def test_text_image_and_video_equal_the_goldens_at_any_chunk_size(batch_tokens: int) -> None:
    def scenario(served: Served) -> None:
        served.wait_until(WorkerState.READY)
        asks = {"logprobs": True, "top_logprobs": 20}
        length = int(golden.outputs("decode")["first_position"]) + 1
        text = served.events(text_request(length, **asks))
        assert_first_step_equals(text, golden.outputs("decode")["decode_logits"][0])
        for request, name in ((image_request(**asks), "image"), (video_request(**asks), "video")):
            events = served.events(request)
            assert_first_step_equals(events, golden.outputs(name)["logits"].view(-1, 320)[-1])
            end = events[-1]
            assert isinstance(end, Finished)
            used = (end.usage.image_tokens, end.usage.video_tokens)
            assert used == ((26, 0) if name == "image" else (0, 36))

    settings = config(max_batch_tokens=batch_tokens, max_sequences=4, prefix_cache=False)
    assert serve_around(settings, scenario) == EXIT_DRAINED


def mixed_requests() -> list[Request]:
    greedy = [text_request(length, max_tokens=6) for length in (1, 40, 127, 128, 129, 300, 700)]
    media = [image_request(max_tokens=6), video_request(max_tokens=6)]
    seeded = [
        text_request(length, max_tokens=8, temperature=temperature, top_p=0.95, top_k=40, seed=n)
        for n, (length, temperature) in enumerate(
            [(5, 1.0), (64, 0.7), (200, 1.3), (400, 1.0), (5, 1.0)]
        )
    ]
    return [
        *greedy,
        *media,
        *seeded,
        image_request(max_tokens=5, temperature=1.0, seed=3),
        video_request(max_tokens=5, temperature=0.8, seed=4, repetition_penalty=1.2),
    ]


@pytest.mark.parametrize(("num_pages", "overlap"), [(40, "off"), (40, "on"), (12, "on")])
def test_sixteen_mixed_requests_at_once_each_equal_themselves_alone(
    num_pages: int, overlap: str
) -> None:
    def scenario(served: Served) -> None:
        served.wait_until(WorkerState.READY)
        requests = mixed_requests()
        assert len(requests) == 16
        alone = [served.tokens(request) for request in requests]
        with ThreadPoolExecutor(16) as pool:
            together = list(pool.map(served.tokens, requests))
        assert together == alone

    # 12 pages are far too few for all of them at once
    settings = config(
        num_pages=num_pages,
        max_batch_tokens=200,
        prefix_cache=num_pages == 12,
        step_overlap=overlap,
    )
    assert serve_around(settings, scenario) == EXIT_DRAINED


def test_pages_in_host_memory_change_no_token() -> None:
    requests = [
        text_request(5, max_tokens=12),
        text_request(300, max_tokens=12, temperature=1.0, seed=2),
        image_request(max_tokens=8),
    ]
    told: list[list[list[int]]] = []

    def scenario(served: Served) -> None:
        served.wait_until(WorkerState.READY)
        with ThreadPoolExecutor(3) as pool:
            told.append(list(pool.map(served.tokens, requests)))

    for hot_pages in (0, 24):
        settings = config(
            hot_pages=hot_pages, max_batch_tokens=100, max_sequences=4, step_overlap="on"
        )
        assert serve_around(settings, scenario) == EXIT_DRAINED
    assert told[0] == told[1]


def test_too_few_hot_pages_are_refused_with_the_number_it_takes() -> None:
    with pytest.raises(StartupError, match="hot_pages is 2, steps of 256 tokens"):
        run_worker(config(hot_pages=2))
    with pytest.raises(StartupError, match="memory allows 64 pages"):
        run_worker(config(hot_pages=65))


class HeldSteps:
    """Lets no step of a worker's engine in this process begin while it is held.

    Attributes:
        gate: set while steps may begin.
        came: by request id, set once the engine has been given that request.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.came: defaultdict[str, threading.Event] = defaultdict(threading.Event)
        submit, execute = Engine.submit, ModelRunner.execute

        def noted(engine: Engine, handle: int, request: Request, *, upload_s: float = 0.0) -> None:
            submit(engine, handle, request, upload_s=upload_s)
            self.came[request.request_id].set()

        def held(runner: ModelRunner, plan: StepPlan) -> StepResult:
            assert self.gate.wait(TIMEOUT_S)
            return execute(runner, plan)

        patch.setattr(Engine, "submit", noted)
        patch.setattr(ModelRunner, "execute", held)

    def together(self, served: Served, requests: Sequence[Request]) -> list[list[int]]:
        """What requests give that are all there, in this order, before the first step of any."""
        self.gate.clear()
        with ThreadPoolExecutor(len(requests)) as pool:
            answers = []
            for request in requests:
                self.came[request.request_id].clear()
                answers.append(pool.submit(served.tokens, request))
                assert self.came[request.request_id].wait(TIMEOUT_S)
            self.gate.set()
            return [answer.result(TIMEOUT_S) for answer in answers]


@pytest.mark.parametrize("host_cache_bytes", [0, 1 << 24])
def test_preempted_request_goes_on_to_the_same_tokens(
    host_cache_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldSteps(monkeypatch)

    def scenario(served: Served) -> None:
        served.wait_until(WorkerState.READY)
        # the newer one takes the last of five pages, the older one needs it later
        requests = [text_request(200, max_tokens=70), text_request(250, max_tokens=80)]
        alone = [served.tokens(request) for request in requests]
        assert held.together(served, requests) == alone
        assert metric(served, "m3stack_worker_preemptions_total") == 1
        restored = metric(served, "m3stack_worker_restored_bytes_total")
        assert (restored > 0) is (host_cache_bytes > 0)

    settings = config(
        num_pages=5,
        prefix_cache=False,
        host_cache_bytes=host_cache_bytes,
        metrics_listen="127.0.0.1:0",
    )
    assert serve_around(settings, scenario) == EXIT_DRAINED


def test_clip_encoded_segment_by_segment_equals_the_golden() -> None:
    def scenario(served: Served) -> None:
        served.wait_until(WorkerState.READY)
        events = served.events(video_request(logprobs=True, top_logprobs=20))
        assert_first_step_equals(events, golden.outputs("video")["logits"].view(-1, 320)[-1])
        # six temporal patches, of which four see each other
        assert metric(served, "m3stack_worker_encoded_media_parts_total") == 2
        with grpc.insecure_channel(served.target) as channel:
            stub = worker_pb2_grpc.AdminServiceStub(channel)
            told = stub.Explain(worker_pb2.ExplainRequest(request_id="video"))
        encodes = [entry.note for entry in told.entries if entry.phase == "encode"]
        assert encodes == ["parts 0 to 0", "parts 1 to 1"], "both in one step"

    settings = config(max_encode_patches=50, metrics_listen="127.0.0.1:0")
    assert serve_around(settings, scenario) == EXIT_DRAINED


def metric(served: Served, name: str) -> float:
    url = f"http://127.0.0.1:{served.ports.metrics_port}/metrics"
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
        lines = response.read().decode().splitlines()
    (value,) = [line.rpartition(" ")[2] for line in lines if line.startswith(f"{name} ")]
    return float(value)


def test_health_reflection_metrics_and_identity_tell_the_truth() -> None:
    def scenario(served: Served) -> None:
        served.wait_until(WorkerState.READY)
        info = served.client.info()
        assert info.fingerprint == MODEL.facts().fingerprint()
        assert info.facts["vocab_size"] == MODEL.vocab_size
        assert info.max_context_tokens == 64 * 128, "what the pool holds, less than the model's"
        assert (info.model_name, info.page_tokens) == ("tiny_m3", 128)
        with grpc.insecure_channel(served.target) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", "m3stack.worker.v1.WorkerService"):
                answer = health.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            ask = reflection_pb2.ServerReflectionRequest(list_services="")
            (reply,) = stub.ServerReflectionInfo(iter([ask]))
            names = {service.name for service in reply.list_services_response.service}
            assert "m3stack.worker.v1.AdminService" in names
            assert {"m3stack.worker.v1.WorkerService", "grpc.health.v1.Health"} <= names
        served.tokens(text_request(10))
        assert metric(served, 'm3stack_worker_requests_total{outcome="length"}') == 1
        assert metric(served, "m3stack_worker_total_pages") == 64

    assert serve_around(config(metrics_listen="127.0.0.1:0"), scenario) == EXIT_DRAINED


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones() -> None:
    def scenario(served: Served) -> None:
        served.wait_until(WorkerState.READY)
        updates = served.client.watch()
        next(updates)
        running = served.client.generate(text_request(20, max_tokens=60))
        assert isinstance(next(running), Started)
        served.stop()
        while next(updates).state is not WorkerState.DRAINING:
            pass
        with pytest.raises(WorkerError) as refused:
            served.tokens(text_request(5))
        assert refused.value.kind is ErrorKind.WORKER_UNAVAILABLE
        rest = list(running)
        assert isinstance(rest[-1], Finished)
        assert sum(len(e.token_ids) for e in rest if isinstance(e, Tokens)) == 60
        for _ in updates:
            pass

    assert serve_around(config(), scenario) == EXIT_DRAINED


@pytest.mark.parametrize("second_signal", [False, True])
def test_drain_limit_and_second_signal_cut_what_still_runs(second_signal: bool) -> None:
    def scenario(served: Served) -> None:
        served.wait_until(WorkerState.READY)
        running = served.client.generate(text_request(20, max_tokens=8000))
        assert isinstance(next(running), Started)
        served.stop()
        if second_signal:
            served.wait_until(WorkerState.DRAINING)
            served.stop()
        with pytest.raises(WorkerError) as cut:
            for _ in running:
                pass
        assert cut.value.kind is ErrorKind.WORKER_UNAVAILABLE
        assert cut.value.message == "the worker was stopped"

    # a signal that does not cut it short would be waited for until the test's own limit
    drain_s = 3600 if second_signal else 0.1
    assert serve_around(config(drain_s=drain_s), scenario) == EXIT_CUT


def test_worker_reports_loading_refuses_requests_and_obeys_a_signal_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = threading.Event()
    real = m3stack.serve.assemble

    def slow(*arguments):
        gate.wait(TIMEOUT_S)
        return real(*arguments)

    monkeypatch.setattr(m3stack.serve, "assemble", slow)

    def scenario(served: Served) -> None:
        first = next(served.client.watch())
        assert first.state is WorkerState.LOADING
        assert first.info is not None
        assert first.info.fingerprint == MODEL.facts().fingerprint()
        with grpc.insecure_channel(served.target) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(WorkerError) as refused:
            served.tokens(text_request(5))
        assert refused.value.kind is ErrorKind.WORKER_UNAVAILABLE
        assert "still loading" in refused.value.message
        served.stop()
        gate.set()

    assert serve_around(config(), scenario) == EXIT_DRAINED


def test_lost_device_ends_the_worker_with_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: ModelRunner, plan: StepPlan) -> None:
        raise FatalStepError("gone")

    monkeypatch.setattr(ModelRunner, "execute", lost)

    def scenario(served: Served) -> None:
        served.wait_until(WorkerState.READY)
        with pytest.raises(WorkerError) as failed:
            served.tokens(text_request(5))
        assert failed.value.kind is ErrorKind.INTERNAL

    assert serve_around(config(log_level="error"), scenario) == EXIT_FAILED


def test_stuck_step_makes_the_worker_unhealthy_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = threading.Event()
    real = ModelRunner.execute

    def stuck(self: ModelRunner, plan: StepPlan):
        gate.wait(TIMEOUT_S)
        return real(self, plan)

    monkeypatch.setattr(ModelRunner, "execute", stuck)
    monkeypatch.setattr(m3stack.serve, "WATCHDOG_INTERVAL_S", 0.02)
    serving = health_pb2.HealthCheckResponse

    def scenario(served: Served) -> None:
        served.wait_until(WorkerState.READY)
        with ThreadPoolExecutor(1) as pool, grpc.insecure_channel(served.target) as channel:
            running = pool.submit(served.tokens, text_request(5))
            changes = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            statuses = (change.status for change in changes)
            while next(statuses) != serving.NOT_SERVING:
                pass
            gate.set()
            while next(statuses) != serving.SERVING:
                pass
            assert len(running.result(TIMEOUT_S)) == 4
            changes.cancel()

    assert serve_around(config(stuck_step_s=0.1), scenario) == EXIT_DRAINED


def test_what_keeps_a_worker_from_starting_is_said(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"config\.json does not exist"):
        run_worker(config(tmp_path))
    with pytest.raises(StartupError, match="kernels is 'fast'"):
        run_worker(config(kernels="fast"))
    with pytest.raises(StartupError, match="max_context_tokens is 2000000, the model supports"):
        run_worker(config(max_context_tokens=2_000_000))
    if not torch.cuda.is_available():
        with pytest.raises(StartupError, match="torch sees no CUDA GPU here"):
            run_worker(config(device="cuda"))


def test_port_in_use_is_an_error_that_names_it() -> None:
    def scenario(served: Served) -> None:
        served.wait_until(WorkerState.READY)
        results: list[str] = []

        def second() -> None:
            try:
                run_worker(config(listen=served.target))
            except StartupError as error:
                results.append(str(error))

        thread = threading.Thread(target=second)
        thread.start()
        thread.join(TIMEOUT_S)
        assert results
        assert served.target in results[0]
        assert "--listen" in results[0]

    assert serve_around(config(), scenario) == EXIT_DRAINED


def test_client_names_a_worker_that_is_not_there() -> None:
    with WorkerClient("127.0.0.1:1") as client, pytest.raises(WorkerError) as failed:
        client.info()
    assert failed.value.kind is ErrorKind.WORKER_UNAVAILABLE
