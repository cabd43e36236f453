"""One request's progress: its tokens, what of them is computed, and the pages that hold it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from m3stack.cache.media import media_key
from m3stack.cache.prefix import ROOT_KEY, MediaMark, page_chain, page_key
from m3stack.engine.plan import Sampled
from m3stack.types import FinishReason, MediaKind, Request, Span, Usage

NO_SEGMENTS = 1 << 30
"""Every clip is one part."""
UNKNOWN_TOKEN = -1
"""Stands for a token that a step under way will choose."""


class SequenceState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class WaitReason(Enum):
    """What kept the sequence at the head of the queue in it."""

    SEQUENCES = "a place among the running requests"
    PAGES = "cache pages"
    TENANT = "the tenant's limit"
    PREFIX = "a prefix that another request was computing"
    KEYS = "the keys of its prompt's pages"


@dataclass(frozen=True, slots=True)
class PlacedMedia:
    """A media item as the scheduler sees it.

    Attributes:
        key: identity of its features.
        spans: where they stand in the prompt, in order.
        part_patches: patches of each part that can be encoded by itself, in order: a still is
            one part, a clip one for every segment that the vision tower sees apart.
        merged_patches: patches that become one token.
    """

    key: bytes
    spans: tuple[Span, ...]
    part_patches: tuple[int, ...]
    merged_patches: int

    @property
    def first(self) -> int:
        return self.spans[0].offset

    @property
    def end(self) -> int:
        return self.spans[-1].offset + self.spans[-1].length

    def reach(self, num_parts: int) -> int:
        """Position of the first placeholder behind the features of the first `num_parts` parts."""
        left = sum(self.part_patches[:num_parts]) // self.merged_patches
        for span in self.spans:
            if left < span.length:
                return span.offset + left
            left -= span.length
        return self.end


class Sequence:
    """Progress of one request; the engine thread owns and changes it.

    `tokens` is prompt and output; the first `num_computed` of them are in the cache.

    Args:
        handle: number of the request in this worker.
        request: its patches are not looked at.
        page_tokens: tokens of a page.
        stop_ids: ids that end the request.
        max_context_tokens: prompt and output together never exceed it.
        segment_patches: temporal patches of a clip that the vision tower sees together.

    Attributes:
        order: smaller runs first; set when it is queued, and when it may no longer be preempted.
        restorable_pages: while `num_computed` is short of that many pages, the next one may be
            fetched from the caches instead of computed.
        pinned_keys: host copies that are kept for this sequence.
    """

    def __init__(
        self,
        handle: int,
        request: Request,
        *,
        page_tokens: int,
        stop_ids: frozenset[int],
        max_context_tokens: int,
        segment_patches: int = NO_SEGMENTS,
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
        self.media = place_media(request, segment_patches)
        self.order: tuple[int, int] = (0, handle)
        self.root_key = ROOT_KEY
        self.restorable_pages = 0
        self.pinned_keys: list[bytes] = []
        self.wait_steps: dict[WaitReason, int] = {}
        self._page_keys: list[bytes] = []
        self._num_registered = 0
        self._saved_tokens = 0
        self._foreseen_from: int | None = None

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
        # a prompt beyond the context leaves less than nothing for the output
        return -(-(self.num_prompt + max(1, self.max_output) - 1) // self.page_tokens)

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

    def foresee(self, end: int, *, samples: bool) -> None:
        """Counts a row that is under way as computed; what it chooses is not known yet."""
        assert self._foreseen_from is None
        self._foreseen_from = self.num_computed
        self.num_computed = end
        if samples:
            self.tokens.append(UNKNOWN_TOKEN)

    def unforesee(self) -> None:
        """Undoes `foresee`, if it was called."""
        if self._foreseen_from is None:
            return
        if self.tokens[-1] == UNKNOWN_TOKEN:
            self.tokens.pop()
        self.num_computed, self._foreseen_from = self._foreseen_from, None

    @property
    def has_all_output(self) -> bool:
        """Whether all it may put out is there or under way."""
        return self.num_output == self.max_output

    def restart(self) -> None:
        """Waits again, after its pages were taken away; remembers how far it had come."""
        assert self.state is SequenceState.RUNNING
        assert not self.pages
        self.state = SequenceState.WAITING
        self._saved_tokens = self.reached_tokens
        self.num_computed = 0
        self.num_preemptions += 1
        self.restorable_pages = 0
        self._num_registered = 0

    def start(self, matched_pages: list[int], *, known_pages: int) -> None:
        """Runs, with the device pages that the caches had; more may be restored."""
        assert self.state is SequenceState.WAITING
        assert not self.pages
        self.state = SequenceState.RUNNING
        self.pages = matched_pages
        self.num_computed = len(matched_pages) * self.page_tokens
        self._num_registered = len(matched_pages)
        self.restorable_pages = known_pages
        if self.cached_tokens is None:
            self.cached_tokens = known_pages * self.page_tokens

    @property
    def is_restorable(self) -> bool:
        """Whether the next full page may come from the caches."""
        return self.num_computed < self.restorable_pages * self.page_tokens

    @property
    def is_restoring(self) -> bool:
        """Whether the next page, full or not, may come from the caches."""
        return self.is_restorable or self.is_resumable

    @property
    def has_saved_partial(self) -> bool:
        """Whether the page it was writing to when it was preempted may still be there."""
        return self._saved_tokens % self.page_tokens > 0

    def restoring_key(self) -> bytes:
        """Key of the page that may come from the caches next."""
        if not self.is_restorable:
            return self.partial_key()
        index = self.num_computed // self.page_tokens
        self._extend_keys(index + 1)
        return self._page_keys[index]

    def waited_for(self, reason: WaitReason) -> None:
        """Notes why it was not admitted in a step."""
        self.wait_steps[reason] = self.wait_steps.get(reason, 0) + 1

    def add_restored(self, page: int) -> None:
        """Appends a full page whose content the caches had."""
        assert len(self.pages) * self.page_tokens == self.num_computed
        self.pages.append(page)
        self.num_computed += self.page_tokens
        self._num_registered = len(self.pages)

    def add_resumed(self, page: int) -> None:
        """Appends the page it was writing to when it was preempted."""
        assert len(self.pages) * self.page_tokens == self.num_computed
        self.pages.append(page)
        self.num_computed = self._saved_tokens
        self._saved_tokens = 0

    def rewind(self, num_pages: int) -> list[int]:
        """Forgets what is computed behind the first `num_pages` pages, and gives their pages up."""
        dropped, self.pages = self.pages[num_pages:], self.pages[:num_pages]
        self.num_computed = min(self.num_computed, num_pages * self.page_tokens)
        self._num_registered = min(self._num_registered, num_pages)
        self.stop_restoring()
        return dropped

    def matchable_keys(self) -> list[bytes]:
        """Keys of the full pages before the last token, which is always computed anew."""
        return self.page_keys((len(self.tokens) - 1) // self.page_tokens)

    @property
    def num_lacking_keys(self) -> int:
        """How many of `matchable_keys` are still to be made."""
        return max(0, (len(self.tokens) - 1) // self.page_tokens - len(self._page_keys))

    def make_keys(self, most_pages: int) -> int:
        """Makes the next of `matchable_keys`, so that no step waits for all; returns how many."""
        count = min(most_pages, self.num_lacking_keys)
        self._extend_keys(len(self._page_keys) + count)
        return count

    def page_keys(self, count: int) -> list[bytes]:
        """Keys of the first `count` pages, all of whose tokens are known."""
        self._extend_keys(count)
        return self._page_keys[:count]

    @property
    def reached_tokens(self) -> int:
        """Tokens it has computed, or had when it was preempted."""
        return max(self.num_computed, self._saved_tokens)

    @property
    def num_partial(self) -> int:
        """Tokens of `reached_tokens` in a page that is not full."""
        return self.reached_tokens % self.page_tokens

    def partial_key(self) -> bytes:
        """Key of the page that holds `num_partial` tokens; private to this sequence."""
        end = self.reached_tokens
        start = end - self.num_partial
        assert start < end
        keys = self.page_keys(start // self.page_tokens)
        parent = (keys[-1] if keys else self.root_key) + self.handle.to_bytes(8, "little")
        return page_key(parent, self.tokens[start:end], _marks(self.media, start, end))

    @property
    def is_resumable(self) -> bool:
        """Whether the page it was writing to when it was preempted comes next."""
        start = self._saved_tokens - self._saved_tokens % self.page_tokens
        return self.num_computed == start < self._saved_tokens

    def stop_restoring(self) -> None:
        """What comes next will be computed."""
        self.restorable_pages = 0
        self._saved_tokens = 0

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
        size, known = self.page_tokens, len(self._page_keys)
        if not self.media and known < count:
            parent = self._page_keys[-1] if known else self.root_key
            self._page_keys += page_chain(parent, self.tokens[known * size : count * size], size)
        while len(self._page_keys) < count:
            start = len(self._page_keys) * size
            parent = self._page_keys[-1] if self._page_keys else self.root_key
            marks = _marks(self.media, start, start + size)
            self._page_keys.append(page_key(parent, self.tokens[start : start + size], marks))


def place_media(request: Request, segment_patches: int = NO_SEGMENTS) -> tuple[PlacedMedia, ...]:
    """The media of a request in order of first position.

    Args:
        segment_patches: temporal patches of a clip that the vision tower sees together.
    """
    if not request.media:
        return ()
    assert request.patch_format is not None
    placed = [
        PlacedMedia(
            key=media_key(item, request.patch_format),
            spans=item.spans,
            part_patches=_part_patches(item.grid_thw, segment_patches),
            merged_patches=request.patch_format.merge_size**2,
        )
        for item in request.media
    ]
    return tuple(sorted(placed, key=lambda item: item.first))


def _part_patches(grid_thw: tuple[int, int, int], segment_patches: int) -> tuple[int, ...]:
    t, h, w = grid_thw
    return tuple(min(segment_patches, t - start) * h * w for start in range(0, t, segment_patches))


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
