"""What a step does and what came of it, in plain integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from m3stack.cache.host import PageCopy
from m3stack.types import Failed, TokenLogprob


@dataclass(frozen=True, slots=True)
class Row:
    """Consecutive tokens of one sequence in a step.

    Attributes:
        handle: the sequence.
        start: position of the first token; everything before it is in the cache.
        token_ids: the tokens, at least one.
        pages: page numbers of the sequence, enough to hold the last token. Valid until commit. The
            same object as in the sequence's last plan only if it was appended to at most.
        output_index: number of the output token that the last row's logits choose, or None if
            the prompt goes on and nothing is sampled.
    """

    handle: int
    start: int
    token_ids: Sequence[int]
    pages: Sequence[int]
    output_index: int | None

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class EncodeItem:
    """Parts of a media item whose features this step computes before its forward.

    Attributes:
        handle: a request that brings the patches.
        key: the item.
        first_part: number of the first part; all before it are encoded.
        num_parts: at least one.
    """

    handle: int
    key: bytes
    first_part: int
    num_parts: int


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that leaves the queue.

    Attributes:
        cached_tokens: tokens that the caches had, on the device or in host memory.
        host_tokens: those of them that are in host memory.
        is_first: False if it ran before and was preempted.
    """

    handle: int
    cached_tokens: int
    host_tokens: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: at most one row a sequence, one-token rows first.

    Attributes:
        rows: may be empty while pages are brought back or a first picture is encoded.
        encodes: parts of media items to encode first, no key twice.
        admissions: sequences that leave the queue with this step.
        preempted: sequences that lost their pages; they go on later, from copies where they can.
        copies: page contents to move before all else, in this order.
        evicted_media: items whose features are not to be kept any longer.
    """

    rows: tuple[Row, ...]
    encodes: tuple[EncodeItem, ...] = ()
    admissions: tuple[Admission, ...] = ()
    preempted: tuple[int, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    evicted_media: tuple[bytes, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to execute."""
        return not (self.rows or self.encodes or self.copies)

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token; `logprob` is there if the request asked for it."""

    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave.

    Attributes:
        sampled: one entry for each row with an `output_index` that did not fail.
        failures: what went wrong with single sequences of the plan; they end with it.
        settled: sequences whose uploaded patches are no longer needed since this step.
        failed_copies: copies of the plan that were not made, those that built on them included;
            rows that own a page so left undefined were not computed.
    """

    sampled: Mapping[int, Sampled]
    failures: Mapping[int, Failed] = field(default_factory=dict[int, Failed])
    settled: tuple[int, ...] = ()
    failed_copies: tuple[PageCopy, ...] = ()


class FatalStepError(Exception):
    """The device is lost: no further step can succeed."""
