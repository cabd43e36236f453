"""How many prompt tokens a step may hold beside requests that wait for their next token.

A prompt's tokens lengthen everyone's wait. How much, is learnt from steps as they end: a step with
n prompt tokens takes about what one without takes, and `fixed + slope * n` more, both taken from
the latest such steps by medians, so that one slow step changes little. Behind a long prefix tokens
cost more: prefixes of about one length are learnt from together. Nothing is taken for granted that
was not seen: the first steps are small, and none holds many times the tokens of any before.
Torch-free, and without a clock: durations are told.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from m3stack.engine.plan import Row, StepPlan

WINDOW = 10
"""Steps that are looked back at."""
PREFIX_TOKENS = 131_072
"""Prefixes up to that length are alike, behind it those of every doubling."""
PROBE, PROBE_STEPS, FIRST_PROBE_STEPS = 0.6, 24, 3
"""One step in so many holds this share of the tokens, so that there is a slope to be seen; the
last is for as long as none was."""
PROBE_UP = 1.5
"""Or that many times the floor, where steps are at it and no slope is known."""
APART = 0.8
"""Steps of less than that share of the usual tokens say what the slope is."""
MOST_GROWTH = 2
"""A step holds no more than so many times the tokens of the largest one that was seen."""


@dataclass(frozen=True, slots=True)
class PaceLimits:
    """What a step with prompts may do to those who wait for their next token.

    Attributes:
        slowdown: a step should take no more than this many times one without prompts.
        prompt_share: of a step's time that prompts get in any case, even if the step gets longer:
            where a step is short, the least that a prompt adds to it is many times that.
        worth: in multiples of what a prompt adds to a step by being there at all, the time that its
            tokens get in any case: the first of them brings all experts' weights to a small batch.
        min_tokens: prompt tokens of a step in any case.
    """

    slowdown: float
    prompt_share: float = 0.36
    worth: float = 2.0
    min_tokens: int = 128

    def __post_init__(self) -> None:
        assert self.slowdown > 1
        assert 0 < self.prompt_share < 1
        assert self.min_tokens > 0


@dataclass(frozen=True, slots=True)
class _Mixed:
    """A step with prompts that has ended."""

    prompt_tokens: int
    num_decoding: int
    seconds: float


@dataclass(slots=True)
class _Seen:
    """Steps behind prefixes of about one length.

    Attributes:
        usual: the latest ones.
        apart: the latest ones of far fewer tokens; they are rare, and kept longer for it.
        slope: seconds a token, of the last fit that could tell.
        apart_in_a_row: steps of far fewer tokens since the last usual one.
    """

    usual: deque[_Mixed] = field(default_factory=deque[_Mixed])
    apart: deque[_Mixed] = field(default_factory=lambda: deque[_Mixed](maxlen=WINDOW // 2))
    slope: float | None = None
    apart_in_a_row: int = 0

    def add(self, step: _Mixed) -> None:
        is_apart = self.usual and step.prompt_tokens < APART * self._usual_tokens()
        if is_apart and len(self.apart) < len(self.usual):
            self.apart.append(step)
            self.apart_in_a_row += 1
            if self.apart_in_a_row == WINDOW // 2:
                # no longer rare: this is what steps are now
                self.usual.extend(self.apart)
                self.apart.clear()
                self.apart_in_a_row = 0
                while len(self.usual) > WINDOW:
                    self.usual.popleft()
            return
        self.apart_in_a_row = 0
        self.usual.append(step)
        if len(self.usual) > WINDOW:
            oldest = self.usual.popleft()
            if oldest.prompt_tokens < APART * self._usual_tokens():
                self.apart.append(oldest)

    @property
    def most_tokens(self) -> int:
        """Of any of them."""
        return max(step.prompt_tokens for step in (*self.usual, *self.apart))

    def _usual_tokens(self) -> float:
        return median(step.prompt_tokens for step in self.usual)


@dataclass(frozen=True, slots=True)
class _Cost:
    """What prompts add to a step: `fixed_s`, and `slope_s` for every token."""

    fixed_s: float
    slope_s: float


class Pace:
    """Learns from steps what prompt tokens cost; the scheduler owns it."""

    def __init__(self, limits: PaceLimits) -> None:
        self._limits = limits
        # durations of steps without prompts, by number of rows, those of a power of two together
        self._plain_s: dict[int, deque[float]] = {}
        # by length of prefix
        self._seen: dict[int, _Seen] = {}
        self._num_asked = 0

    def saw(self, plan: StepPlan, seconds: float) -> None:
        """A step has ended; `seconds` is what it took, or kept the next one waiting."""
        if plan.encodes or plan.copies or not plan.rows or seconds <= 0:
            return
        prompts = [row for row in plan.rows if is_prompt(row)]
        num_decoding = len(plan.rows) - len(prompts)
        if not num_decoding:
            return
        if not prompts:
            times = self._plain_s.setdefault(num_decoding.bit_length(), deque(maxlen=WINDOW))
            times.append(seconds)
            return
        # the longest row is the one that the step was planned for
        prefix_tokens = max(prompts, key=lambda row: len(row.token_ids)).start
        tokens = sum(len(row.token_ids) for row in prompts)
        seen = self._seen.setdefault(_length(prefix_tokens), _Seen())
        seen.add(_Mixed(tokens, num_decoding, seconds))

    def prompt_tokens(self, num_decoding: int, *, prefix_tokens: int = 0) -> int | None:
        """Most prompt tokens of the next step; None before any step without prompts was seen.

        Args:
            num_decoding: rows that wait for their next token.
            prefix_tokens: computed tokens of the prompt that goes first.
        """
        plain_s = self._plain(num_decoding)
        if plain_s is None:
            return None
        limits, length = self._limits, _length(prefix_tokens)
        if not self._seen:
            return limits.min_tokens
        nearest = min(self._seen, key=lambda known: (abs(known - length), -known))
        seen = self._seen[nearest]
        cost = self._fit(seen)
        base_s = plain_s + cost.fixed_s
        within = (limits.slowdown * plain_s - base_s) / cost.slope_s
        share = limits.prompt_share
        fair = share / (1 - share) * base_s / cost.slope_s
        worth = limits.worth * cost.fixed_s / cost.slope_s
        tokens = min(max(within, fair, worth), MOST_GROWTH * seen.most_tokens)
        # a prefix twice as long makes tokens twice as dear at most; behind a shorter one a prompt
        # that is there at all may cost less, and then its tokens are worth less
        tokens /= 2 ** abs(length - nearest)
        self._num_asked += 1
        if self._num_asked % (PROBE_STEPS if seen.slope else FIRST_PROBE_STEPS) == 0:
            # at the floor there is but one way to go
            is_least = seen.slope is None and tokens <= limits.min_tokens
            tokens = limits.min_tokens * PROBE_UP if is_least else tokens * PROBE
        return max(limits.min_tokens, int(tokens))

    def _plain(self, num_decoding: int) -> float | None:
        """Duration of a step of about so many rows and no prompt."""
        if not self._plain_s:
            return None
        size = num_decoding.bit_length()
        nearest = min(self._plain_s, key=lambda known: (abs(known - size), known))
        return median(self._plain_s[nearest])

    def _fit(self, seen: _Seen) -> _Cost:
        """The slope: the middle one of those between pairs of steps; what is left is fixed."""
        usual = [(step.prompt_tokens, self._added(step)) for step in seen.usual]
        points = [*usual, *((step.prompt_tokens, self._added(step)) for step in seen.apart)]
        slopes = [
            (later[1] - earlier[1]) / (later[0] - earlier[0])
            for place, later in enumerate(points)
            for earlier in points[:place]
            if abs(later[0] - earlier[0]) > (1 - APART) * max(later[0], earlier[0])
        ]
        # all that a step took beyond a plain one, a token: what it can be at most
        most = max(1e-9, median(added_s / tokens for tokens, added_s in usual))
        if len(slopes) >= 3:
            seen.slope = median(slopes)
        slope = most if seen.slope is None else seen.slope
        slope = min(most, max(slope, most / 10))
        return _Cost(max(0.0, median(added_s - slope * n for n, added_s in usual)), slope)

    def _added(self, step: _Mixed) -> float:
        """What a step took beyond one without prompts."""
        return step.seconds - (self._plain(step.num_decoding) or 0.0)


def _length(prefix_tokens: int) -> int:
    """Equal for prefixes of about one length."""
    return (prefix_tokens // PREFIX_TOKENS).bit_length()


def is_prompt(row: Row) -> bool:
    """Whether a row computes what was known before: a prompt, or tokens lost to a preemption."""
    return len(row.token_ids) > 1 or not row.output_index
