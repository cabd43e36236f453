"""vLLM's names show the worker's own numbers, and are not there unless asked for."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import generate_latest

from m3stack.telemetry import WorkerMetrics
from m3stack.types import Load
from m3stack.vllm_names import VllmNames

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
LABELS = 'engine="0",model_name="m3"'


def lines(metrics: WorkerMetrics) -> dict[str, float]:
    page = generate_latest(metrics.registry).decode()
    pairs = [line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in pairs}


def test_the_names_show_the_workers_own_numbers() -> None:
    metrics = WorkerMetrics()
    assert not any(name.startswith("vllm:") for name in lines(metrics))
    metrics.registry.register(VllmNames(metrics.registry, "m3"))
    metrics.set_load(Load(3, 5, 70, 20, 80, 9), cached_pages=1, host_pages=0)
    metrics.request_started(0.5, prompt_tokens=100, cached_tokens=60, host_tokens=0)
    metrics.token_made(0.25, is_first=True)
    metrics.request_ended("stop")
    metrics.request_ended("cancelled")

    shown = lines(metrics)

    assert shown[f"vllm:num_requests_running{{{LABELS}}}"] == 3
    assert shown[f"vllm:num_requests_waiting{{{LABELS}}}"] == 5
    assert shown[f"vllm:kv_cache_usage_perc{{{LABELS}}}"] == 0.25
    assert shown[f"vllm:prompt_tokens_total{{{LABELS}}}"] == 100
    assert shown[f"vllm:prefix_cache_hits_total{{{LABELS}}}"] == 60
    assert shown[f"vllm:time_to_first_token_seconds_count{{{LABELS}}}"] == 1
    reason = 'finished_reason="stop"'
    assert shown[f'vllm:request_success_total{{engine="0",{reason},model_name="m3"}}'] == 1
    assert sum(name.startswith("vllm:request_success_total") for name in shown) == 2


def test_the_names_are_those_of_the_documentation() -> None:
    metrics = WorkerMetrics()
    metrics.registry.register(VllmNames(metrics.registry, "m3"))
    families = [family for family in metrics.registry.collect() if family.name.startswith("vllm:")]
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `vllm:")]
    cells = [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in rows]
    documented = {(name, kind) for name, kind, _, at_workers in cells if at_workers == "yes"}
    assert {(family.name, family.type) for family in families} == documented
