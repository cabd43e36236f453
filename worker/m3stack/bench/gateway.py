"""`m3stack bench gateway`: what the gateway costs, in front of a scripted worker.

Runs the release binary of the gateway before `scripted_worker`, which answers over gRPC at once or
at a pace, and loads it with `gateway_load`. With `--smg PROGRAM` the peer gateway SMG stands before
the same scripted worker, in its own protocol, and both are measured in turn in every round. What a
gateway adds is the difference to that worker asked directly. Built by `make bench`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from m3stack.bench.gateway_arms import (
    PROGRAMS,
    SERVED_NAME,
    Arm,
    Kind,
    Script,
    measure_start,
    serving,
)
from m3stack.checkpoints import builtin_checkpoint
from m3stack.prepare import Preparer

STARTS = 5
INTERVAL_MS = 10
STREAM_TOKENS = 200
PROMPT_TOKENS = 90_000
REPEATED_SHARE = 0.9
MARK = "]<]minimax[>["
# a sign that stands nowhere else tells when its first byte is shown
SIGN = "~"
ARGUMENT = f"{SIGN} the quick brown fox jumps over the lazy dog " * 4
CALL_HEAD = f'{MARK}<tool_call>\n{MARK}<invoke name="write">{MARK}<words>'
CALL = f"{CALL_HEAD}{ARGUMENT}{MARK}</words>{MARK}</invoke>\n{MARK}</tool_call>"
WRITE = {
    "type": "function",
    "function": {
        "name": "write",
        "parameters": {"type": "object", "properties": {"words": {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured on which arms, how often and how long."""

    kinds: tuple[Kind, ...]
    model: Path
    folder: Path
    rounds: int
    seconds: float

    @contextlib.contextmanager
    def arms(self, script: Script) -> Iterator[list[Arm]]:
        """All arms, ready."""
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(serving(kind, self.model, script)) for kind in self.kinds]

    def in_turn(self, arms: list[Arm], measure: Callable[[Arm], float]) -> dict[str, float]:
        """Medians over rounds in which every arm is measured once."""
        seen: dict[str, list[float]] = {arm.kind.name: [] for arm in arms}
        for turn in range(self.rounds):
            for arm in arms if turn % 2 == 0 else reversed(arms):
                seen[arm.kind.name].append(measure(arm))
        return {name: statistics.median(values) for name, values in seen.items()}

    def body(self, name: str, content: str, **options: object) -> Path:
        """A file with the body of a chat request."""
        message = {"role": "user", "content": content}
        body = {"model": SERVED_NAME, "messages": [message], "temperature": 0}
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps({"thinking": {"type": "disabled"}, **body, **options}))
        return path


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of every arm; lower is better."""

    name: str
    values: dict[str, float]
    unit: str

    def as_json(self) -> dict[str, object]:
        values = {name: round(value, 3) for name, value in self.values.items()}
        return {"name": self.name, **values, "unit": self.unit}


def main(argv: Sequence[str]) -> int:
    """Measures and prints; 0 measured, 2 a program is not built."""
    parser = argparse.ArgumentParser(prog="m3stack bench gateway", description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each load run")
    parser.add_argument("--rounds", type=int, default=5, help="rounds whose median is told")
    parser.add_argument("--model", type=Path, default=None, metavar="DIR")
    parser.add_argument("--smg", type=Path, default=None, metavar="PROGRAM", help="the peer's smg")
    stages = [stage.__name__ for stage in STAGES]
    parser.add_argument("--stages", nargs="+", choices=stages, default=stages)
    parser.add_argument("--json", type=Path, default=None, help="file for the rows")
    arguments = parser.parse_args(argv)
    missing = [str(path) for path in PROGRAMS.values() if not path.is_file()]
    if missing:
        print(f"not built: {', '.join(missing)}\nrun `make bench`, which builds them in release")
        return 2
    kinds = [Kind("ours", "ours", PROGRAMS["gateway"])]
    if arguments.smg:
        kinds.append(Kind("smg", "vllm", arguments.smg))
    model = arguments.model if arguments.model is not None else builtin_checkpoint("tiny")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(
            tuple(kinds), model.resolve(), Path(folder), arguments.rounds, arguments.seconds
        )
        for stage in STAGES:
            for row in stage(plan) if stage.__name__ in arguments.stages else ():
                rows.append(row)
                print(json.dumps(row.as_json()), flush=True)
    report = {"load_average": os.getloadavg(), "rows": [row.as_json() for row in rows]}
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def short_requests(plan: Plan) -> Iterator[Row]:
    """Requests that are answered whole and at once."""
    body = plan.body("short", "Say something about the weather today, please.", max_tokens=16)
    length: dict[str, object] = {"seconds": plan.seconds}
    with plan.arms(Script(tokens=16)) as arms:

        def whole_us(arm: Arm) -> float:
            return arm.ask("whole", [body], **length)["whole_us"]["p50"]

        def added_us(arm: Arm) -> float:
            alone = arm.ask_worker(prompt_tokens=324, **length)["whole_us"]["p50"]
            return whole_us(arm) - alone

        def cpu_us(arm: Arm) -> float:
            before = arm.cpu_s()
            requests = arm.ask("whole", [body], concurrency=8, **length)["requests"]
            return (arm.cpu_s() - before) / requests * 1e6

        def us_a_request(arm: Arm) -> float:
            return 1e6 / arm.ask("whole", [body], concurrency=16, **length)["per_second"]

        for arm in arms:
            whole_us(arm)
        yield Row("added_latency_p50_c1", plan.in_turn(arms, added_us), "us")
        yield Row("whole_latency_p50_c1", plan.in_turn(arms, whole_us), "us")
        yield Row("cpu_per_request_c8", plan.in_turn(arms, cpu_us), "us")
        yield Row("time_per_request_c16", plan.in_turn(arms, us_a_request), "us")
        yield Row("resident_after_load", {arm.kind.name: arm.resident_mb() for arm in arms}, "MB")


def paced_streams(plan: Plan) -> Iterator[Row]:
    """Streams of a worker that says a token every ten milliseconds."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    body = plan.body("stream", "Go on.", max_tokens=STREAM_TOKENS, **options)
    short = plan.body("short-stream", "Go on.", max_tokens=40, **options)
    with plan.arms(Script(STREAM_TOKENS, INTERVAL_MS)) as arms:

        def cpu_us(arm: Arm) -> float:
            before = arm.cpu_s()
            streams = arm.ask("streams", [body], concurrency=64, count=128)["requests"]
            return (arm.cpu_s() - before) / (streams * STREAM_TOKENS) * 1e6

        def first_ms(arm: Arm) -> float:
            alone = arm.ask_worker(max_tokens=40, count=5)["first_us"]["p50"]
            return (arm.ask("streams", [short], count=5)["first_us"]["p50"] - alone) / 1e3

        yield Row("cpu_per_streamed_token", plan.in_turn(arms, cpu_us), "us")
        yield Row("first_visible_delta_after_first_token", plan.in_turn(arms, first_ms), "ms")


def tool_calls(plan: Plan) -> Iterator[Row]:
    """A call whose one argument is long: when does its first piece come?"""
    text = plan.folder / "call.txt"
    text.write_text(CALL)
    preparer = Preparer(plan.model)
    token_ids = preparer.tokenize(CALL)
    num_tokens = len(token_ids)
    # the first token that brings a byte of the argument
    first = next(
        count
        for count in range(1, num_tokens + 1)
        if len(preparer.detokenize(token_ids[:count])) > len(CALL_HEAD)
    )
    options = {"stream": True, "tools": [WRITE], "max_tokens": num_tokens + 1}
    body = plan.body("call", "Write.", **options)
    with plan.arms(Script(num_tokens, INTERVAL_MS, text)) as arms:

        def first_tokens(arm: Arm) -> float:
            # of two, the median would be the later one
            alone = arm.ask_worker(max_tokens=num_tokens, nth_token=first, count=3)
            seen = arm.ask("streams", [body], visible=SIGN, count=3)
            return (seen["first_us"]["p50"] - alone["first_us"]["p50"]) / 1e3 / INTERVAL_MS

        yield Row(
            "first_argument_delta_after_first_byte", plan.in_turn(arms, first_tokens), "tokens"
        )


def long_prompts(plan: Plan) -> Iterator[Row]:
    """Prompts of 90,000 tokens that no gateway has seen, then ones that begin as one it has."""
    texts = long_texts(plan, 2 * plan.rounds + 2)
    keep = int(len(texts[0]) * REPEATED_SHARE)
    seen, *fresh = (
        plan.body(f"long-{place}", text, max_tokens=1)
        for place, text in enumerate(texts[: plan.rounds + 1])
    )
    repeated = [
        plan.body(f"repeated-{place}", texts[0][:keep] + text[keep:], max_tokens=1)
        for place, text in enumerate(texts[plan.rounds + 1 :])
    ]
    with plan.arms(Script(tokens=1)) as arms:

        def whole_ms(arm: Arm, bodies: Iterator[Path]) -> float:
            return arm.ask("whole", [next(bodies)], count=1)["whole_us"]["p50"] / 1e3

        for arm in arms:
            arm.ask("whole", [repeated[-1]], count=1)
        asked: dict[str, object] = {"prompt_tokens": PROMPT_TOKENS, "max_tokens": 1}
        alone = plan.in_turn(
            arms, lambda arm: arm.ask_worker(**asked, count=3)["whole_us"]["p50"] / 1e3
        )
        for name, bodies in (("prompt_90k", fresh), ("prompt_90k_repeated_prefix", repeated)):
            if bodies is repeated:
                for arm in arms:
                    arm.ask("whole", [seen], count=1)
            turns = {arm.kind.name: iter(bodies) for arm in arms}
            values = plan.in_turn(
                arms, lambda arm, turns=turns: whole_ms(arm, turns[arm.kind.name])
            )
            yield Row(name, values, "ms")
            # without what the worker takes to read as many ids
            added = {kind: value - alone[kind] for kind, value in values.items()}
            yield Row(f"{name}_added", added, "ms")


def starts(plan: Plan) -> Iterator[Row]:
    """Our gateway from nothing to a 200 on /health."""
    kind = plan.kinds[0]
    seen = [measure_start(kind, plan.model) for _ in range(STARTS)]
    yield Row("start_to_health", {kind.name: statistics.median(s for s, _ in seen)}, "s")
    yield Row("idle_resident", {kind.name: statistics.median(mb for _, mb in seen)}, "MB")


def long_texts(plan: Plan, count: int) -> list[str]:
    """Different texts of about so many tokens: the sources of the Python that runs this."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    sources += sorted(Path(os.__file__).parent.glob("[a-z]*/*.py"))
    text = "\n".join(source.read_text(errors="replace") for source in sources)
    sample = text[:200_000]
    length = int(PROMPT_TOKENS * len(sample) / len(Preparer(plan.model).tokenize(sample)))
    if len(text) < length * count:
        raise SystemExit(f"{len(text)} characters of sources, {length * count} are needed")
    return [text[place * length : (place + 1) * length] for place in range(count)]


STAGES = (short_requests, paced_streams, tool_calls, long_prompts, starts)
