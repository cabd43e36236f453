"""Writes the Grafana dashboard of the Helm chart, or with --check says whether it is current.

The panels stand in `PANELS`, one line a query; everything Grafana wants around them is made here.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "deploy/helm/m3stack/files/dashboard.json"
UID = "m3stack-overview"
WIDTH, HEIGHT = 8, 7
COLUMNS = 24
GATEWAY = 'namespace=~"$namespace",pod=~"$gateway"'
WORKER = 'namespace=~"$namespace",pod=~"$worker"'
RATE = "[$__rate_interval]"


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart.

    Attributes:
        title: above it, with the unit where Grafana has none.
        unit: Grafana's name of the unit.
        queries: (legend, PromQL).
    """

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]


def quantiles(metric: str, part: str, by: str = "") -> tuple[tuple[str, str], ...]:
    """Median and tails of a histogram, by one label if it is given."""
    group = f"le, {by}" if by else "le"
    legend = f"{{{{{by}}}}} " if by else ""
    return tuple(
        (
            f"{legend}p{percent}",
            f"histogram_quantile({percent / 100:g}, sum by ({group})"
            f" (rate({metric}_bucket{{{part}}}{RATE})))",
        )
        for percent in ((50, 95, 99) if not by else (95,))
    )


def rate(metric: str, part: str, by: str) -> tuple[tuple[str, str], ...]:
    """Events a second, by one label."""
    return ((f"{{{{{by}}}}}", f"sum by ({by}) (rate({metric}{{{part}}}{RATE}))"),)


def gauge(metric: str, part: str, by: str = "pod") -> tuple[tuple[str, str], ...]:
    """A value that goes up and down, by one label."""
    return ((f"{{{{{by}}}}}", f"sum by ({by}) ({metric}{{{part}}})"),)


def share(legend: str, part_metric: str, whole_metric: str, part: str) -> tuple[str, str]:
    """What part of one counter's growth another one is."""
    top = f"sum(rate({part_metric}{{{part}}}{RATE}))"
    return legend, f"{top} / sum(rate({whole_metric}{{{part}}}{RATE}))"


G, W = "m3stack_gateway_", "m3stack_worker_"
PANELS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "What clients see",
        (
            Panel("Replies by status", "reqps", rate(f"{G}http_requests_total", GATEWAY, "code")),
            Panel(
                "Time to first token", "s", quantiles(f"{G}time_to_first_token_seconds", GATEWAY)
            ),
            Panel("Time per token", "s", quantiles(f"{G}time_per_output_token_seconds", GATEWAY)),
            Panel("Tokens", "short", rate(f"{G}tokens_total", GATEWAY, "kind")),
            Panel("Whole reply", "s", quantiles(f"{G}reply_seconds", GATEWAY)),
            Panel("Errors by kind", "reqps", rate(f"{G}errors_total", GATEWAY, "kind")),
        ),
    ),
    (
        "Gateways",
        (
            Panel("Requests in hand", "short", gauge(f"{G}running_requests", GATEWAY)),
            Panel(
                "Workers by state, as the gateways see them",
                "short",
                (("{{state}}", f"min by (state) ({G}workers{{{GATEWAY}}})"),),
            ),
            Panel(
                "Tried on a second worker",
                "reqps",
                rate(f"{G}worker_retries_total", GATEWAY, "pod"),
            ),
            Panel(
                "Workers chosen, by reason",
                "reqps",
                rate(f"{G}routing_choices_total", GATEWAY, "reason"),
            ),
            Panel("One choice of a worker", "s", quantiles(f"{G}routing_seconds", GATEWAY)),
            Panel(
                "Sent away: all workers too busy",
                "reqps",
                rate(f"{G}shed_requests_total", GATEWAY, "pod"),
            ),
            Panel("Memory", "bytes", gauge("process_resident_memory_bytes", GATEWAY)),
            Panel("Open descriptors", "short", gauge("process_open_fds", GATEWAY)),
            Panel("Template and tokenizer", "s", quantiles(f"{G}prompt_seconds", GATEWAY)),
        ),
    ),
    (
        "Workers",
        (
            Panel("Running", "short", gauge(f"{W}running_requests", WORKER)),
            Panel("Waiting", "short", gauge(f"{W}waiting_requests", WORKER)),
            Panel("Prompt tokens ahead", "short", gauge(f"{W}waiting_prompt_tokens", WORKER)),
            Panel("Output tokens", "short", rate(f"{W}output_tokens_total", WORKER, "pod")),
            Panel("Queue", "s", quantiles(f"{W}queue_seconds", WORKER)),
            Panel("Between two tokens", "s", quantiles(f"{W}inter_token_seconds", WORKER)),
            Panel("Step", "s", quantiles(f"{W}step_seconds", WORKER, "kind")),
            Panel("Sequences of a step", "short", quantiles(f"{W}step_sequences", WORKER)),
            Panel("Requests by outcome", "reqps", rate(f"{W}requests_total", WORKER, "outcome")),
        ),
    ),
    (
        "Caches",
        (
            Panel(
                "Cache pages in use",
                "percentunit",
                (
                    (
                        "{{pod}}",
                        f"sum by (pod) ({W}used_pages{{{WORKER}}})"
                        f" / sum by (pod) ({W}total_pages{{{WORKER}}})",
                    ),
                ),
            ),
            Panel(
                "Prompt tokens found computed",
                "percentunit",
                (
                    share(
                        "on the GPU or in host memory",
                        f"{W}cached_prompt_tokens_total",
                        f"{W}prompt_tokens_total",
                        WORKER,
                    ),
                    share(
                        "in host memory",
                        f"{W}host_cached_prompt_tokens_total",
                        f"{W}prompt_tokens_total",
                        WORKER,
                    ),
                ),
            ),
            Panel("Preempted sequences", "short", rate(f"{W}preemptions_total", WORKER, "pod")),
        ),
    ),
    (
        "Pictures and clips",
        (
            Panel("Items", "reqps", rate(f"{G}media_items_total", GATEWAY, "outcome")),
            Panel("Fetch", "s", quantiles(f"{G}media_fetch_seconds", GATEWAY, "kind")),
            Panel("Decode and resize", "s", quantiles(f"{G}media_pixels_seconds", GATEWAY, "kind")),
            Panel("FFmpeg processes", "short", gauge(f"{G}video_processes", GATEWAY)),
            Panel(
                "Looks into media caches",
                "reqps",
                rate(f"{G}media_cache_lookups_total", GATEWAY, "outcome"),
            ),
            Panel("Feature memory", "bytes", gauge(f"{W}media_feature_bytes", WORKER)),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """The whole document."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row, charts in PANELS:
        panels.append(
            {
                "type": "row",
                "id": len(panels) + 1,
                "title": row,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
            }
        )
        y += 1
        for place, panel in enumerate(charts):
            x = place * WIDTH % COLUMNS
            top = y + place * WIDTH // COLUMNS * HEIGHT
            panels.append(_chart(panel, len(panels) + 1, x, top))
        y += -(-len(charts) * WIDTH // COLUMNS) * HEIGHT
    return {
        "uid": UID,
        "title": "m3stack",
        "tags": ["m3stack", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"},
                _variable("namespace", f"label_values({G}running_requests, namespace)"),
                _variable(
                    "gateway",
                    f'label_values({G}running_requests{{namespace=~"$namespace"}}, pod)',
                ),
                _variable(
                    "worker",
                    f'label_values({W}running_requests{{namespace=~"$namespace"}}, pod)',
                ),
            ]
        },
        "panels": panels,
    }


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": _source(),
        "query": {"query": query, "refId": name},
        "definition": query,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "refresh": 2,
        "sort": 1,
    }


def _chart(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "id": number,
        "title": panel.title,
        "datasource": _source(),
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "custom": {"lineWidth": 1, "fillOpacity": 8, "showPoints": "never"},
            },
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "expr": expression,
                "legendFormat": legend,
                "datasource": _source(),
            }
            for place, (legend, expression) in enumerate(panel.queries)
        ],
    }


def _source() -> dict[str, str]:
    return {"type": "prometheus", "uid": "${source}"}


def main() -> int:
    text = json.dumps(dashboard(), indent=1) + "\n"
    if "--check" in sys.argv[1:]:
        if TARGET.read_text() == text:
            return 0
        print(f"{TARGET.name} is not what {Path(__file__).name} makes; run it")
        return 1
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
