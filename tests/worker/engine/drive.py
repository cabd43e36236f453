"""Steps scheduler and runner by hand, the way the engine thread does, checking every step."""

from __future__ import annotations

import dataclasses

from m3stack.cache.media import MediaClaim, media_key
from m3stack.engine.plan import StepPlan
from m3stack.engine.sequence import Sequence
from m3stack.types import Event, Failed, Finished, Request, Tokens
from tests.worker.engine.history_model import EOS_ID, FEATURE_BYTES, PAGE, Stack


class Drive:
    """A stack, the sequences given to it, and what came of them."""

    def __init__(self, stack: Stack, *, max_context: int = 10_000) -> None:
        self.stack = stack
        self.max_context = max_context
        self.sequences: dict[int, Sequence] = {}
        self.tokens: dict[int, list[int]] = {}
        self.endings: dict[int, list[Finished | Failed | str]] = {}
        self.plans: list[StepPlan] = []

    def add(self, request: Request) -> int:
        handle = len(self.sequences)
        held = self._reserve(request)
        assert held is not None, "the test asked for more media than the budget holds"
        stops = request.sampling.stop_token_ids
        if not request.sampling.ignore_eos:
            stops = stops | {EOS_ID}
        bare = dataclasses.replace(
            request, media=tuple(dataclasses.replace(m, patches=None) for m in request.media)
        )
        sequence = Sequence(
            handle,
            bare,
            page_tokens=PAGE,
            stop_ids=stops,
            max_context_tokens=self.max_context,
            segment_patches=self.stack.segment_patches,
        )
        self.sequences[handle] = sequence
        self.tokens[handle] = []
        self.endings[handle] = []
        self.stack.runner.begin(handle, request, stop_ids=stops)
        self.stack.scheduler.add(sequence)
        self.check()
        return handle

    def cancel(self, handle: int) -> None:
        if self.stack.scheduler.cancel(handle):
            self.endings[handle].append("cancelled")
            self._forget(handle)
        self.check()

    def step(self) -> StepPlan:
        plan = self.stack.scheduler.plan()
        self.plans.append(plan)
        self._check_plan(plan)
        result = self.stack.runner.execute(plan)
        for handle, event in self.stack.scheduler.commit(plan, result):
            self.record(handle, event)
        self.check()
        return plan

    def drain(self, *, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.stack.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"still work after {max_steps} steps")

    def check(self) -> None:
        self.stack.scheduler.check()

    def check_clean(self) -> None:
        """Nothing is owned any more and everything ended exactly once."""
        self.stack.pages.check([])
        self.stack.pages.check_unpinned()
        assert self.stack.pages.num_used == 0
        assert self.stack.media.num_pinned == 0
        assert all(len(endings) == 1 for endings in self.endings.values())

    def _reserve(self, request: Request) -> tuple[bool, ...] | None:
        if request.patch_format is None:
            return ()
        return self.stack.media.reserve(
            [
                MediaClaim(
                    media_key(item, request.patch_format),
                    FEATURE_BYTES * sum(span.length for span in item.spans),
                )
                for item in request.media
            ]
        )

    def record(self, handle: int, event: Event) -> None:
        assert not self.endings[handle], "an event after the end"
        if isinstance(event, Tokens):
            self.tokens[handle].extend(event.token_ids)
        elif isinstance(event, Finished | Failed):
            self.endings[handle].append(event)
            self._forget(handle)

    def _forget(self, handle: int) -> None:
        self.stack.runner.forget(handle)
        self.stack.media.release([item.key for item in self.sequences[handle].media])

    def _check_plan(self, plan: StepPlan) -> None:
        limits = self.stack.limits
        assert not plan.is_empty, "invariant: the first sequence can always go on"
        most = limits.max_batch_tokens
        assert plan.num_tokens <= most * (limits.max_growth if limits.growth_prefix_tokens else 1)
        assert len(plan.rows) <= limits.max_sequences
        assert len({row.handle for row in plan.rows}) == len(plan.rows)
        for row in plan.rows:
            sequence = self.sequences[row.handle]
            assert row.start == sequence.num_computed
            assert row.end <= len(row.pages) * PAGE
        self._check_hits(plan)
        parts = {item.key: item.part_patches for s in self.sequences.values() for item in s.media}
        costs = [
            cost
            for encode in plan.encodes
            for cost in parts[encode.key][encode.first_part :][: encode.num_parts]
        ]
        assert len(costs) <= 1 or sum(costs) <= limits.max_encode_patches

    def _check_hits(self, plan: StepPlan) -> None:
        """What a request finds are whole pages, and it writes to none that another one reads."""
        for admission in plan.admissions:
            assert admission.cached_tokens % PAGE == 0
            assert admission.host_tokens % PAGE == 0
        newcomers = {admission.handle for admission in plan.admissions if admission.is_first}
        for row in plan.rows:
            if row.handle in newcomers:
                assert row.start % PAGE == 0, "a hit ends inside a page"
        written: dict[int, int] = {}
        for row in plan.rows:
            for page in row.pages[row.start // PAGE : -(-row.end // PAGE)]:
                assert page not in written, "two requests write to one page"
                written[page] = row.handle
        for sequence in self.sequences.values():
            for page in sequence.pages:
                owner = written.get(page, sequence.handle)
                assert owner == sequence.handle, "a request writes to a page of another one"
