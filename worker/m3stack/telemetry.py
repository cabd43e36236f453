"""The name of every metric that the host counts; `device_metrics` has those of the device."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from m3stack.device_metrics import DeviceCounts, DeviceNumbers
from m3stack.errors import ErrorKind
from m3stack.types import FinishReason, Load

# one bucket edge at least every factor two where users compare numbers
# to the half hour after which a gateway gives up: prompts of a million tokens wait for each other
_QUEUE_BUCKETS_S = (
    0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800,
)  # fmt: skip
_FIRST_TOKEN_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 30, 60, 120, 300, 600, 1800,
)  # fmt: skip
_INTER_TOKEN_BUCKETS_S = (
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.06,
    0.08,
    0.12,
    0.2,
    0.4,
    0.8,
    2,
    5,
)
_STEP_BUCKETS_S = (
    0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1, 2, 5, 15, 60,
)  # fmt: skip
_STEP_SEQUENCE_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
_STEP_TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_PROMPT_TOKEN_BUCKETS = tuple(1 << power for power in range(6, 21))
_VISION_PATCH_BUCKETS = (64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

TRANSFER_OUTCOMES = ("whole", "partial", "failed", "corrupt")
TRANSFER_KINDS = ("pages", "features")
OUTCOMES = (
    *(reason.name.lower() for reason in FinishReason),
    *(kind.name.lower() for kind in ErrorKind),
)


class WorkerMetrics:
    """Everything a worker counts, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._define_requests()
        self._define_latencies()
        self._define_steps()
        self._define_memory()
        self._define_transfers()

    def _define_requests(self) -> None:
        reg = self.registry
        ended = Counter(
            "m3stack_worker_requests",
            "Requests that ended, by outcome.",
            ["outcome"],
            registry=reg,
        )
        self._ended = {outcome: ended.labels(outcome) for outcome in OUTCOMES}
        refused = Counter(
            "m3stack_worker_refused_requests",
            "Requests refused before they reached the engine, by error kind.",
            ["kind"],
            registry=reg,
        )
        # what has not happened is told as 0: a rate does not see a series begin
        self._refused = {kind: refused.labels(kind.name.lower()) for kind in ErrorKind}
        self._prompt_tokens = Counter(
            "m3stack_worker_prompt_tokens", "Prompt tokens of started requests.", registry=reg
        )
        self._request_prompt = Histogram(
            "m3stack_worker_request_prompt_tokens",
            "Prompt tokens of a started request.",
            buckets=_PROMPT_TOKEN_BUCKETS,
            registry=reg,
        )
        self._cached_tokens = Counter(
            "m3stack_worker_cached_prompt_tokens",
            "Prompt tokens of started requests that the prefix cache had: its hits.",
            registry=reg,
        )
        self._uncached_tokens = Counter(
            "m3stack_worker_uncached_prompt_tokens",
            "Prompt tokens of started requests that it had not, and that are computed: its misses.",
            registry=reg,
        )
        self._host_tokens = Counter(
            "m3stack_worker_host_cached_prompt_tokens",
            "Those of the cached prompt tokens that were in host memory.",
            registry=reg,
        )
        self._output_tokens = Counter(
            "m3stack_worker_output_tokens", "Tokens sent to clients.", registry=reg
        )
        self._running = Gauge(
            "m3stack_worker_running_requests", "Requests in the running set.", registry=reg
        )
        self._waiting = Gauge(
            "m3stack_worker_waiting_requests", "Requests in the queue.", registry=reg
        )
        self._pending_prompt = Gauge(
            "m3stack_worker_waiting_prompt_tokens",
            "Prompt tokens accepted and not yet computed.",
            registry=reg,
        )

    def _define_transfers(self) -> None:
        reg = self.registry
        transfers = Counter(
            "m3stack_worker_transfers",
            "Transfers from other workers, by outcome: whole, partial, failed, or corrupt (damaged "
            "on the way).",
            ["outcome"],
            registry=reg,
        )
        self._transfers = {each: transfers.labels(each) for each in TRANSFER_OUTCOMES}
        taken_in = Counter(
            "m3stack_worker_transferred_bytes",
            "Bytes of pages and features taken in from other workers.",
            ["kind"],
            registry=reg,
        )
        self._transferred_bytes = {kind: taken_in.labels(kind) for kind in TRANSFER_KINDS}

    def transferred(self, kind: str, num_bytes: int) -> None:
        """Bytes of one of `TRANSFER_KINDS` have come from another worker."""
        self._transferred_bytes[kind].inc(num_bytes)

    def transfer_ended(self, outcome: str) -> None:
        """Everything that could be had of another worker is here: one of `TRANSFER_OUTCOMES`."""
        self._transfers[outcome].inc()

    def _define_latencies(self) -> None:
        reg = self.registry
        self._queue = Histogram(
            "m3stack_worker_queue_seconds",
            "Time from acceptance to the first step.",
            buckets=_QUEUE_BUCKETS_S,
            registry=reg,
        )
        self._first_token = Histogram(
            "m3stack_worker_time_to_first_token_seconds",
            "Time from acceptance to the first token.",
            buckets=_FIRST_TOKEN_BUCKETS_S,
            registry=reg,
        )
        self._inter_token = Histogram(
            "m3stack_worker_inter_token_seconds",
            "Time between two tokens of a request.",
            buckets=_INTER_TOKEN_BUCKETS_S,
            registry=reg,
        )

        self._constraint = Histogram(
            "m3stack_worker_constraint_seconds",
            "Time that requests with an output constraint waited for it to be compiled.",
            buckets=_QUEUE_BUCKETS_S,
            registry=reg,
        )

    def _define_steps(self) -> None:
        reg = self.registry
        steps = Histogram(
            "m3stack_worker_step_seconds",
            "Duration of a step: of decode alone, or with prompts in it.",
            ["kind"],
            buckets=_STEP_BUCKETS_S,
            registry=reg,
        )
        self._decode_step, self._mixed_step = steps.labels("decode"), steps.labels("mixed")
        self._step_tokens = Histogram(
            "m3stack_worker_step_tokens",
            "Tokens computed in a step.",
            buckets=_STEP_TOKEN_BUCKETS,
            registry=reg,
        )
        self._step_sequences = Histogram(
            "m3stack_worker_step_sequences",
            "Sequences that a step computed tokens of.",
            buckets=_STEP_SEQUENCE_BUCKETS,
            registry=reg,
        )
        phases = Counter(
            "m3stack_worker_phase_seconds",
            "Time the engine spent planning, executing and committing steps.",
            ["phase"],
            registry=reg,
        )
        self._plan_s, self._execute_s, self._commit_s = (
            phases.labels(phase) for phase in ("plan", "execute", "commit")
        )
        self._failed_steps = Counter(
            "m3stack_worker_failed_steps", "Steps that raised an error.", registry=reg
        )
        self._preemptions = Counter(
            "m3stack_worker_preemptions",
            "Sequences that lost their pages to an older one.",
            registry=reg,
        )

    def _define_memory(self) -> None:
        reg = self.registry
        self._used_pages = Gauge(
            "m3stack_worker_used_pages", "Cache pages that requests own.", registry=reg
        )
        self._cached_pages = Gauge(
            "m3stack_worker_cached_pages",
            "Cache pages whose content can be found again.",
            registry=reg,
        )
        self._total_pages = Gauge(
            "m3stack_worker_total_pages", "Cache pages of the pool.", registry=reg
        )
        self._host_pages = Gauge(
            "m3stack_worker_host_cached_pages",
            "Cache pages whose content is held in host memory.",
            registry=reg,
        )
        self._offloaded_bytes = Counter(
            "m3stack_worker_offloaded_bytes",
            "Bytes of cache pages copied to host memory.",
            registry=reg,
        )
        self._restored_bytes = Counter(
            "m3stack_worker_restored_bytes",
            "Bytes of cache pages copied back from host memory.",
            registry=reg,
        )
        self._media_bytes = Gauge(
            "m3stack_worker_media_feature_bytes",
            "Bytes of media features held or promised.",
            registry=reg,
        )
        self._encoded = Counter(
            "m3stack_worker_encoded_media_parts",
            "Stills and segments of clips encoded.",
            registry=reg,
        )
        self._vision_parts = Histogram(
            "m3stack_worker_vision_batch_parts",
            "Stills and segments of clips that a step encoded, of steps that encoded any.",
            buckets=_STEP_SEQUENCE_BUCKETS,
            registry=reg,
        )
        self._vision_patches = Histogram(
            "m3stack_worker_vision_batch_patches",
            "Patches that a step encoded, of steps that encoded any.",
            buckets=_VISION_PATCH_BUCKETS,
            registry=reg,
        )
        self._held = Counter(
            "m3stack_worker_held_media_items",
            "Media items whose features were held when a request named them.",
            registry=reg,
        )
        self._upload_bytes = Counter(
            "m3stack_worker_uploaded_patch_bytes", "Patch bytes received.", registry=reg
        )

    def watch_device(self, read: Callable[[], DeviceCounts]) -> None:
        """Shows what is counted on the device; `read` is called by whoever asks for metrics."""
        self.registry.register(DeviceNumbers(read))

    def request_started(
        self, queue_s: float, *, prompt_tokens: int, cached_tokens: int, host_tokens: int
    ) -> None:
        self._queue.observe(queue_s)
        self._prompt_tokens.inc(prompt_tokens)
        self._request_prompt.observe(prompt_tokens)
        self._cached_tokens.inc(cached_tokens)
        self._uncached_tokens.inc(prompt_tokens - cached_tokens)
        self._host_tokens.inc(host_tokens)

    def request_ended(self, outcome: str) -> None:
        """`outcome` is one of `OUTCOMES`."""
        self._ended[outcome].inc()

    def request_refused(self, kind: ErrorKind) -> None:
        self._refused[kind].inc()

    def token_made(self, seconds: float, *, is_first: bool) -> None:
        """`seconds` since the last token, or since acceptance for the first."""
        (self._first_token if is_first else self._inter_token).observe(seconds)
        self._output_tokens.inc()

    def step_done(
        self, seconds: float, *, num_tokens: int, num_sequences: int, is_decode: bool
    ) -> None:
        (self._decode_step if is_decode else self._mixed_step).observe(seconds)
        self._step_tokens.observe(num_tokens)
        self._step_sequences.observe(num_sequences)

    def phases(self, *, plan_s: float, execute_s: float, commit_s: float) -> None:
        self._plan_s.inc(plan_s)
        self._execute_s.inc(execute_s)
        self._commit_s.inc(commit_s)

    def pages_copied(self, *, offloaded_bytes: int, restored_bytes: int) -> None:
        self._offloaded_bytes.inc(offloaded_bytes)
        self._restored_bytes.inc(restored_bytes)

    def step_failed(self) -> None:
        self._failed_steps.inc()

    def preempted(self, count: int) -> None:
        if count:
            self._preemptions.inc(count)

    def media_encoded(self, *, num_parts: int, num_patches: int) -> None:
        """A step has encoded media."""
        self._encoded.inc(num_parts)
        self._vision_parts.observe(num_parts)
        self._vision_patches.observe(num_patches)

    def constraint_waited(self, seconds: float) -> None:
        self._constraint.observe(seconds)

    def media_named(self, *, num_held: int) -> None:
        self._held.inc(num_held)

    def patches_received(self, num_bytes: int) -> None:
        self._upload_bytes.inc(num_bytes)

    def set_load(self, load: Load, *, cached_pages: int, host_pages: int) -> None:
        self._running.set(load.running_requests)
        self._waiting.set(load.waiting_requests)
        self._pending_prompt.set(load.waiting_prompt_tokens)
        self._used_pages.set(load.used_pages)
        self._total_pages.set(load.total_pages)
        self._cached_pages.set(cached_pages)
        self._host_pages.set(host_pages)

    def set_media_bytes(self, num_bytes: int) -> None:
        self._media_bytes.set(num_bytes)
