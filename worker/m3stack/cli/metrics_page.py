"""Prometheus text pages read into numbers, and what two of them say about the time between."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

Labels = frozenset[tuple[str, str]]

_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """One scrape.

    Attributes:
        at_s: when, on the monotonic clock.
        samples: values by metric name and labels.
    """

    at_s: float
    samples: Mapping[str, Mapping[Labels, float]]

    def total(self, name: str, **labels: str) -> float:
        """The sum over all series that carry the labels; 0 if there are none."""
        wanted = set(labels.items())
        series = self.samples.get(name, {})
        return math.fsum(value for have, value in series.items() if wanted <= have)

    def buckets(self, name: str) -> dict[float, float]:
        """Cumulative counts by upper bound, summed over all labels but `le`."""
        sums: dict[float, float] = {}
        for labels, value in self.samples.get(f"{name}_bucket", {}).items():
            bound = float(dict(labels)["le"])
            sums[bound] = sums.get(bound, 0.0) + value
        return dict(sorted(sums.items()))


def parse(text: str, at_s: float) -> MetricsPage:
    """Reads a page.

    Raises:
        ValueError: a line is neither a comment nor a sample.
    """
    samples: dict[str, dict[Labels, float]] = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.match(line)
        if match is None:
            raise ValueError(f"not a line of a metrics page: {line[:80]!r}")
        name, labels, value = match.groups()
        pairs = frozenset((key, _unescape(text)) for key, text in _LABEL.findall(labels or ""))
        samples.setdefault(name, {})[pairs] = float(value)
    return MetricsPage(at_s, samples)


def _unescape(text: str) -> str:
    return re.sub(r"\\[\\\"n]", lambda match: _ESCAPES[match[0]], text)


@dataclass(frozen=True, slots=True)
class Between:
    """What happened from one scrape of a program to a later one of the same run."""

    before: MetricsPage
    after: MetricsPage

    @property
    def seconds(self) -> float:
        return max(self.after.at_s - self.before.at_s, 1e-9)

    def grown(self, name: str, **labels: str) -> float:
        """How much a counter grew; one that started anew grew by what it has."""
        before, after = self.before.total(name, **labels), self.after.total(name, **labels)
        return after - before if after >= before else after

    def rate(self, name: str, **labels: str) -> float:
        """Growth a second."""
        return self.grown(name, **labels) / self.seconds

    def mean(self, name: str) -> float | None:
        """The average of a histogram's new observations; None if there are none."""
        count = self.grown(f"{name}_count")
        return self.grown(f"{name}_sum") / count if count else None

    def quantile(self, name: str, share: float) -> float | None:
        """A quantile of a histogram's new observations, as `histogram_quantile` puts it.

        Within a bucket, observations are taken to be spread evenly; above the last bound, the
        answer is that bound. None if there are no observations.
        """
        after, before = self.after.buckets(name), self.before.buckets(name)
        if any(after.get(bound, 0.0) < count for bound, count in before.items()):
            before = {}
        counts = {bound: count - before.get(bound, 0.0) for bound, count in after.items()}
        whole = counts.get(math.inf, 0.0)
        if not whole:
            return None
        wanted = share * whole
        low, below = 0.0, 0.0
        for bound, count in counts.items():
            if count >= wanted:
                if math.isinf(bound):
                    return low
                inside = count - below
                return low + (bound - low) * ((wanted - below) / inside if inside else 0.0)
            low, below = bound, count
        return low
