"""`m3stack eval`: what the built-in model gets right, asked over REST."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx

from m3stack.checkpoints import builtin_checkpoint
from m3stack.cli.up import raise_interrupt
from m3stack.errors import StartupError
from m3stack.eval import servers
from m3stack.eval.questions import SKILLS, Skill
from m3stack.eval.scores import Asker, Row, as_json, picture, score, table


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="m3stack eval",
        description="Asks the tiny model held-out questions of every skill it was taught, each "
        "with a control that lacks what the question needs, and prints the scores.",
    )
    names = ", ".join(dict.fromkeys(skill.name for skill in SKILLS))
    parser.add_argument("--skills", default="", help=f"some of: {names} (default: all)")
    parser.add_argument("--samples", type=int, default=100, help="questions a skill")
    parser.add_argument(
        "--long-samples", type=int, default=40, help="questions about documents of 64k tokens"
    )
    parser.add_argument(
        "--long-control-samples", type=int, default=10, help="the same for their control"
    )
    parser.add_argument(
        "--model", type=Path, default=None, metavar="DIR", help="checkpoint (default: built in)"
    )
    parser.add_argument(
        "--url", default="", help="a running gateway to ask; needles then have no control"
    )
    parser.add_argument("--device", default="cpu", help="of the worker that is started")
    parser.add_argument(
        "--json", type=Path, default=None, metavar="FILE", help="write the rows, as they come"
    )
    parser.add_argument("--svg", type=Path, default=None, metavar="FILE", help="write a picture")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs an evaluation.

    Returns:
        0 if every skill reaches its bar, 1 if one does not, a server failed or a signal came, 2 for
        an unknown skill.
    """
    arguments = build_parser().parse_args(argv)
    wanted = [name for name in arguments.skills.split(",") if name]
    unknown = set(wanted) - {skill.name for skill in SKILLS}
    if unknown:
        print(f"m3stack eval: there is no skill {sorted(unknown)[0]!r}", file=sys.stderr)
        return 2
    skills = [skill for skill in SKILLS if not wanted or skill.name in wanted]
    # as an exception, so that the servers started here are stopped
    before = signal.signal(signal.SIGTERM, raise_interrupt)
    try:
        rows = evaluate(skills, arguments)
    except (StartupError, httpx.HTTPError) as error:
        print(f"m3stack eval: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("m3stack eval: stopped", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)
    print(table(rows))
    if arguments.svg is not None:
        arguments.svg.write_text(picture(rows), encoding="utf-8")
    return 0 if all(row.reaches_bar for row in rows) else 1


def evaluate(skills: Sequence[Skill], arguments: argparse.Namespace) -> list[Row]:
    """Scores of the skills, in order."""
    model = arguments.model or builtin_checkpoint("tiny")
    with ExitStack() as stack:
        url = arguments.url or stack.enter_context(servers.served(model, device=arguments.device))
        asker = stack.enter_context(Asker(url))
        control: Asker | None = None
        if not arguments.url and any(skill.control_make is None for skill in skills):
            copy = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            servers.without_index(model, copy)
            control_url = stack.enter_context(servers.served(copy, device=arguments.device))
            control = stack.enter_context(Asker(control_url))
        rows: list[Row] = []
        for skill in skills:
            is_long = skill.name == "needle_64k"
            count = arguments.long_samples if is_long else arguments.samples
            control_count = arguments.long_control_samples if is_long else arguments.samples
            rows.append(score(skill, count, asker, control, control_count=control_count))
            shown = rows[-1]
            print(
                f"{shown.skill}: {shown.accuracy:.1%}, {shown.control}: {shown.control_accuracy}",
                flush=True,
            )
            # after every skill: the long ones take minutes
            if arguments.json is not None:
                text = json.dumps(as_json(rows), indent=1)
                arguments.json.write_text(f"{text}\n", encoding="utf-8")
        return rows
