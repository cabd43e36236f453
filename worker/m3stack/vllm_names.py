"""The worker's numbers under the names that dashboards and controllers made for vLLM read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class _Alias:
    """One of our metrics and vLLM's name for it; counters without their `_total`."""

    ours: str
    name: str
    kind: str


_ALIASES = (
    _Alias("running_requests", "num_requests_running", "gauge"),
    _Alias("waiting_requests", "num_requests_waiting", "gauge"),
    _Alias("prompt_tokens", "prompt_tokens", "counter"),
    _Alias("prompt_tokens", "prefix_cache_queries", "counter"),
    _Alias("cached_prompt_tokens", "prefix_cache_hits", "counter"),
    _Alias("output_tokens", "generation_tokens", "counter"),
    _Alias("preemptions", "num_preemptions", "counter"),
    _Alias("time_to_first_token_seconds", "time_to_first_token_seconds", "histogram"),
    _Alias("inter_token_seconds", "inter_token_latency_seconds", "histogram"),
    _Alias("queue_seconds", "request_queue_time_seconds", "histogram"),
    _Alias("request_prompt_tokens", "request_prompt_tokens", "histogram"),
)
_SUFFIXES = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
_OURS = "m3stack_worker_"
_FINISHED = ("stop", "length")


class VllmNames(Collector):
    """A second view of a registry's metrics; register it there.

    Args:
        registry: where the worker's own metrics are.
        model_name: the label `model_name`.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._labels = {"model_name": model_name, "engine": "0"}

    def describe(self) -> Iterator[Metric]:
        """The names alone: registering must not collect."""
        for alias in _ALIASES:
            yield Metric(f"vllm:{alias.name}", "", alias.kind)

    def collect(self) -> Iterator[Metric]:
        for alias in _ALIASES:
            metric = Metric(f"vllm:{alias.name}", "As in vLLM.", alias.kind)
            for suffix, labels, value in self._samples(alias.ours, alias.kind):
                metric.add_sample(f"vllm:{alias.name}{suffix}", labels | self._labels, value)
            yield metric
        usage = Metric("vllm:kv_cache_usage_perc", "As in vLLM: 1 is all pages.", "gauge")
        used, total = (self._value(name) for name in ("used_pages", "total_pages"))
        usage.add_sample(usage.name, self._labels, used / total if total else 0.0)
        yield usage
        success = Metric("vllm:request_success", "As in vLLM.", "counter")
        for suffix, labels, value in self._samples("requests", "counter"):
            reason = labels.get("outcome", "")
            if reason in _FINISHED:
                named = self._labels | {"finished_reason": reason}
                success.add_sample(f"{success.name}{suffix}", named, value)
        yield success

    def _value(self, ours: str) -> float:
        return next((value for _, _, value in self._samples(ours, "gauge")), 0.0)

    def _samples(self, ours: str, kind: str) -> Iterator[tuple[str, dict[str, str], float]]:
        """Suffix, labels and value of every sample of one of our metrics."""
        name = _OURS + ours
        wanted = [name + suffix for suffix in _SUFFIXES[kind]]
        for metric in self._registry.restricted_registry(wanted).collect():
            for sample in metric.samples:
                yield sample.name.removeprefix(name), dict(sample.labels), sample.value
