"""What a worker is and how it is, as metrics: its role, its state, and whether it is healthy."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from m3stack.types import WorkerState


class LifeMetrics:
    """Shown from the start on, as loading and not healthy.

    Args:
        registry: that of the worker's other metrics.
        role: the setting.
    """

    def __init__(self, registry: CollectorRegistry, role: str) -> None:
        what = Gauge(
            "m3stack_worker_role",
            "1 for the part of the work that this worker does.",
            ["role"],
            registry=registry,
        )
        what.labels(role).set(1)
        state = Gauge(
            "m3stack_worker_state",
            "1 for the state that the worker is in, 0 for the others.",
            ["state"],
            registry=registry,
        )
        self._states = {each: state.labels(each.name.lower()) for each in WorkerState}
        self._healthy = Gauge(
            "m3stack_worker_healthy",
            "What the health service says: 1 for SERVING, 0 while the worker loads, drains or "
            "stands in a step for too long.",
            registry=registry,
        )
        self.set_state(WorkerState.LOADING)

    def set_state(self, state: WorkerState) -> None:
        for each, gauge in self._states.items():
            gauge.set(each is state)

    def set_healthy(self, is_healthy: bool) -> None:
        self._healthy.set(is_healthy)
