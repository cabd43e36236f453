"""One request's progress: its tokens, what of them is computed, and the pages that hold it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from m3stack.cache.media import media_key
from m3stack.cache.prefix import ROOT_KEY, MediaMark, page_key
from m3stack.engine.plan import Sampled
from m3stack.types import FinishReason, MediaKind, Request, Span, Usage


class SequenceState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class PlacedMedia:
    """A media item as the scheduler sees it.

    Attributes:
        key: identity of its features.
        spans: where they stand in the prompt, in order.
        num_patches: what encoding it costs.
    """

    key: bytes
    spans: tuple[Span, ...]
    num_patches: int

    @property
    def first(self) -> int:
        return self.spans[0].offset

    @property
    def end(self) -> int:
        return self.spans[-1].offset + self.spans[-1].length


class Sequence:
    """Progress of one request; the engine thread owns and changes it.

    `tokens` is prompt and output; the first `num_computed` of them are in the cache.

    Args:
        handle: number of the request in this worker.
        request: its patches are not looked at.
        page_tokens: tokens of a page.
        stop_ids: ids that end the request.
        max_context_tokens: prompt and output together never exceed it.
    """

    def __init__(
        self,
        handle: int,
        request: Request,
        *,
        page_tokens: int,
        stop_ids: frozenset[int],
        max_context_tokens: int,
    ) -> None:
        self.handle = handle
        self.request = request
        self.page_tokens = page_tokens
        self.stop_ids = stop_ids
        self.state = SequenceState.WAITING
        self.tokens = list(request.prompt_token_ids)
        self.num_prompt = len(self.tokens)
        self.max_output = min(
            request.sampling.max_tokens, max_context_tokens - len(request.prompt_token_ids)
        )
        self.num_computed = 0
        self.pages: list[int] = []
        self.num_preemptions = 0
        self.cached_tokens: int | None = None
        self.media = place_media(request)
        self._page_keys: list[bytes] = []
        self._num_registered = 0

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def pages_for_tokens(self) -> int:
        """Pages that hold every token known so far."""
        return -(-len(self.tokens) // self.page_tokens)

    @property
    def pages_at_most(self) -> int:
        """Pages it can ever need; the last output token is never computed."""
        return -(-(self.num_prompt + self.max_output - 1) // self.page_tokens)

    def accept(self, sampled: Sampled) -> tuple[FinishReason, int | None] | None:
        """Appends an output token unless it stops the sequence; says why it ended, if it did."""
        assert self.num_uncomputed == 0
        assert self.num_output < self.max_output
        if sampled.token_id in self.stop_ids:
            return FinishReason.STOP, sampled.token_id
        self.tokens.append(sampled.token_id)
        if self.num_output == self.max_output:
            return FinishReason.LENGTH, None
        return None

    def restart(self) -> None:
        """Forgets what is computed, after its pages were taken away."""
        assert self.state is SequenceState.RUNNING
        assert not self.pages
        self.state = SequenceState.WAITING
        self.num_computed = 0
        self.num_preemptions += 1
        self._num_registered = 0

    def start(self, matched_pages: list[int]) -> None:
        """Runs, with the pages that the prefix cache had."""
        assert self.state is SequenceState.WAITING
        assert not self.pages
        self.state = SequenceState.RUNNING
        self.pages = matched_pages
        self.num_computed = len(matched_pages) * self.page_tokens
        self._num_registered = len(matched_pages)
        if self.cached_tokens is None:
            self.cached_tokens = self.num_computed

    def matchable_keys(self) -> list[bytes]:
        """Keys of the full pages before the last token, which is always computed anew."""
        self._extend_keys((len(self.tokens) - 1) // self.page_tokens)
        return self._page_keys[: (len(self.tokens) - 1) // self.page_tokens]

    def newly_full(self) -> list[tuple[int, bytes]]:
        """Page and key of the pages that became full since the last call."""
        num_full = self.num_computed // self.page_tokens
        first, self._num_registered = self._num_registered, max(num_full, self._num_registered)
        self._extend_keys(num_full)
        return [(self.pages[index], self._page_keys[index]) for index in range(first, num_full)]

    def usage(self) -> Usage:
        """Token counts as of now."""
        counts = {MediaKind.IMAGE: 0, MediaKind.VIDEO: 0}
        for item in self.request.media:
            counts[item.kind] += sum(span.length for span in item.spans)
        return Usage(
            prompt_tokens=self.num_prompt,
            cached_tokens=self.cached_tokens or 0,
            completion_tokens=self.num_output,
            image_tokens=counts[MediaKind.IMAGE],
            video_tokens=counts[MediaKind.VIDEO],
        )

    def _extend_keys(self, count: int) -> None:
        size = self.page_tokens
        while len(self._page_keys) < count:
            start = len(self._page_keys) * size
            parent = self._page_keys[-1] if self._page_keys else ROOT_KEY
            marks = _marks(self.media, start, start + size)
            self._page_keys.append(page_key(parent, self.tokens[start : start + size], marks))


def place_media(request: Request) -> tuple[PlacedMedia, ...]:
    """The media of a request in order of first position."""
    if not request.media:
        return ()
    assert request.patch_format is not None
    placed = [
        PlacedMedia(
            key=media_key(item, request.patch_format),
            spans=item.spans,
            num_patches=item.grid_thw[0] * item.grid_thw[1] * item.grid_thw[2],
        )
        for item in request.media
    ]
    return tuple(sorted(placed, key=lambda item: item.first))


def _marks(media: tuple[PlacedMedia, ...], start: int, end: int) -> list[MediaMark]:
    marks: list[MediaMark] = []
    for item in media:
        if item.end <= start or item.first >= end:
            continue
        first_feature = 0
        for span in item.spans:
            low, high = max(span.offset, start), min(span.offset + span.length, end)
            if low < high:
                feature = first_feature + low - span.offset
                marks.append(MediaMark(item.key, feature, low - start, high - low))
            first_feature += span.length
    return sorted(marks, key=lambda mark: mark.offset)
