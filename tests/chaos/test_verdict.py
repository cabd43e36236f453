"""The figures of a chaos run: when service was as before, who is to blame for what, what grew."""

from __future__ import annotations

import json

import pytest

from tests.chaos.load import KINDS, End, Outcome
from tests.chaos.page import page, picture
from tests.chaos.verdict import Sample, Spell, figures, growth, late_after, recovery_s

CHAT = KINDS[0]
LIMITS = {CHAT.name: 1.0}


def asked(at_s: float, *, waits_s: float = 0.1, end: End = End.ANSWERED) -> Outcome:
    return Outcome(CHAT, 0, at_s, end=end, first_s=waits_s, took_s=waits_s)


def spell(*bad: Outcome, from_s: float = 100.0, a_second: int = 20) -> Spell:
    """Half a minute of good requests, and those bad ones."""
    good = [asked(from_s + number / a_second) for number in range(30 * a_second)]
    return Spell("worker killed", from_s, from_s + 30, [*good, *bad])


def test_who_was_never_disturbed_recovers_at_once() -> None:
    assert recovery_s([spell()], LIMITS) == 0.0


def test_one_in_a_hundred_is_what_a_99th_percentile_leaves_out() -> None:
    assert recovery_s([spell(asked(107.0, waits_s=9.0))], LIMITS) == 0.0


@pytest.mark.parametrize(
    "bad", [{"waits_s": 9.0}, {"end": End.REFUSED}, {"end": End.BROKEN}, {"end": End.SILENT}]
)
def test_recovery_is_when_the_last_window_of_bad_ones_is_over(bad: dict) -> None:
    late = [asked(107.0 + 0.01 * number, **bad) for number in range(5)]
    assert recovery_s([spell(*late)], LIMITS) == 7.5


def test_recovery_is_of_all_times_that_a_fault_came() -> None:
    late = [asked(207.0 + 0.01 * number, waits_s=9.0) for number in range(5)]
    calm = [spell(from_s=1000.0 * n) for n in range(1, 5)]
    assert recovery_s([*calm, spell(*late, from_s=200.0)], LIMITS) == 0.0
    assert recovery_s([*calm[:2], spell(*late, from_s=200.0)], LIMITS) == 7.5


def test_who_is_still_disturbed_when_the_next_fault_comes_has_not_recovered() -> None:
    late = [asked(100.0 + number, waits_s=2.0) for number in range(28)]
    assert recovery_s([spell(*late, a_second=2)], LIMITS) is None


def test_what_the_next_fault_breaks_is_not_this_one_s_doing() -> None:
    broken = [asked(129.0, waits_s=5.0, end=End.BROKEN) for _ in range(9)]
    assert recovery_s([spell(*broken)], LIMITS) == 0.0


def test_late_is_measured_against_the_calm() -> None:
    calm = Spell("none", 0, 30, [asked(1.0, waits_s=0.3), asked(2.0, waits_s=0.8)])
    assert late_after(calm) == {CHAT.name: 1.6}


def test_memory_grows_from_the_middle_to_the_end() -> None:
    samples = [Sample(float(n), {("worker0", 1): (100 + max(0, n - 50), 7)}) for n in range(101)]
    assert growth(samples) == {"worker0": pytest.approx(0.45, abs=0.05)}


def test_a_report_has_a_page_and_a_picture_from_its_first_minute_on() -> None:
    calm = Spell("none", 70.0, 100.0, [asked(70.0 + number) for number in range(30)])
    samples = [Sample(70.0, {("worker0", 1): (1, 1)}, 0.0), Sample(130.0, {("worker0", 1): (1, 1)})]
    told = figures([calm, spell()], samples, {}) | {
        "requests_per_s": 3.0,
        "held_when_quiet": None,
        "trouble": "",
        "load_average": [1.0, 1.0, 1.0],
        "machine": "a machine",
    }
    assert json.loads(json.dumps(told)) == told
    assert "| worker killed | 1 | 600 | 600 | 0 | 0 | 0 | 0 | 0.0 |" in page(told, "chaos")
    assert picture(told).count("<polyline") == 2
