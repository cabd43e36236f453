"""What became of requests under faults, as figures. Pure: no clock, no fleet."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tests.chaos.load import ONCE, End, Kind, Outcome

CALM = "none"
# a request is late if it waits this much longer than 99 of 100 did in the calm
LATE_FACTOR, LATE_EXTRA_S = 2.0, 0.5
# a window of requests is good if at most this share of them failed or was late
BAD_SHARE = 0.01
WINDOW_S, STEP_S = 5.0, 0.5
# memory at either end of a stretch is the median of so many samples
ENDS = 5


@dataclass(slots=True)
class Spell:
    """A stretch of time under one fault, until the next one begins."""

    fault: str
    from_s: float
    to_s: float = math.inf
    outcomes: list[Outcome] = field(default_factory=list)


@dataclass(slots=True)
class Sample:
    """What processes held at one time.

    Attributes:
        held: resident bytes and descriptors, by name and number of the start.
        cpu_s: processor time so far of all that runs, of the fleet and of the clients.
    """

    at_s: float
    held: dict[tuple[str, int], tuple[int, int]]
    cpu_s: float = 0.0


Truth = dict[tuple[str, int], str]
Limits = dict[str, float]


def sort_into(spells: Sequence[Spell], outcomes: Sequence[Outcome]) -> None:
    """Gives each spell the requests that were begun in it."""
    for spell in spells:
        spell.outcomes = [o for o in outcomes if spell.from_s <= o.started_s < spell.to_s]


def figures(spells: Sequence[Spell], samples: Sequence[Sample], truth: Truth) -> dict[str, Any]:
    """All figures, one row a fault and one for all; the first spell is the calm."""
    calm, end_s = spells[0], samples[-1].at_s
    limits = late_after(calm)
    names = list(dict.fromkeys(spell.fault for spell in spells))
    rows = [_row(name, [s for s in spells if s.fault == name], limits, truth) for name in names]
    whole = _row("all", spells, limits, truth)
    for figure in ("recovery_s", "last_bad_s", "failing_s"):
        del whole[figure]
    return {
        "rows": rows,
        "all": whole,
        "late_after_s": limits,
        "seconds": round(end_s - calm.from_s, 1),
        "calm_cpu_cores": _cores_used(samples, calm),
        "resident_growth": growth(samples),
        "descriptor_growth": _descriptors(samples),
        "timeline": timeline(spells, end_s, limits),
        "marks": [{"at_s": round(s.from_s - calm.from_s, 1), "fault": s.fault} for s in spells],
    }


def _row(name: str, spells: Sequence[Spell], limits: Limits, truth: Truth) -> dict[str, Any]:
    outcomes = [outcome for spell in spells for outcome in spell.outcomes]
    ends = Counter(outcome.end for outcome in outcomes)
    bad = [_bad_after_s(spell, limits) for spell in spells]
    failing = [o.started_s - s.from_s for s in spells for o in s.outcomes if _failed_in(o, s)]
    return {
        "fault": name,
        "times": len(spells),
        "requests": len(outcomes),
        "ended_once": sum(count for end, count in ends.items() if end in ONCE),
        "cut_silently": ends[End.CUT_SILENTLY],
        "recovery_s": recovery_s(spells, limits),
        "last_bad_s": round(max((at for one in bad for at in one), default=0.0), 2),
        "failing_s": round(max(failing, default=0.0), 2),
        "bad": sum(map(len, bad)),
        "wrong_text": sum(not agrees(o, truth) for o in outcomes),
        "ends": {str(end): count for end, count in sorted(ends.items())},
        "details": dict(Counter(o.detail[:160] for o in outcomes if o.detail).most_common(6)),
    }


def late_after(calm: Spell) -> Limits:
    """By kind, the wait from which on a request is late."""
    return {kind.name: _limit(calm, kind) for kind in {o.kind for o in calm.outcomes}}


def _limit(calm: Spell, kind: Kind) -> float:
    waits = sorted(o.first_s for o in calm.outcomes if o.kind is kind and o.first_s is not None)
    p99 = waits[min(len(waits) - 1, int(len(waits) * 0.99))] if waits else LATE_EXTRA_S
    return round(max(p99 * LATE_FACTOR, p99 + LATE_EXTRA_S), 3)


def recovery_s(spells: Sequence[Spell], limits: Limits) -> float | None:
    """Seconds from a fault's begin until service is as it was, whether the fault lasts or not.

    From then on, in every window of `WINDOW_S` over the requests of all times that the fault came,
    at least 99 of 100 were answered and not late: the 99th percentile is within its limit.

    Returns:
        None if that was not so before the next fault came.
    """
    begun = sorted(
        (outcome.started_s - spell.from_s, _is_bad(outcome, spell, limits))
        for spell in spells
        for outcome in spell.outcomes
    )
    # beyond the shortest spell fewer of them would be seen
    end_s = min(spell.to_s - spell.from_s for spell in spells)
    last = begun[-1][0] if begun else 0.0
    starts = [step * STEP_S for step in range(int((min(end_s, last) - WINDOW_S) / STEP_S) + 1)]
    recovered: float | None = None
    for start in reversed(starts):
        window = [is_bad for at, is_bad in begun if start <= at < start + WINDOW_S]
        if sum(window) > BAD_SHARE * len(window):
            break
        recovered = start
    return recovered


def _bad_after_s(spell: Spell, limits: Limits) -> list[float]:
    return [o.started_s - spell.from_s for o in spell.outcomes if _is_bad(o, spell, limits)]


def _failed_in(outcome: Outcome, spell: Spell) -> bool:
    """One that is still under way when the next fault comes is that one's to explain."""
    has_failed = outcome.end not in (End.ANSWERED, End.LEFT)
    return has_failed and outcome.started_s + outcome.took_s < spell.to_s


def _is_bad(outcome: Outcome, spell: Spell, limits: Limits) -> bool:
    if _failed_in(outcome, spell):
        return True
    waited = outcome.first_s if outcome.first_s is not None else outcome.took_s
    is_late = waited > limits.get(outcome.kind.name, LATE_EXTRA_S)
    return is_late and outcome.started_s + waited < spell.to_s


def agrees(outcome: Outcome, truth: Truth) -> bool:
    """Whether an answer is the true one, or a part that ended early is its beginning."""
    # those who leave ask what those who stay for long ask
    name = "long stream" if outcome.kind.leaves_after else outcome.kind.name
    whole = truth.get((name, outcome.prompt))
    if whole is None:
        return True
    return outcome.text == whole if outcome.end is End.ANSWERED else whole.startswith(outcome.text)


def timeline(spells: Sequence[Spell], end_s: float, limits: Limits) -> list[dict[str, Any]]:
    """Window after window: requests begun, bad ones, and the longest waits for a first token."""
    begin = spells[0].from_s
    windows: list[dict[str, Any]] = []
    everything = [(o, spell) for spell in spells for o in spell.outcomes]
    edges = [begin + WINDOW_S * n for n in range(int((end_s - begin) / WINDOW_S) + 2)]
    for start, end in pairwise(edges):
        here = [(o, spell) for o, spell in everything if start <= o.started_s < end]
        waits = sorted(o.first_s for o, _ in here if o.first_s is not None)
        if not here:
            continue
        windows.append(
            {
                "at_s": round(start - begin, 1),
                "requests": len(here),
                "bad": sum(_is_bad(o, spell, limits) for o, spell in here),
                "median_s": round(waits[len(waits) // 2], 3) if waits else None,
                "longest_s": round(waits[-1], 3) if waits else None,
            }
        )
    return windows


def growth(samples: Sequence[Sample]) -> dict[str, float]:
    """Growth of resident memory over the second half, of processes that lived through it."""
    middle = (samples[0].at_s + samples[-1].at_s) / 2
    half = [sample for sample in samples if sample.at_s >= middle]
    grown = {}
    for key in half[0].held.keys() & half[-1].held.keys():
        series = [sample.held[key][0] for sample in half]
        first, last = _median(series[:ENDS]), _median(series[-ENDS:])
        grown[key[0]] = round(last / first - 1, 4)
    return dict(sorted(grown.items()))


def _descriptors(samples: Sequence[Sample]) -> dict[str, int]:
    """Descriptors more than in the calm, of processes that lived through it all."""
    first, last = samples[min(2, len(samples) - 1)].held, samples[-1].held
    return {key[0]: last[key][1] - first[key][1] for key in sorted(first.keys() & last.keys())}


def _cores_used(samples: Sequence[Sample], calm: Spell) -> float:
    """Processors that fleet and clients kept busy in the calm."""
    here = [sample for sample in samples if calm.from_s <= sample.at_s < calm.to_s]
    if len(here) < 2:
        return 0.0
    return round((here[-1].cpu_s - here[0].cpu_s) / (here[-1].at_s - here[0].at_s), 2)


def _median(values: Sequence[int]) -> int:
    return sorted(values)[len(values) // 2]
