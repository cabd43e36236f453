"""How many prompt tokens a step may hold beside requests that wait for their next token.

A prompt's tokens lengthen everyone's wait. How much, is learnt from steps as they end: a step with
n prompt tokens takes about `base + slope * n`, both taken from the latest such steps by medians, so
that one slow step changes little. Torch-free, and without a clock: durations are told.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

from m3stack.engine.plan import Row, StepPlan

WINDOW = 10
"""Steps that are looked back at."""
DITHER, DITHER_STEPS = 0.75, 4
"""One step in so many holds this share of the tokens, so that there is a slope to be seen."""


@dataclass(frozen=True, slots=True)
class PaceLimits:
    """What a step with prompts may do to those who wait for their next token.

    Attributes:
        slowdown: a step should take no more than this many times one without prompts.
        prompt_share: of a step's time that prompts get in any case, even if the step gets longer:
            where a step is short, the least that a prompt adds to it is many times that.
        min_tokens: prompt tokens of a step in any case.
    """

    slowdown: float
    prompt_share: float = 0.42
    min_tokens: int = 128

    def __post_init__(self) -> None:
        assert self.slowdown > 1
        assert 0 < self.prompt_share < 1
        assert self.min_tokens > 0


class Pace:
    """Learns from steps what prompt tokens cost; the scheduler owns it."""

    def __init__(self, limits: PaceLimits) -> None:
        self._limits = limits
        # durations of steps without prompts, by number of rows, those of a power of two together
        self._plain_s: dict[int, deque[float]] = {}
        self._mixed: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._slope: float | None = None
        self._num_asked = 0

    def saw(self, plan: StepPlan, seconds: float) -> None:
        """A step has ended; `seconds` is what it took, or kept the next one waiting."""
        if plan.encodes or plan.copies or not plan.rows or seconds <= 0:
            return
        prompt_tokens = sum(len(row.token_ids) for row in plan.rows if is_prompt(row))
        num_decoding = sum(not is_prompt(row) for row in plan.rows)
        if not num_decoding:
            return
        if prompt_tokens:
            self._mixed.append((prompt_tokens, seconds))
            return
        times = self._plain_s.setdefault(num_decoding.bit_length(), deque(maxlen=WINDOW))
        times.append(seconds)

    def prompt_tokens(self, num_decoding: int) -> int | None:
        """Most prompt tokens of the next step; None while too little is known for a bound."""
        plain_s = self._plain(num_decoding)
        if plain_s is None or not self._mixed:
            return None
        slope = self._fit(plain_s)
        base_s = max(plain_s, median(seconds - slope * count for count, seconds in self._mixed))
        limits = self._limits
        within = (limits.slowdown * plain_s - base_s) / slope
        share = limits.prompt_share
        fair = share / (1 - share) * base_s / slope
        tokens = max(within, fair)
        self._num_asked += 1
        if self._num_asked % DITHER_STEPS == 0:
            tokens *= DITHER
        return max(limits.min_tokens, int(tokens))

    def _plain(self, num_decoding: int) -> float | None:
        """Duration of a step of about so many rows and no prompt."""
        if not self._plain_s:
            return None
        size = num_decoding.bit_length()
        nearest = min(self._plain_s, key=lambda known: (abs(known - size), known))
        return median(self._plain_s[nearest])

    def _fit(self, plain_s: float) -> float:
        """Seconds a token: the middle one of the slopes between pairs of steps."""
        slopes = [
            (later[1] - earlier[1]) / (later[0] - earlier[0])
            for place, later in enumerate(self._mixed)
            for earlier in list(self._mixed)[:place]
            if abs(later[0] - earlier[0]) > 0.05 * max(later[0], earlier[0])
        ]
        # all that a step took beyond a plain one, a token: what it can be at most
        most = max(1e-9, median((t - plain_s) / n for n, t in self._mixed))
        if len(slopes) >= 3:
            self._slope = median(slopes)
        slope = most if self._slope is None else self._slope
        return min(most, max(slope, most / 10))


def is_prompt(row: Row) -> bool:
    """Whether a row computes what was known before: a prompt, or tokens lost to a preemption."""
    return len(row.token_ids) > 1 or not row.output_index
