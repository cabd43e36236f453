"""Runs a fleet under load and faults, and writes what became of every request.

Usage: unshare --net --mount python -m tests.chaos.run --seconds N --report FILE.json
Beside the report come a page (FILE.md) and a picture (FILE.svg). All three are written anew after
each fault, so that a run that is ended early (by a signal, say) has told what it saw.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from m3stack.checkpoints import builtin_checkpoint
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.fleet import MODEL, WORKERS, Fleet, fleet
from tests.chaos.load import KINDS, LEAST_RATE, PROMPTS, End, Load
from tests.chaos.page import page, picture
from tests.chaos.verdict import CALM, Sample, Spell, Truth, figures, sort_into

ROOT = Path(__file__).parents[2]
SAMPLE_S = 2.0
# after a fault is healed, before the next one
REST_S = 12.0
QUIET_TIMEOUT_S = 60.0
# of the processors, what fleet and clients may use in the calm: two workers must do for three
CALM_SHARE = 0.35
MOST_RATE = 12.0


@dataclass
class Run:
    """A run under way."""

    made: Fleet
    load: Load
    report: Path
    samples: list[Sample] = field(default_factory=list)
    spells: list[Spell] = field(default_factory=list)
    truth: Truth = field(default_factory=dict)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    left: dict[str, float] | None = None
    trouble: str = ""

    async def whole(self, *, seconds: float, calm_s: float, rate: float | None, names: str) -> None:
        """Truth, calm, faults in turn until time is over, quiet."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stopped.set)
        self.load.rate = await self._learn(rate)
        sampling = asyncio.create_task(self._sample())
        loading = asyncio.create_task(self.load.run())
        try:
            self._begin(CALM)
            await self._pause(calm_s)
            await self._faults([f for f in FAULTS if names in ("", f.name)], seconds)
        except (AssertionError, OSError, httpx.HTTPError) as error:
            self.trouble = str(error)
            print(f"the run ends early: {error}", flush=True)
        finally:
            self.load.stop()
            await loading
            self.left = await self._quiet()
            sampling.cancel()
            self.write()

    async def _learn(self, rate: float | None) -> float:
        """Asks everything once before anything goes wrong; gives the rate to suit this machine."""
        before = self._cpu_s()
        asked = [kind for kind in KINDS if not kind.leaves_after]
        cost: dict[str, float] = {}
        for kind in asked:
            begun = self._cpu_s()
            for prompt in range(len(PROMPTS)):
                outcome = await self.load.once(kind, prompt)
                assert outcome.end is End.ANSWERED, f"in the calm: {outcome}"
                self.truth[kind.name, prompt] = outcome.text
            cost[kind.name] = (self._cpu_s() - begun) / len(PROMPTS)
        mean = sum(kind.weight * cost[kind.name] for kind in asked)
        mean /= sum(kind.weight for kind in asked)
        fitting = CALM_SHARE * num_cores() / mean
        chosen = rate or round(min(max(fitting, LEAST_RATE), MOST_RATE), 2)
        _say(f"{self._cpu_s() - before:.1f} s of processor time to learn; {mean:.3f} s a request")
        _say(f"{chosen:g} requests a second")
        return chosen

    async def _faults(self, faults: Sequence[Fault], seconds: float) -> None:
        until_s = time.monotonic() + seconds
        turn = 0
        # every fault once, however short the run
        while not self.stopped.is_set() and (turn < len(faults) or time.monotonic() < until_s):
            fault = faults[turn % len(faults)]
            turn += 1
            self._begin(fault.name)
            await asyncio.to_thread(fault.begin, self.made)
            await self._pause(fault.hold_s)
            await asyncio.to_thread(fault.heal, self.made)
            await self._pause(REST_S)
            self._tell(turn, max(0.0, until_s - time.monotonic()))
            self.write()

    def _begin(self, name: str) -> None:
        now_s = time.monotonic()
        if self.spells:
            self.spells[-1].to_s = now_s
        self.spells.append(Spell(name, now_s))
        _say(name)

    def _tell(self, turn: int, left_s: float) -> None:
        told = self.figures()
        row = next(row for row in told["rows"] if row["fault"] == self.spells[-1].fault)
        wrong = told["all"]["requests"] - told["all"]["ended_once"] + told["all"]["wrong_text"]
        _say(
            f"  fault {turn}: recovery {row['recovery_s']} s over {row['times']} times, last bad "
            f"{row['last_bad_s']} s; all: {told['all']['requests']} requests, {wrong} ended "
            f"wrongly; {left_s:.0f} s of faults left; load {os.getloadavg()[0]:.1f}"
        )

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stopped.wait()

    def _cpu_s(self) -> float:
        return time.process_time() + sum(node.cpu_s() for node in self.made.nodes)

    async def _sample(self) -> None:
        while True:
            held = {
                (node.name, node.starts): (node.resident_bytes(), node.num_descriptors())
                for node in self.made.nodes
                if node.lives
            }
            self.samples.append(Sample(time.monotonic(), held, self._cpu_s()))
            await asyncio.sleep(SAMPLE_S)

    async def _quiet(self) -> dict[str, float]:
        """What is still held when nobody asks for anything; empty is as it should be."""
        deadline = time.monotonic() + QUIET_TIMEOUT_S
        left: dict[str, float] = {}
        while time.monotonic() < deadline:
            left = {}
            for node in self.made.nodes:
                metrics = await asyncio.to_thread(node.metrics)
                for name in _HELD[node.is_gateway]:
                    if metrics[name]:
                        left[f"{node.name} {name}"] = metrics[name]
            if not left:
                break
            await asyncio.sleep(0.5)
        return left

    def figures(self) -> dict[str, Any]:
        """Everything that is known by now."""
        sort_into(self.spells, self.load.outcomes)
        return figures(self.spells, self.samples, self.truth) | {
            "requests_per_s": self.load.rate,
            "held_when_quiet": self.left,
            "trouble": self.trouble,
            "load_average": [round(value, 1) for value in os.getloadavg()],
            "machine": f"{platform.machine()}, {num_cores()} cores, {platform.platform()}",
        }

    def write(self) -> None:
        """Report, page and picture, each replaced as a whole."""
        told = self.figures()
        for suffix, text in (
            (".json", json.dumps(told, indent=1) + "\n"),
            (".md", page(told, self.report.stem)),
            (".svg", picture(told)),
        ):
            draft = self.report.with_suffix(suffix + ".new")
            draft.write_text(text)
            draft.replace(self.report.with_suffix(suffix))


_HELD = {
    False: (
        "m3stack_worker_running_requests",
        "m3stack_worker_waiting_requests",
        "m3stack_worker_waiting_prompt_tokens",
        "m3stack_worker_used_pages",
    ),
    True: ("m3stack_gateway_running_requests", "m3stack_gateway_video_processes"),
}


def num_cores() -> int:
    """Processors that the run may use."""
    return len(os.sched_getaffinity(0))


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, required=True, help="of faults")
    parser.add_argument("--report", type=Path, required=True, help="FILE.json")
    parser.add_argument("--calm-s", type=float, default=60.0, help="of load before any fault")
    parser.add_argument("--rate", type=float, default=None, help="requests a second")
    parser.add_argument("--fault", default="", help="only this one, by its name")
    parser.add_argument("--gateway", type=Path, default=ROOT / "target/debug/m3stack-gateway")
    parser.add_argument("--folder", type=Path, default=None, help="keeps logs here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        model, package = builtin_checkpoint("tiny"), ROOT / "worker"
        _say(f"{WORKERS} workers begin")
        with fleet(folder, gateway=arguments.gateway, model=model, package=package) as made:
            load = Load([node.url for node in made.gateways], model=MODEL, seed=7)
            run = Run(made, load, arguments.report)
            asyncio.run(
                run.whole(
                    seconds=arguments.seconds,
                    calm_s=arguments.calm_s,
                    rate=arguments.rate,
                    names=arguments.fault,
                )
            )
    print(json.dumps(run.figures()["all"], indent=1))
    return 1 if run.trouble else 0


if __name__ == "__main__":
    sys.exit(main())
