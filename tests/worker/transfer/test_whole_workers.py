"""Whole worker processes that divide the work: the tokens of one that does all of it."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from m3stack.client import WorkerClient
from m3stack.errors import ErrorKind, WorkerError
from m3stack.types import WHOLE, Finished, Purpose, Request, Source, Stage, Tokens, WorkerState
from tests.parity import golden
from tests.worker.test_serve import image_request, text_request, video_request

START_S = 250
KINDS: dict[str, Callable[[], Request]] = {
    "text": lambda: text_request(700, max_tokens=12),
    "sampled": lambda: text_request(520, max_tokens=8, temperature=1.0, top_p=0.95, seed=7),
    "image": lambda: image_request(max_tokens=8),
    "clip": lambda: video_request(max_tokens=8),
}
PAGES = {"text": 5, "sampled": 4, "image": 2, "clip": 1}


@dataclass
class Process:
    """A worker in a process of its own."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    address: str = ""
    metrics: str = ""
    client: WorkerClient = field(init=False)

    def until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while not (self.address and self.metrics):
            assert time.monotonic() < deadline, f"{self.name} does not listen"
            assert self.process.poll() is None, self.log.read_text()
            text = self.log.read_text()
            for name, found in re.findall(r"(listening|metrics) address=(\S+)", text):
                if name == "listening":
                    self.address = found
                else:
                    self.metrics = found
            time.sleep(0.1)
        self.client = WorkerClient(self.address)
        while True:
            # a worker that corrects its identity ends the watch once
            for update in self.client.watch():
                if update.state is WorkerState.READY:
                    return

    def metric(self, name: str, **labels: str) -> float:
        page = httpx.get(f"http://{self.metrics}/metrics", timeout=60).text
        wanted = "".join(f'{key}="{value}"' for key, value in labels.items())
        pattern = rf"^{name}{{{wanted}}} (\S+)$" if labels else rf"^{name} (\S+)$"
        found = re.search(pattern, page, re.MULTILINE)
        return float(found[1]) if found else 0.0

    @property
    def source(self) -> Source:
        return Source(self.address)


def start(folder: Path, name: str, *flags: str) -> Process:
    log = folder / f"{name}.log"
    command = [sys.executable, "-m", "m3stack", "worker", "--model-path", str(golden.DIRECTORY)]
    command += ["--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0", "--device", "cpu"]
    command += ["--set", "num_pages=64", "--max-sequences", "8", "--set", "max_batch_tokens=256"]
    with log.open("wb") as stream:
        process = subprocess.Popen([*command, *flags], stdout=stream, stderr=subprocess.STDOUT)
    return Process(name, process, log)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Process]]:
    """One rank, two, two with index keys in parts, and one that encodes only."""
    folder = tmp_path_factory.mktemp("fleet")
    two = ("--tensor-parallel", "2")
    flags: dict[str, tuple[str, ...]] = {
        "one": (),
        "two": two,
        "parts": (*two, "--set", "shard_index_keys=true"),
        "encode": ("--set", "role=encode"),
    }
    started = {name: start(folder, name, *given) for name, given in flags.items()}
    try:
        for process in started.values():
            process.until_ready()
        yield started
    finally:
        for process in started.values():
            process.process.terminate()
        for process in started.values():
            process.process.wait(100)


def salted(request: Request, salt: str) -> Request:
    """The same in a cache of its own."""
    return dataclasses.replace(request, cache_salt=salt)


def run(process: Process, request: Request, stage: Stage = WHOLE) -> tuple[list[int], Finished]:
    events = list(process.client.generate(request, stage=stage))
    end = events[-1]
    assert isinstance(end, Finished)
    return [t for e in events if isinstance(e, Tokens) for t in e.token_ids], end


@pytest.fixture(scope="module")
def alone(fleet: dict[str, Process]) -> dict[str, list[int]]:
    """What one worker answers that does everything itself."""
    return {
        kind: run(fleet["one"], salted(make(), f"alone-{kind}"))[0] for kind, make in KINDS.items()
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("one", "two"),
        ("parts", "one"),
        pytest.param("two", "one", marks=pytest.mark.soak),
        pytest.param("one", "parts", marks=pytest.mark.soak),
        pytest.param("two", "parts", marks=pytest.mark.soak),
    ],
)
def test_prompts_of_one_worker_go_on_in_another_whatever_its_ranks(
    fleet: dict[str, Process], alone: dict[str, list[int]], source: str, target: str
) -> None:
    first, second = fleet[source], fleet[target]
    for kind, make in KINDS.items():
        request = salted(make(), f"{source}-{target}-{kind}")
        tokens, _ = run(first, request, Stage(Purpose.PREFILL))
        assert tokens == []
        tokens, end = run(second, request, Stage(pages=first.source))
        assert tokens == alone[kind], kind
        assert end.usage.cached_tokens == PAGES[kind] * 128
    assert second.metric("m3stack_worker_transfers_total", outcome="corrupt") == 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", ["one", "two"])
@pytest.mark.parametrize("kind", ["image", "clip"])
def test_features_of_an_encoder_answer_as_ones_own(
    fleet: dict[str, Process], alone: dict[str, list[int]], kind: str, target: str
) -> None:
    worker, encoder = fleet[target], fleet["encode"]
    request = salted(KINDS[kind](), f"encoded-{target}-{kind}")
    # another picture for each worker: what it has encoded itself must not be what is found
    media = tuple(
        dataclasses.replace(item, media_hash=bytes([index, *target.encode()]).ljust(32, b"x"))
        for index, item in enumerate(request.media)
    )
    request = dataclasses.replace(request, media=media)
    tokens, _ = run(encoder, request, Stage(Purpose.ENCODE))
    assert tokens == []
    without = tuple(dataclasses.replace(item, patches=None) for item in media)
    bare = dataclasses.replace(request, media=without)
    # without features, and without patches to make them of, this could not be answered
    with pytest.raises(WorkerError):
        run(worker, salted(bare, "nothing"))
    tokens, _ = run(worker, bare, Stage(features=encoder.source))
    assert tokens == alone[kind]
    assert worker.metric("m3stack_worker_transferred_bytes_total", kind="features") > 0


@pytest.mark.timeout(600)
def test_an_encoder_answers_nothing_and_hands_out_no_pages(fleet: dict[str, Process]) -> None:
    encoder, worker = fleet["encode"], fleet["one"]
    with pytest.raises(WorkerError) as refusal:
        run(encoder, text_request(40))
    assert refusal.value.kind is ErrorKind.INVALID_REQUEST
    request = salted(text_request(300), "of an encoder")
    _, end = run(worker, request, Stage(pages=encoder.source))
    assert end.usage.cached_tokens == 0
