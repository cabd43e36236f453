"""Executes a plan: move pages, encode media, build tensors, forward, sample, tokens to the host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from m3stack.batch import DeviceBatch, LayerCache
from m3stack.cache.host import CopyDirection, PageCopy, broken_pages
from m3stack.engine.encoder import Encoder
from m3stack.engine.inputs import InputBuilder, TokenFeed, media_rows
from m3stack.engine.plan import FatalStepError, Sampled, StepPlan, StepResult
from m3stack.engine.sampler import Draw, Sampler, SampleRow
from m3stack.engine.sequence import PlacedMedia, place_media
from m3stack.engine.transfer import to_device
from m3stack.errors import ErrorKind
from m3stack.types import Failed, Request

_log = logging.getLogger(__name__)

Forward = Callable[[DeviceBatch, LayerCache], Tensor]
CopyPage = Callable[[PageCopy], None]


class Peers(Protocol):
    """Runners of other ranks, which execute the same plan at the same time."""

    def union(
        self, copies: tuple[PageCopy, ...], failed: tuple[PageCopy, ...]
    ) -> tuple[PageCopy, ...]:
        """The copies of a plan that failed on any rank."""
        ...

    def agree(self, what: list[int]) -> None:
        """Raises FatalStepError unless all ranks have the same."""
        ...


class _NoPeers:
    def union(
        self, copies: tuple[PageCopy, ...], failed: tuple[PageCopy, ...]
    ) -> tuple[PageCopy, ...]:
        return failed

    def agree(self, what: list[int]) -> None:
        pass


NO_PEERS = _NoPeers()


class Runner(Protocol):
    """What the engine needs of whoever executes its plans. All calls come from one thread."""

    def begin(self, handle: int, request: Request, *, stop_ids: frozenset[int]) -> None:
        """Takes over what the request's steps will need, its patches included."""

    def forget(self, handle: int) -> None:
        """Frees what `begin` and the request's steps have made."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs a step to its end.

        Raises:
            FatalStepError: no further step can succeed.
            Exception: whatever else went wrong with the step as a whole.
        """
        ...


@dataclass(slots=True)
class Launched:
    """A step on its way through the device.

    Attributes:
        plan: of the step.
        sample_rows: rows whose logits choose a token.
        logits_SV: of these; None where there are none.
        failures, settled, failed_copies: as in `StepResult`, as far as they are known.
        draw: tokens being chosen, once that was asked for.
    """

    plan: StepPlan
    sample_rows: list[SampleRow]
    logits_SV: Tensor | None
    failures: dict[int, Failed]
    settled: tuple[int, ...]
    failed_copies: tuple[PageCopy, ...]
    draw: Draw | None = None

    @property
    def feed(self) -> TokenFeed | None:
        """Tokens it chooses, on the device; None before it is sampled, or if it chooses none."""
        if self.draw is None:
            return None
        places = {row.handle: place for place, row in enumerate(self.draw.rows)}
        return TokenFeed(self.draw.chosen_S, places)


class AheadRunner(Runner, Protocol):
    """A runner whose steps can be queued one behind another.

    For every step `launch`, `sample` and `collect` are called once each, in this order. The next
    step may be launched once this one is sampled, and is sampled once this one is collected.
    Errors are those of `execute`.
    """

    def launch(self, plan: StepPlan, after: Launched | None = None) -> Launched:
        """Queues a step up to its logits; `after` chooses the tokens that are unknown in it."""
        ...

    def sample(self, step: Launched) -> None:
        """Queues the choice of its tokens; those of forgotten requests are not chosen."""
        ...

    def collect(self, step: Launched) -> StepResult:
        """What the step gave, once the device has come to its end."""
        ...


class FedRunner(AheadRunner, Protocol):
    """An `AheadRunner` that can take tokens of the step before from elsewhere."""

    def launch_fed(self, plan: StepPlan, feed: TokenFeed | None) -> Launched:
        """`launch`, with the tokens that are unknown in the plan from wherever they are chosen."""
        ...


class ModelRunner:
    """The runner over a real model and its cache.

    Args:
        forward: the model's text decoder, to fp32 logits of the sampled rows.
        caches: pages of all layers.
        encoder: media features.
        inputs: builds the batches.
        sampler: chooses the tokens; None on a rank that leaves that to another.
        copy_page: moves a page between device and host; None where there is no host tier.
        peers: the runners of other ranks that execute the same plans.
    """

    def __init__(
        self,
        forward: Forward,
        caches: LayerCache,
        *,
        encoder: Encoder,
        inputs: InputBuilder,
        sampler: Sampler | None,
        copy_page: CopyPage | None = None,
        peers: Peers = NO_PEERS,
    ) -> None:
        self._peers = peers
        self._copy_page = copy_page
        self._forward = forward
        self._caches = caches
        self._encoder = encoder
        self._inputs = inputs
        self._sampler = sampler
        self._media: dict[int, tuple[PlacedMedia, ...]] = {}

    def begin(self, handle: int, request: Request, *, stop_ids: frozenset[int]) -> None:
        if self._sampler is not None:
            self._sampler.begin(
                handle,
                request.sampling,
                prompt_token_ids=request.prompt_token_ids,
                stop_ids=stop_ids,
                constraint=request.constraint,
            )
        self._encoder.begin(handle, request)
        self._media[handle] = place_media(request)

    def forget(self, handle: int) -> None:
        if self._sampler is not None:
            self._sampler.forget(handle)
        self._encoder.forget(handle)
        self._inputs.forget(handle)
        self._media.pop(handle, None)

    def execute(self, plan: StepPlan) -> StepResult:
        step = self.launch(plan)
        self.sample(step)
        return self.collect(step)

    def launch(self, plan: StepPlan, after: Launched | None = None) -> Launched:
        return self.launch_fed(plan, None if after is None else after.feed)

    @torch.inference_mode()
    def launch_fed(self, plan: StepPlan, feed: TokenFeed | None) -> Launched:
        """`launch`, with the tokens that are unknown in the plan from wherever they are chosen."""
        with _sticky_errors():
            return self._launch(plan, feed)

    @torch.inference_mode()
    def sample(self, step: Launched) -> None:
        if step.logits_SV is None or self._sampler is None:
            return
        with _sticky_errors():
            # requests may have ended while the step was under way
            live = [i for i, row in enumerate(step.sample_rows) if self._sampler.knows(row.handle)]
            logits_SV = step.logits_SV
            if len(live) < len(step.sample_rows):
                step.sample_rows = [step.sample_rows[index] for index in live]
                live_S = to_device(live, logits_SV.device, torch.int64)
                logits_SV = logits_SV.index_select(0, live_S)
            if live:
                step.draw = self._sampler.draw(logits_SV, step.sample_rows)
            step.logits_SV = None

    def collect(self, step: Launched) -> StepResult:
        sampled: dict[int, Sampled] = {}
        if step.draw is not None:
            assert self._sampler is not None
            with _sticky_errors():
                for handle, choice in self._sampler.collect(step.draw).items():
                    if isinstance(choice, Failed):
                        step.failures[handle] = choice
                    else:
                        sampled[handle] = choice
        return StepResult(sampled, step.failures, step.settled, step.failed_copies)

    def _launch(self, plan: StepPlan, feed: TokenFeed | None) -> Launched:
        self._encoder.drop(plan.evicted_media)
        failed_copies = self._copy(plan.copies)
        if plan.copies:
            failed_copies = self._peers.union(plan.copies, failed_copies)
        broken = broken_pages(failed_copies)
        failures = {
            handle: Failed(ErrorKind.INTERNAL, message)
            for handle, message in self._encode(plan).items()
        }
        if plan.encodes:
            self._peers.agree(sorted(failures))
        rows = [
            row for row in plan.rows if row.handle not in failures and broken.isdisjoint(row.pages)
        ]
        settled = tuple(row.handle for row in rows if self._encoder.settle(row.handle))
        sample_rows = [
            SampleRow(row.handle, row.output_index) for row in rows if row.output_index is not None
        ]
        step = Launched(plan, sample_rows, None, failures, settled, failed_copies)
        if not rows:
            return step
        media = media_rows(rows, self._media.__getitem__, self._encoder.features)
        logits_SV = self._forward(self._inputs.build(rows, media, feed), self._caches)
        if sample_rows:
            step.logits_SV = logits_SV
        return step

    def _copy(self, copies: Sequence[PageCopy]) -> tuple[PageCopy, ...]:
        """Moves pages in order; returns the copies that failed or built on one that did."""
        failed: list[PageCopy] = []
        bad_pages: set[int] = set()
        bad_slots: set[int] = set()
        for copy in copies:
            assert self._copy_page is not None, "a plan moves pages, but there is no host tier"
            is_out = copy.direction is CopyDirection.TO_HOST
            source_is_bad = copy.page in bad_pages if is_out else copy.slot in bad_slots
            try:
                if not source_is_bad:
                    self._copy_page(copy)
            except torch.AcceleratorError:
                raise
            except Exception:  # noqa: BLE001 - the page alone is lost, and can be computed again
                _log.exception("page_copy_failed direction=%s", copy.direction.value)
                source_is_bad = True
            target, bad = (copy.slot, bad_slots) if is_out else (copy.page, bad_pages)
            if source_is_bad:
                failed.append(copy)
                bad.add(target)
            else:
                bad.discard(target)
        return tuple(failed)

    def _encode(self, plan: StepPlan) -> Mapping[int, str]:
        """Encodes what the plan names; also fails the rows that needed an item that failed."""
        failures = dict(self._encoder.run(plan.encodes))
        broken = {encode.key for encode in plan.encodes if encode.handle in failures}
        if not broken:
            return failures
        for row in plan.rows:
            for item in self._media[row.handle]:
                # a failed request may have brought items that did encode; those others may use
                if item.key in broken and not self._encoder.holds(item.key):
                    failures.setdefault(row.handle, "the vision encoder failed")
        return failures


@contextmanager
def _sticky_errors() -> Iterator[None]:
    """Turns a device error into `FatalStepError`: everything after it would fail as well."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise FatalStepError(str(error)) from error
