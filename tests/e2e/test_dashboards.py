"""Every metric that dashboard, alerts and autoscaler ask for is one the running programs tell."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import helm_python as helm
import httpx
import promql_parser as promql
import pytest
import yaml

from tests.e2e.conftest import MODEL_NAME, Server

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "m3stack"
# what Grafana puts in place of its own variables
GRAFANA = {"$__rate_interval": "1m", "$namespace": ".*", "$gateway": ".*", "$worker": ".*"}
# labels that come from the scrape and not from the program
SCRAPED = {"namespace", "pod", "service", "job", "instance"}


@dataclass(frozen=True, slots=True)
class Query:
    """One expression and where it stands."""

    place: str
    text: str


Told = dict[str, dict[str, set[str]]]
"""The metrics of a page, each with its labels and their values."""


def queries() -> Iterator[Query]:
    board = json.loads((CHART / "files" / "dashboard.json").read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            yield Query(panel["title"], plain(target["expr"]))
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            (selector,) = re.findall(r"label_values\((.*), \w+\)", variable["definition"])
            yield Query(f"variable {variable['name']}", plain(selector))
    alerts = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
    for group in alerts["groups"]:
        for rule in group["rules"]:
            yield Query(rule["alert"], rule["expr"])
    for example in ("autoscaled", "divided-autoscaled"):
        values = helm.values_from_yaml((CHART / "examples" / f"{example}.yaml").read_text())
        with helm.Chart.load(CHART) as chart:
            files = chart.render(values, name="demo", namespace="serving")
        for name, text in files.items():
            for item in yaml.safe_load_all(text) if "/worker/" in name else ():
                for trigger in item["spec"].get("triggers", []) if "spec" in item else ():
                    place = f"{example} {item['metadata']['name']}"
                    yield Query(place, trigger["metadata"]["query"])


def plain(expression: str) -> str:
    for variable, value in GRAFANA.items():
        expression = expression.replace(variable, value)
    return expression


def nodes(expression: promql.Expr) -> list[promql.Expr]:
    """The expression and all below it."""
    found: list[promql.Expr] = []
    promql.walk(expression, lambda node: found.append(node))
    return found


def selectors(expression: promql.Expr) -> list[promql.VectorSelector]:
    return [node for node in nodes(expression) if isinstance(node, promql.VectorSelector)]


def told(page: str) -> Told:
    metrics: Told = {}
    for line in page.splitlines():
        if line and not line.startswith("#"):
            match = re.match(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ", line)
            assert match, line
            labels = metrics.setdefault(match[1], {})
            for name, value in re.findall(r'(\w+)="([^"]*)"', match[2] or ""):
                labels.setdefault(name, set()).add(value)
    return metrics


@pytest.fixture(scope="module")
def metrics(gateway: Server, worker: Server) -> Told:
    """Metrics of both programs after one request."""
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
    }
    httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60).raise_for_status()
    page = httpx.get(f"{gateway.url}/metrics", timeout=60).text
    page += httpx.get(f"http://{worker.metrics_address}/metrics", timeout=60).text
    return told(page)


def complaints(query: Query, metrics: Told) -> list[str]:
    """What a query asks for that nobody tells; PromQL's own parser raises if it is none."""
    expression = promql.parse(query.text)
    found: list[str] = []
    for selector in selectors(expression):
        if selector.name not in metrics:
            found.append(f"no metric {selector.name}")
            continue
        labels = metrics[selector.name]
        for matcher in selector.matchers.matchers:
            if matcher.name in SCRAPED:
                continue
            # a value that is told from the start: a rate does not see how a series begins
            known = labels.get(matcher.name, set())
            # a worker tells no role but its own
            wanted = [] if matcher.name == "role" and known else matcher.value.split("|")
            found += [f"{matcher.name}={value}" for value in wanted if value not in known]
    for node in nodes(expression):
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            below = set[str]().union(*(metrics.get(one.name, {}) for one in selectors(node)))
            found += sorted(set(node.modifier.labels) - below - SCRAPED)
    return found


def test_each_query_asks_for_metrics_and_labels_that_exist(metrics: Told) -> None:
    asked = tuple(queries())
    found = {query.place: complaints(query, metrics) for query in asked}
    assert len(asked) > 40
    assert {place: told for place, told in found.items() if told} == {}


@pytest.mark.parametrize(
    "text",
    [
        "rate(m3stack_gateway_imagined_total[5m])",
        'rate(m3stack_gateway_errors_total{colour="red"}[5m])',
        'rate(m3stack_gateway_errors_total{kind=~"overloaded|overfull"}[5m])',
        "sum by (colour) (m3stack_worker_running_requests)",
    ],
)
def test_what_nobody_tells_is_found(metrics: Told, text: str) -> None:
    assert len(complaints(Query("", text), metrics)) == 1
