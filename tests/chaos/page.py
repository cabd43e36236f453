"""A run's report as a page and as a picture."""

from __future__ import annotations

import math
from typing import Any

from tests.chaos.verdict import BAD_SHARE, CALM, WINDOW_S

WIDTH, HEIGHT, LEFT, TOP = 900, 260, 56, 44
FLOOR_S, CEILING_S = 0.01, 60.0
_COLOURS = ("#0969da", "#cf222e", "#1a7f37", "#8250df", "#bf8700", "#57606a", "#0a7ea4", "#bc4c00")

_HEAD = """# A fleet under faults

`make chaos` puts three workers and two gateways on hosts of their own (network namespaces on one
bridge) with the tiny model on CPUs. Requests come by chance at a steady rate, whether those before
them were served or not: chat and Messages, streamed and whole, pictures, long streams, clients that
leave. Meanwhile each fault comes in turn, again and again
([0072](../decisions/0072-chaos-on-hosts-of-its-own.md),
[0096](../decisions/0096-recovery-of-a-fleet.md)).
"""

_TABLE = """
| fault | times | requests | ended once | cut silently | wrong text | bad | recovery | last bad |
|---|---|---|---|---|---|---|---|---|
"""


def page(told: dict[str, Any], name: str) -> str:
    """The report in words, as Markdown; `name` is that of its files."""
    rows = "".join(_line(row) for row in told["rows"])
    whole = told["all"]
    ends = ", ".join(f"{count} {end.replace('_', ' ')}" for end, count in whole["ends"].items())
    held = told["held_when_quiet"]
    left = "not yet known" if held is None else _list(held) or "nothing"
    grown = _list({n: f"{value:+.1%}" for n, value in told["resident_growth"].items()})
    more = _list({n: f"{value:+d}" for n, value in told["descriptor_growth"].items()})
    kinds = _list({n: f"{value:g} s" for n, value in sorted(told["late_after_s"].items())})
    trouble = f"\n**The run ended early**: {told['trouble']}\n" if told["trouble"] else ""
    return f"""{_HEAD}
{told["seconds"]:.0f} s on {told["machine"]}; {told["requests_per_s"]:g} requests a second, which
kept {told["calm_cpu_cores"]:g} cores busy in the calm (fleet and clients); load average at the end
{told["load_average"][0]:g}. Gateways are of a development build; times are in seconds.
{trouble}
![First tokens over time]({name}.svg)
{_TABLE}{rows}| all | | {whole["requests"]} | {whole["ended_once"]} | {whole["cut_silently"]} | \
{whole["wrong_text"]} | {whole["bad"]} | | |

- **Ends**: {ends}. *Refused* is an HTTP error with the API's own body; *error event* a stream
  whose last word says what went wrong; *broken* a connection that broke visibly (its gateway was
  killed or restarted); *left* a client that went on purpose.
- **Bad** is a request that failed, or that waited for its first token (or whole reply) longer than
  twice the calm's 99th percentile of its kind and half a second more than it: {kinds}. One under
  way when the next fault comes is that one's to explain.
- **Recovery** is from the begin of a fault, which may well last, to the first time from which in
  every {WINDOW_S:g} s at most {BAD_SHARE:.0%} of the requests begun, of all times that it came,
  were bad; *never* if that was not so before the next fault. **Last bad** is the latest single one.
- **Wrong text**: an answer that is not the one given before the faults, or a part that is not its
  beginning (a token lost, wrong or given twice).
- **Held when nobody asks any more** (requests, waiting prompt tokens, cache pages, FFmpeg
  processes): {left}.
- **Resident memory over the second half**, of the gateway and worker that are never killed:
  {grown}. **Descriptors**: {more}.
- Programs run at a low priority until they are ready: on hosts of their own their start would
  take no processor time from the others. The machine's own clock is never touched: a preloaded
  library moves each program's.

[{name}.json]({name}.json) holds every figure.
"""


def _line(row: dict[str, Any]) -> str:
    name = "(calm)" if row["fault"] == CALM else row["fault"]
    recovery = "never" if row["recovery_s"] is None else f"{row['recovery_s']:g}"
    cells = (name, row["times"], row["requests"], row["ended_once"], row["cut_silently"])
    cells += (row["wrong_text"], row["bad"], recovery, row["last_bad_s"])
    return "| " + " | ".join(str(cell) for cell in cells) + " |\n"


def _list(named: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in named.items())


def picture(told: dict[str, Any]) -> str:
    """Median and longest wait for a first token in each window, faults marked, as an SVG."""
    windows, marks = told["timeline"], told["marks"]
    last_s = max(told["seconds"], WINDOW_S)
    names = list(dict.fromkeys(mark["fault"] for mark in marks if mark["fault"] != CALM))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + LEFT + 20}" '
        f'height="{HEIGHT + TOP + 40}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    ends = [mark["at_s"] for mark in marks[1:]] + [last_s]
    for mark, end_s in zip(marks, ends, strict=True):
        if mark["fault"] != CALM:
            colour = _COLOURS[names.index(mark["fault"]) % len(_COLOURS)]
            x, width = _x(mark["at_s"], last_s), _x(end_s, last_s) - _x(mark["at_s"], last_s)
            parts.append(
                f'<rect x="{x:.1f}" y="{TOP}" width="{max(width, 0):.1f}" height="{HEIGHT}" '
                f'fill="{colour}" opacity="0.12"/>'
            )
    for index, name in enumerate(names):
        x, y = LEFT + 230 * (index % 4), 14 + 14 * (index // 4)
        parts.append(
            f'<text x="{x}" y="{y}" fill="{_COLOURS[index % len(_COLOURS)]}">{name}</text>'
        )
    value = FLOOR_S
    while value <= CEILING_S:
        parts.append(f'<path d="M{LEFT} {_y(value):.1f}h{WIDTH}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{_y(value) + 4:.1f}" text-anchor="end">{value:g} s</text>'
        )
        value *= 10
    for key, colour in (("longest_s", "#57606a"), ("median_s", "#24292f")):
        points = " ".join(
            f"{_x(w['at_s'], last_s):.1f},{_y(w[key]):.1f}" for w in windows if w[key] is not None
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
    foot = TOP + HEIGHT + 16
    parts.append(f'<text x="{LEFT}" y="{foot}">0</text>')
    parts.append(
        f'<text x="{LEFT + WIDTH}" y="{foot}" text-anchor="end">{last_s:.0f} s; wait for a first '
        f"token in windows of {WINDOW_S:g} s: median (black), longest (grey)</text>"
    )
    return "\n".join([*parts, "</svg>\n"])


def _x(at_s: float, last_s: float) -> float:
    return LEFT + WIDTH * at_s / last_s


def _y(wait_s: float) -> float:
    shown_s = min(max(wait_s, FLOOR_S), CEILING_S)
    share = math.log(shown_s / FLOOR_S) / math.log(CEILING_S / FLOOR_S)
    return TOP + HEIGHT * (1 - share)
