"""Pictures and clips through whole gateways, each before a scripted worker that takes what it is
sent: ours, and the peer SMG if its program is there.

Times are of the gateway's process and its children; nothing is cached, so that each request is a
first one.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx

from m3stack.bench.gateway_arms import PROGRAMS, SERVED_NAME, Arm, Kind, Script, serving
from m3stack.checkpoints import builtin_checkpoint

TICK_MS = 1e3 / os.sysconf("SC_CLK_TCK")
PATIENCE_S = 600.0
# an answer in words is no part of this
SCRIPT = Script(tokens=1)

Work = Callable[[], object]
# name of an arm to a figure
Figures = dict[str, float]


def missing_programs(smg: Path | None) -> list[str]:
    """Programs of both gateways that are not there."""
    programs = [PROGRAMS["gateway"], PROGRAMS["worker"], *([smg] if smg else [])]
    return [str(program) for program in programs if not program.is_file()]


@contextlib.contextmanager
def gateways(smg: Path | None) -> Iterator[list[Arm]]:
    """All gateways, ready."""
    kinds = [Kind("ours", "ours", PROGRAMS["gateway"], ("--set", "media_cache_bytes=0"))]
    if smg:
        kinds.append(Kind("smg", "vllm", smg))
    model = builtin_checkpoint("tiny").resolve()
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(serving(kind, model, SCRIPT)) for kind in kinds]


def children(arm: Arm) -> list[str]:
    """Processes that a gateway has started and not yet waited for."""
    tasks = Path(f"/proc/{arm.process.pid}/task").glob("*/children")
    return " ".join(task.read_text() for task in tasks).split()


def spent_ms(arm: Arm) -> float:
    """Processor time of a gateway and its children so far, once none of them is left."""
    deadline = time.monotonic() + PATIENCE_S
    while children(arm):
        if time.monotonic() > deadline:
            raise SystemExit(f"{arm.kind.name} leaves a process behind")
        time.sleep(0.002)
    # "id (name) state ...": what children have used is the 16th and 17th field of the line
    fields = Path(f"/proc/{arm.process.pid}/stat").read_text().rsplit(") ")[1].split()
    return arm.cpu_s() * 1e3 + (int(fields[13]) + int(fields[14])) * TICK_MS


def compare(
    arms: Sequence[Arm], body: Mapping[str, object], rounds: int, times: int
) -> tuple[Figures, Figures, Figures]:
    """Milliseconds a request of each gateway: processor time (median of the rounds, and least),
    wall time (median). In each round every gateway is asked so many times in turn.
    """
    spent: dict[str, list[float]] = {arm.kind.name: [] for arm in arms}
    wall: dict[str, list[float]] = {arm.kind.name: [] for arm in arms}
    with httpx.Client(timeout=PATIENCE_S) as client:
        for turn in range(rounds + 1):
            for arm in arms:
                before, begin = spent_ms(arm), time.perf_counter()
                for _ in range(times if turn else 1):
                    ask(client, arm, body)
                took = time.perf_counter() - begin
                # the first is for what is made once
                if turn:
                    spent[arm.kind.name].append((spent_ms(arm) - before) / times)
                    wall[arm.kind.name].append(took * 1e3 / times)
    middle = {name: statistics.median(values) for name, values in spent.items()}
    least = {name: min(values) for name, values in spent.items()}
    return middle, least, {name: statistics.median(values) for name, values in wall.items()}


def ask(client: httpx.Client, arm: Arm, body: Mapping[str, object]) -> None:
    """One request, which must be answered."""
    url = f"http://{arm.gateway}/v1/chat/completions"
    reply = client.post(url, json={"model": SERVED_NAME, "max_tokens": 1, **body})
    if reply.status_code != 200:
        raise SystemExit(f"{arm.kind.name}: {reply.status_code} {reply.text[:500]}")
