"""What an engine counts is what its requests and steps did."""

from __future__ import annotations

from m3stack.engine.account import Account
from m3stack.engine.budget import SchedulerLimits
from m3stack.types import Finished, Request
from tests.worker.engine.engine_harness import EngineHarness
from tests.worker.engine.history_model import PAGE, Stack, sampling


def text(salt: int, *, length: int, max_tokens: int) -> Request:
    prompt = tuple((index * 7 + salt * 13) % 59 for index in range(length))
    return Request(f"r{salt}", prompt, sampling(max_tokens=max_tokens))


class Counted:
    """A metric's series, by short name."""

    def __init__(self, harness: EngineHarness) -> None:
        self._registry = harness.metrics.registry

    def __call__(self, name: str, **labels: str) -> float:
        value = self._registry.get_sample_value(f"m3stack_worker_{name}", labels)
        assert value is not None, f"there is no {name} with {labels}"
        return value


def test_steps_are_counted_by_what_they_held() -> None:
    with EngineHarness() as harness:
        counted = Counted(harness)
        harness.ending(harness.submit(text(1, length=20, max_tokens=4)))
        harness.wait_idle()
        # 16 and 4 of the prompt, the second of which gives a token; three of decode alone
        assert counted("step_seconds_count", kind="mixed") == 2
        assert counted("step_seconds_count", kind="decode") == 3
        assert counted("step_tokens_count") == counted("step_sequences_count") == 5
        assert counted("step_tokens_sum") == 20 + 3
        assert counted("step_sequences_sum") == 5
        assert counted("step_tokens_bucket", le="1.0") == 3
        assert counted("queue_seconds_count") == 1
        for phase in ("plan", "execute", "commit"):
            assert counted("phase_seconds_total", phase=phase) > 0
        assert counted("failed_steps_total") == 0
        assert counted("cached_pages") == 2
        assert counted("running_requests") == counted("waiting_requests") == 0
        harness.runner.faults = [RuntimeError("injected")]
        harness.ending(harness.submit(text(2, length=5, max_tokens=1)))
        harness.wait_idle()
        assert counted("failed_steps_total") == 1
        assert counted("requests_total", outcome="internal") == 1


def test_who_runs_and_waits_is_seen_while_a_step_is_under_way() -> None:
    limits = SchedulerLimits(max_batch_tokens=16, max_sequences=2, max_encode_patches=64)
    with EngineHarness(Stack(limits=limits)) as harness:
        counted = Counted(harness)
        harness.runner.gate.clear()
        handles = [harness.submit(text(salt, length=9, max_tokens=3)) for salt in range(5)]
        # one step was begun with whoever was there; the next one gives the second its token
        harness.runner.steps_left = 2
        harness.runner.gate.set()
        harness.wait_until(lambda: bool(harness.tokens(handles[1])))
        assert counted("running_requests") == 2
        assert counted("waiting_requests") == 3
        assert counted("waiting_prompt_tokens") >= 3 * 9
        assert counted("used_pages") >= 2
        harness.runner.gate.set()
        harness.wait_idle()
        for handle in handles:
            assert isinstance(harness.ending(handle), Finished)


def test_preemptions_and_bytes_moved_are_those_of_the_copies_made() -> None:
    limits = SchedulerLimits(max_batch_tokens=16, max_sequences=4, max_encode_patches=64)
    stack = Stack(num_pages=10, limits=limits, host_slots=64)
    assert stack.copier is not None
    with EngineHarness(stack) as harness:
        counted = Counted(harness)
        # all at once, so that the pool is short
        harness.runner.gate.clear()
        requests = [text(salt, length=10 + salt, max_tokens=40) for salt in range(4)]
        handles = [harness.submit(request) for request in requests]
        harness.runner.gate.set()
        for handle in handles:
            harness.ending(handle)
        # answered before the requests below are begun
        accounts: list[Account | None] = []
        for request in requests:
            harness.engine.explain(request.request_id, accounts.append)
        # evicted by now, and held by the host
        harness.ending(harness.submit(text(9, length=9 * PAGE, max_tokens=1)))
        before = counted("host_cached_prompt_tokens_total")
        harness.ending(harness.submit(text(0, length=10, max_tokens=1)))
        harness.wait_idle()
        assert len(accounts) == len(requests)
        assert counted("preemptions_total") == sum(a.preemptions for a in accounts if a) > 0
        copies = [copy.direction.value for copy in stack.copier.made]
        page_bytes = stack.pool.shape.bytes_per_page
        assert counted("offloaded_bytes_total") == copies.count("to_host") * page_bytes > 0
        assert counted("restored_bytes_total") == copies.count("to_device") * page_bytes > 0
        assert counted("host_cached_prompt_tokens_total") - before == PAGE
        assert counted("host_cached_pages") == stack.pages.num_host > 0
