"""Many clips at once: no more decoders than configured, bounded memory, and text goes on."""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from m3stack.local_ports import free_port
from tests.e2e import media
from tests.e2e.conftest import Server, Stack, wait_for
from tests.e2e.media_sink import media_sink
from tests.e2e.text_times import text_times_ms

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1500)]

CLIPS = 24
DECODERS = 1
MAX_EXTRA_BYTES = 300 << 20
TEXTS = 200
# refusals that a policy has: too many at once, no room, too late
REFUSALS = {429, 503, 504}


@dataclass
class Watcher:
    """What a process and its children take, looked at twenty times a second."""

    pid: int
    peak_bytes: int = 0
    peak_children: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)

    def look(self) -> int:
        tasks = Path(f"/proc/{self.pid}/task").glob("*/children")
        children = " ".join(read(task) for task in tasks).split()
        # "id (name) state": the dead that nobody has waited for yet decode nothing
        states = [read(Path(f"/proc/{child}/stat")) for child in children]
        alive = [state for state in states if state and state.rsplit(") ")[1][0] not in "ZX"]
        decoders = sum("(ffmpeg)" in state or "(ffprobe)" in state for state in alive)
        taken = sum(resident_bytes(pid) for pid in (str(self.pid), *children))
        self.peak_children = max(self.peak_children, decoders)
        self.peak_bytes = max(self.peak_bytes, taken)
        return taken

    def run(self) -> None:
        while not self.stopped.wait(0.05):
            self.look()


def read(path: Path) -> str:
    """The text of a file of the process table; empty if the process has ended."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def resident_bytes(pid: str) -> int:
    lines = read(Path(f"/proc/{pid}/status")).splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))


def chat(content: object) -> dict:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 8}


def p99(times: list[float]) -> float:
    return sorted(times)[int(len(times) * 0.99)]


def test_clips_at_once_are_answered_or_refused_within_bounds(
    stack: Stack, worker: Server, tmp_path: Path
) -> None:
    clip = media.clip(tmp_path, size="1280x720", seconds=10)
    # a last box that nobody reads makes each another file: nothing is shared
    clips = [clip + (8 + n).to_bytes(4, "big") + b"free" + bytes(n) for n in range(CLIPS)]
    bodies = [chat([media.video_part(data), media.text_part("what?")]) for data in clips]
    with media_sink(worker) as url:
        flags = ("--workers", url, "--set", f"max_video_processes={DECODERS}")
        gateway = stack.start("gateway", f"127.0.0.1:{free_port()}", "", *flags)
        wait_for(gateway, "/ready")
        with text_times_ms(gateway.url, count=TEXTS) as idle:
            pass
        watcher = Watcher(gateway.process.pid)
        idle_bytes = watcher.look()
        watching = threading.Thread(target=watcher.run)
        watching.start()

        def ask(body: dict) -> httpx.Response:
            return httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=1200)

        begin = time.perf_counter()
        with ThreadPoolExecutor(CLIPS) as pool, text_times_ms(gateway.url) as busy:
            replies = [pool.submit(ask, body) for body in bodies]
            answered = [reply.result() for reply in replies]
            wall_s = time.perf_counter() - begin
        watcher.stopped.set()
        watching.join()

    statuses = Counter(reply.status_code for reply in answered)
    extra_bytes = watcher.peak_bytes - idle_bytes
    print(
        f"\n{CLIPS} clips of 10 s of 720p in {wall_s:.1f} s: statuses {dict(statuses)}, at most "
        f"{watcher.peak_children} decoders, memory {idle_bytes >> 20} MiB idle, "
        f"{extra_bytes >> 20} more at most (children counted); text idle p50 "
        f"{statistics.median(idle):.1f} p99 {p99(idle):.1f} ms, meanwhile p50 "
        f"{statistics.median(busy):.1f} p99 {p99(busy):.1f} ms of {len(busy)}"
    )
    assert set(statuses) <= {200, *REFUSALS}
    assert statuses[200] > 0
    for reply in answered:
        assert reply.status_code != 429 or "retry-after" in reply.headers
    assert 1 <= watcher.peak_children <= DECODERS
    assert extra_bytes <= MAX_EXTRA_BYTES
    assert watcher.look() <= idle_bytes + MAX_EXTRA_BYTES
