"""Runs a fleet under load and faults, and writes what became of every request.

Usage: unshare --net --mount python -m tests.chaos.run --seconds N --report FILE [--folder DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from m3stack.checkpoints import builtin_checkpoint
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.fleet import MODEL, Fleet, fleet
from tests.chaos.load import ONCE, End, Kind, Load, Outcome

ROOT = Path(__file__).parents[2]
CALM_S = 20.0
SAMPLE_S = 2.0
# after a fault is healed, before the next one
REST_S = 12.0
QUIET_TIMEOUT_S = 60.0
# a request is late if it waits this much longer than 99 of 100 did in the calm
LATE_FACTOR, LATE_EXTRA_S = 3.0, 1.0


@dataclass(slots=True)
class Spell:
    """A stretch of time under one fault, until the next one begins."""

    fault: str
    from_s: float
    to_s: float = math.inf
    outcomes: list[Outcome] = field(default_factory=list)


@dataclass(slots=True)
class Sample:
    """What processes held at one time: resident bytes and descriptors by name and start."""

    at_s: float
    held: dict[tuple[str, int], tuple[int, int]]


async def run(made: Fleet, *, seconds: float, num_clients: int) -> dict[str, Any]:
    """Calm, then faults in turn until time is over, then quiet."""
    load = Load([node.url for node in made.gateways], model=MODEL, num_clients=num_clients, seed=7)
    loading = asyncio.create_task(load.run())
    samples: list[Sample] = []
    sampling = asyncio.create_task(_sample(made, samples))
    spells = [Spell("none", time.monotonic())]
    await asyncio.sleep(CALM_S)
    until_s = time.monotonic() + seconds
    # every fault once, however short the run
    turn = 0
    while turn < len(FAULTS) or time.monotonic() < until_s:
        fault = FAULTS[turn % len(FAULTS)]
        turn += 1
        spells[-1].to_s = time.monotonic()
        spells.append(Spell(fault.name, spells[-1].to_s))
        print(f"{time.strftime('%H:%M:%S')} {fault.name}", flush=True)
        await _endure(made, fault)
    load.stop()
    await loading
    left = await _quiet(made)
    sampling.cancel()
    for outcome in load.outcomes:
        (spell,) = [one for one in spells if one.from_s <= outcome.started_s < one.to_s]
        spell.outcomes.append(outcome)
    return report(spells, samples, left)


async def _endure(made: Fleet, fault: Fault) -> None:
    await asyncio.to_thread(fault.begin, made)
    await asyncio.sleep(fault.hold_s)
    await asyncio.to_thread(fault.heal, made)
    await asyncio.sleep(REST_S)


async def _sample(made: Fleet, samples: list[Sample]) -> None:
    while True:
        held = {
            (node.name, node.starts): (node.resident_bytes(), node.num_descriptors())
            for node in made.nodes
            if node.process is not None and node.process.poll() is None
        }
        samples.append(Sample(time.monotonic(), held))
        await asyncio.sleep(SAMPLE_S)


async def _quiet(made: Fleet) -> dict[str, float]:
    """What is still held when nobody asks for anything; empty is as it should be."""
    deadline = time.monotonic() + QUIET_TIMEOUT_S
    left: dict[str, float] = {}
    while time.monotonic() < deadline:
        left = {}
        for node in made.nodes:
            metrics = await asyncio.to_thread(node.metrics)
            for name in _HELD[node.is_gateway]:
                if metrics[name]:
                    left[f"{node.name} {name}"] = metrics[name]
        if not left:
            break
        await asyncio.sleep(0.5)
    return left


_HELD = {
    False: (
        "m3stack_worker_running_requests",
        "m3stack_worker_waiting_requests",
        "m3stack_worker_waiting_prompt_tokens",
        "m3stack_worker_used_pages",
    ),
    True: ("m3stack_gateway_running_requests", "m3stack_gateway_video_processes"),
}


def report(spells: list[Spell], samples: list[Sample], left: dict[str, float]) -> dict[str, Any]:
    """The figures, one row a fault and one for all."""
    calm = spells[0]
    limits = {kind.name: _limit(calm, kind) for kind in {o.kind for o in calm.outcomes}}
    truth = _truth(calm)
    everything = [outcome for spell in spells for outcome in spell.outcomes]
    names = list(dict.fromkeys(spell.fault for spell in spells))
    rows = [
        _row(name, [spell for spell in spells if spell.fault == name], limits, truth)
        for name in names
    ]
    return {
        "rows": rows,
        "all": _row("all", spells, limits, truth) | {"recovery_s": None, "failing_s": None},
        "late_after_s": limits,
        "seconds": round(max(o.started_s for o in everything) - calm.from_s, 1),
        "resident_growth": _growth(samples),
        "descriptor_growth": _descriptors(samples),
        "held_when_quiet": left,
        "load_average": [round(value, 1) for value in os.getloadavg()],
        "machine": f"{platform.machine()}, {_num_cores()} cores, {platform.platform()}",
    }


def _row(
    name: str, spells: list[Spell], limits: dict[str, float], truth: dict[tuple[str, int], str]
) -> dict[str, Any]:
    outcomes = [outcome for spell in spells for outcome in spell.outcomes]
    ends = Counter(outcome.end for outcome in outcomes)
    wrong = [o for o in outcomes if not agrees(o, truth)]
    recoveries = [_last_s(spell, lambda outcome: _is_bad(outcome, limits)) for spell in spells]
    failing = [_last_s(spell, _failed) for spell in spells]
    return {
        "fault": name,
        "times": len(spells),
        "requests": len(outcomes),
        "ended_once": sum(count for end, count in ends.items() if end in ONCE),
        "cut_silently": ends[End.CUT_SILENTLY],
        "recovery_s": round(max(recoveries), 2),
        "failing_s": round(max(failing), 2),
        "wrong_text": len(wrong),
        "ends": {str(end): count for end, count in sorted(ends.items())},
        "details": dict(Counter(o.detail[:160] for o in outcomes if o.detail).most_common(6)),
    }


def _limit(calm: Spell, kind: Kind) -> float:
    waits = sorted(o.first_s for o in calm.outcomes if o.kind is kind and o.first_s is not None)
    p99 = waits[min(len(waits) - 1, int(len(waits) * 0.99))] if waits else 1.0
    return round(max(p99 * LATE_FACTOR, p99 + LATE_EXTRA_S), 3)


def _last_s(spell: Spell, is_meant: Callable[[Outcome], bool]) -> float:
    """From the fault's begin to the last such request's, 0 if there is none.

    One that is still under way when the next fault comes is that one's to explain.
    """
    return max(
        (
            outcome.started_s - spell.from_s
            for outcome in spell.outcomes
            if is_meant(outcome) and outcome.started_s + outcome.took_s < spell.to_s
        ),
        default=0.0,
    )


def _failed(outcome: Outcome) -> bool:
    return outcome.end not in (End.ANSWERED, End.LEFT)


def _is_bad(outcome: Outcome, limits: dict[str, float]) -> bool:
    if _failed(outcome):
        return True
    waited = outcome.first_s if outcome.first_s is not None else outcome.took_s
    return waited > limits.get(outcome.kind.name, LATE_EXTRA_S)


def _truth(calm: Spell) -> dict[tuple[str, int], str]:
    """The answer to each request, from before anything went wrong."""
    return {(o.kind.name, o.prompt): o.text for o in calm.outcomes if o.end is End.ANSWERED}


def agrees(outcome: Outcome, truth: dict[tuple[str, int], str]) -> bool:
    """Whether an answer is the true one, or a part that ended early is its beginning."""
    # those who leave ask what those who stay for long ask
    name = "long stream" if outcome.kind.leaves_after else outcome.kind.name
    whole = truth.get((name, outcome.prompt))
    if whole is None:
        return True
    return outcome.text == whole if outcome.end is End.ANSWERED else whole.startswith(outcome.text)


def _growth(samples: list[Sample]) -> dict[str, float]:
    """Growth of resident memory over the second half, of processes that lived through it."""
    middle = (samples[0].at_s + samples[-1].at_s) / 2
    half = [sample for sample in samples if sample.at_s >= middle]
    growth = {}
    for key in half[0].held.keys() & half[-1].held.keys():
        series = [sample.held[key][0] for sample in half]
        first, last = sorted(series[:5])[len(series[:5]) // 2], sorted(series[-5:])[2]
        growth[key[0]] = round(last / first - 1, 4)
    return dict(sorted(growth.items()))


def _descriptors(samples: list[Sample]) -> dict[str, int]:
    """Descriptors more than in the calm, of processes that lived through it all."""
    first, last = samples[min(2, len(samples) - 1)].held, samples[-1].held
    return {key[0]: last[key][1] - first[key][1] for key in sorted(first.keys() & last.keys())}


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, required=True, help="of faults")
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--gateway", type=Path, default=ROOT / "target/debug/m3stack-gateway")
    parser.add_argument("--folder", type=Path, default=None, help="keeps logs here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        model, package = builtin_checkpoint("tiny"), ROOT / "worker"
        with fleet(folder, gateway=arguments.gateway, model=model, package=package) as made:
            figures = asyncio.run(
                run(made, seconds=arguments.seconds, num_clients=arguments.clients)
            )
    arguments.report.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures["all"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
