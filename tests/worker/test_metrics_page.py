"""Metrics pages are read as Prometheus reads them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from m3stack.cli.metrics_page import Between, MetricsPage, parse


def histogram_page(observed: list[float], at_s: float) -> MetricsPage:
    registry = CollectorRegistry()
    histogram = Histogram("wait_seconds", "Wait.", buckets=(1, 2, 4), registry=registry)
    for value in observed:
        histogram.observe(value)
    return parse(generate_latest(registry).decode(), at_s)


def test_labels_with_quotes_commas_and_braces_come_back_as_they_were() -> None:
    registry = CollectorRegistry()
    gauge = Gauge("shelf", "Books.", ["title"], registry=registry)
    titles = ['a "quoted" one', "comma, brace }", "back\\slash", "two\nlines", ""]
    for number, title in enumerate(titles):
        gauge.labels(title).set(number + 1)
    page = parse(generate_latest(registry).decode(), 0)
    assert [page.total("shelf", title=title) for title in titles] == [1, 2, 3, 4, 5]
    assert page.total("shelf") == 15
    assert page.total("no_such_thing") == 0


@pytest.mark.parametrize("text", ["<html>", "m{", "1x 3", "name notanumber"])
def test_what_is_no_page_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"metrics page|float"):
        parse(text, 0)


def test_a_counter_that_started_anew_grew_by_what_it_has() -> None:
    def page(value: float, at_s: float) -> MetricsPage:
        registry = CollectorRegistry()
        Counter("done", "Done.", registry=registry).inc(value)
        return parse(generate_latest(registry).decode(), at_s)

    assert Between(page(10, 0), page(16, 2)).rate("done_total") == 3
    assert Between(page(10, 0), page(4, 2)).rate("done_total") == 2


def test_a_quantile_is_of_the_new_observations_alone() -> None:
    before = [0.5] * 100
    pair = Between(histogram_page(before, 0), histogram_page([*before, 3.0, 3.0], 1))
    # both lie between 2 and 4: half of them below the middle
    assert pair.quantile("wait_seconds", 0.5) == pytest.approx(3.0)
    assert pair.mean("wait_seconds") == pytest.approx(3.0)


def test_without_new_observations_there_is_no_quantile_and_no_mean() -> None:
    pair = Between(histogram_page([1.0], 0), histogram_page([1.0], 1))
    assert pair.quantile("wait_seconds", 0.5) is None
    assert pair.mean("wait_seconds") is None


@given(
    st.lists(st.floats(0.001, 3.999), min_size=1, max_size=40),
    st.sampled_from((0.01, 0.5, 0.95, 1.0)),
)
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values: list[float], share: float) -> None:
    pair = Between(histogram_page([], 0), histogram_page(values, 1))
    true = sorted(values)[math.ceil(share * len(values)) - 1]
    low, high = next((a, b) for a, b in ((0, 1), (1, 2), (2, 4)) if true <= b)
    found = pair.quantile("wait_seconds", share)
    assert found is not None
    assert low <= found <= high


def test_beyond_the_last_bound_the_answer_is_that_bound() -> None:
    pair = Between(histogram_page([], 0), histogram_page([100.0], 1))
    assert pair.quantile("wait_seconds", 0.99) == 4
