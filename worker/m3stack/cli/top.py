"""`m3stack top`: gateways and workers of a cluster in one terminal view, from their metrics."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from m3stack.cli.metrics_page import Between, MetricsPage, parse

SCRAPE_TIMEOUT_S = 2.0
# seconds of history behind the little charts, in intervals
HISTORY = 60
BARS = "▁▂▃▄▅▆▇█"
G, W = "m3stack_gateway_", "m3stack_worker_"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="m3stack top",
        description="Shows what gateways and workers do, second by second. Both are asked at the "
        "addresses of their metrics: a gateway's --admin-listen (or --listen, if it has none), a "
        "worker's --metrics-listen.",
    )
    parser.add_argument(
        "--gateway",
        action="append",
        metavar="HOST:PORT",
        help="a gateway's metrics; may be given again (default: 127.0.0.1:8000)",
    )
    parser.add_argument(
        "--worker",
        action="append",
        metavar="HOST:PORT",
        help="a worker's metrics; may be given again (default: 127.0.0.1:9100)",
    )
    parser.add_argument(
        "--interval-s", type=_interval, default=1.0, metavar="S", help="default: %(default)s"
    )
    parser.add_argument("--once", action="store_true", help="print one view and end")
    parser.add_argument(
        "--intervals",
        type=int,
        default=1,
        metavar="N",
        help="with --once: watch for so many before that (default: %(default)s)",
    )
    parser.add_argument("--svg", metavar="FILE", help="with --once: also write it as a picture")
    return parser


def _interval(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not from 0.1 to 3600")
    return value


def main(argv: Sequence[str]) -> int:
    """Draws until Ctrl-C, or once.

    Returns:
        0; with `--once`, 1 if nobody answered.
    """
    arguments = build_parser().parse_args(argv)
    if arguments.svg and not arguments.once:
        print("m3stack top: --svg needs --once", file=sys.stderr)
        return 2
    board = Board(
        [Program(address, is_gateway=True) for address in arguments.gateway or ["127.0.0.1:8000"]]
        + [Program(address, is_gateway=False) for address in arguments.worker or ["127.0.0.1:9100"]]
    )
    with httpx.Client(timeout=SCRAPE_TIMEOUT_S) as client, ThreadPoolExecutor(8) as pool:

        def scrape() -> None:
            list(pool.map(lambda program: program.scrape(client), board.programs))

        if arguments.once:
            scrape()
            for _ in range(arguments.intervals):
                time.sleep(arguments.interval_s)
                scrape()
                board.remember()
            return show_once(board, arguments.svg)
        with Live(board.render(), screen=True, auto_refresh=False) as live:
            while True:
                scrape()
                board.remember()
                live.update(board.render(), refresh=True)
                time.sleep(arguments.interval_s)


def show_once(board: Board, svg: str | None) -> int:
    """Prints a view; also writes it as a picture if a file is named."""
    console = Console(record=svg is not None, width=100 if svg is not None else None)
    console.print(board.render())
    if svg is not None:
        # a picture fetches nothing: the reader's own monospace font does
        picture = re.sub(r"@font-face \{[^}]*\}", "", console.export_svg(title="m3stack top"))
        Path(svg).write_text(picture)
    return 0 if any(program.between is not None for program in board.programs) else 1


@dataclass
class Program:
    """A gateway or a worker, and its last two scrapes.

    Attributes:
        trouble: why it has not answered; empty if it has.
    """

    address: str
    is_gateway: bool
    trouble: str = "not asked yet"
    last: MetricsPage | None = None
    between: Between | None = None

    def scrape(self, client: httpx.Client) -> None:
        """Asks once; a program that does not answer loses what was known of it."""
        try:
            reply = client.get(f"http://{self.address}/metrics")
            reply.raise_for_status()
            page = parse(reply.text, time.monotonic())
        except httpx.HTTPStatusError as error:
            self._forget(f"answers {error.response.status_code} to /metrics")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            self._forget(str(error) or type(error).__name__)
        except ValueError as error:
            self._forget(str(error))
        else:
            if self.last is not None:
                self.between = Between(self.last, page)
            self.last, self.trouble = page, ""

    def _forget(self, trouble: str) -> None:
        self.trouble, self.last, self.between = trouble, None, None


@dataclass
class Board:
    """All programs, and the cluster's rates of the last minutes."""

    programs: list[Program]
    output: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    waiting: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))

    def remember(self) -> None:
        """Adds the cluster's present rates to its history."""
        pairs = [one.between for one in self.programs if one.between and not one.is_gateway]
        self.output.append(sum(pair.rate(f"{W}output_tokens_total") for pair in pairs))
        self.waiting.append(sum(pair.after.total(f"{W}waiting_requests") for pair in pairs))

    def render(self) -> RenderableType:
        """The whole view."""
        gateways = [one for one in self.programs if one.is_gateway]
        workers = [one for one in self.programs if not one.is_gateway]
        return Group(
            _table("gateway", GATEWAY_COLUMNS, gateways),
            _table("worker", WORKER_COLUMNS, workers),
            _chart("output tokens/s", self.output, "green"),
            _chart("waiting requests", self.waiting, "yellow"),
        )


Cell = Callable[[Between], str | Text]


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _rate(name: str, **labels: str) -> Cell:
    def cell(pair: Between) -> str:
        value = pair.rate(name, **labels)
        return f"{value:.1f}" if value < 100 else f"{value:,.0f}"

    return cell


def _gauge(name: str, **labels: str) -> Cell:
    return lambda pair: _count(pair.after.total(name, **labels))


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    ms = seconds * 1000
    return f"{ms:.1f}" if ms < 100 else f"{ms:,.0f}"


def _quantile(name: str, share: float) -> Cell:
    return lambda pair: _ms(pair.quantile(name, share))


def _bad_rate(name: str) -> Cell:
    def cell(pair: Between) -> Text:
        value = pair.rate(name)
        return Text(f"{value:,.1f}", style="bold red" if value else "dim")

    return cell


def _workers(pair: Between) -> Text:
    """How many workers a gateway sees in which state; those that are not ready stand out."""
    text = Text()
    for state, style in (
        ("ready", "green"),
        ("loading", "yellow"),
        ("draining", "yellow"),
        ("stalled", "bold red"),
        ("broken", "bold red"),
        ("refused", "bold red"),
        ("unreachable", "bold red"),
    ):
        count = pair.after.total(f"{G}workers", state=state)
        if count or state == "ready":
            text.append(f"{count:.0f} {state} ", style=style)
    return text


def _role(pair: Between) -> Text:
    """What a worker does, and how it is if that is not as it should be."""
    role = _labelled(pair, f"{W}role", "role") or "–"
    state = _labelled(pair, f"{W}state", "state")
    text = Text(role)
    if state in ("loading", "draining"):
        text.append(f" {state}", style="yellow")
    elif state and not pair.after.total(f"{W}healthy"):
        text.append(" stuck", style="bold red")
    return text


def _labelled(pair: Between, name: str, label: str) -> str:
    """The value of a label for which a gauge is 1; empty where there is no such gauge."""
    series = pair.after.samples.get(name, {})
    return next((dict(labels)[label] for labels, value in series.items() if value), "")


def _memory(pair: Between) -> str:
    return f"{pair.after.total('process_resident_memory_bytes') / 2**20:,.0f}"


def _pages(pair: Between) -> Text:
    used, whole = pair.after.total(f"{W}used_pages"), pair.after.total(f"{W}total_pages")
    share = used / whole if whole else 0.0
    style = "bold red" if share > 0.95 else "yellow" if share > 0.8 else ""
    return Text(f"{100 * share:.0f} %", style=style)


def _cached(pair: Between) -> str:
    prompt = pair.grown(f"{W}prompt_tokens_total")
    cached = pair.grown(f"{W}cached_prompt_tokens_total")
    return f"{100 * cached / prompt:.0f} %" if prompt else "–"


def _sequences(pair: Between) -> str:
    mean = pair.mean(f"{W}step_sequences")
    return "–" if mean is None else f"{mean:.1f}"


# short enough for a terminal of 80 columns
GATEWAY_COLUMNS: tuple[tuple[str, Cell], ...] = (
    ("req/s", _rate(f"{G}http_requests_total")),
    ("held", _gauge(f"{G}running_requests")),
    ("ttft ms", _quantile(f"{G}time_to_first_token_seconds", 0.5)),
    ("p99", _quantile(f"{G}time_to_first_token_seconds", 0.99)),
    ("tok/s", _rate(f"{G}tokens_total", kind="completion")),
    ("err/s", _bad_rate(f"{G}errors_total")),
    ("retry/s", _bad_rate(f"{G}worker_retries_total")),
    ("shed/s", _bad_rate(f"{G}shed_requests_total")),
    ("MiB", _memory),
    ("workers", _workers),
)
WORKER_COLUMNS: tuple[tuple[str, Cell], ...] = (
    ("role", _role),
    ("run", _gauge(f"{W}running_requests")),
    ("wait", _gauge(f"{W}waiting_requests")),
    ("in/s", _rate(f"{W}prompt_tokens_total")),
    ("cached", _cached),
    ("out/s", _rate(f"{W}output_tokens_total")),
    ("step\nms", lambda pair: _ms(pair.mean(f"{W}step_seconds"))),
    ("seqs", _sequences),
    ("gap\np99", _quantile(f"{W}inter_token_seconds", 0.99)),
    ("pages", _pages),
    ("evict\n/s", _bad_rate(f"{W}preemptions_total")),
)


def _table(
    title: str, columns: Sequence[tuple[str, Cell]], programs: Sequence[Program]
) -> RenderableType:
    table = Table(expand=True, header_style="bold cyan", box=None, padding=(0, 1, 0, 0))
    table.add_column(title, no_wrap=True, style="bold")
    for name, _ in columns:
        is_text = name in ("workers", "role")
        table.add_column(
            name,
            justify="left" if is_text else "right",
            no_wrap=not is_text,
            # the longest word of a role
            min_width=len("prefill") if name == "role" else None,
        )
    troubles: list[RenderableType] = []
    for program in programs:
        if program.between is not None:
            cells = [cell(program.between) for _, cell in columns]
            table.add_row(program.address, *cells)
        else:
            style = "bold red" if program.trouble else "dim"
            trouble = program.trouble or "one more moment"
            troubles.append(Text(f" {program.address}  {trouble}", style=style))
    return Group(table, *troubles, "")


def _chart(title: str, values: Sequence[float], style: str) -> Text:
    top = max(values, default=0.0)
    scale = (len(BARS) - 1) / top if top else 0.0
    bars = "".join(BARS[round(value * scale)] for value in values)
    last = values[-1] if values else 0.0
    return Text.assemble(
        (f" {title:<18}", "bold"), (bars, style), f"  {last:,.0f} (top {top:,.0f})"
    )
