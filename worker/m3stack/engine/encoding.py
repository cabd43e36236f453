"""Which parts of media items a step must encode before its rows can be computed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from m3stack.cache.media import MediaLedger
from m3stack.engine.plan import EncodeItem
from m3stack.engine.sequence import Sequence


@dataclass(slots=True)
class EncodeDraft:
    """What a step in the making encodes, by item, and how many patches that is."""

    items: dict[bytes, EncodeItem] = field(default_factory=dict[bytes, EncodeItem])
    num_patches: int = 0


class EncodePlanner:
    """Plans encodes within a step's bound of patches; the scheduler owns it."""

    def __init__(self, media: MediaLedger, max_patches: int) -> None:
        self._media = media
        self._max_patches = max_patches

    def is_due(self, sequence: Sequence, end: int) -> bool:
        """Whether something before `end` is not encoded yet."""
        return any(
            item.end > sequence.num_computed
            and item.first < end
            and item.reach(self._done(item.key, len(item.part_patches))) < end
            and self._done(item.key, len(item.part_patches)) < len(item.part_patches)
            for item in sequence.media
        )

    def up_to(self, draft: EncodeDraft, sequence: Sequence, end: int) -> int:
        """Plans the encoding of media before `end`; returns how far features will reach."""
        for item in sequence.media:
            if item.first >= end:
                break
            if item.end <= sequence.num_computed:
                continue
            planned = draft.items.get(item.key)
            done = self._done(item.key, len(item.part_patches))
            if planned is not None:
                done = planned.first_part + planned.num_parts
            while done < len(item.part_patches) and item.reach(done) < end:
                total = draft.num_patches + item.part_patches[done]
                if draft.items and total > self._max_patches:
                    return max(item.reach(done), sequence.num_computed)
                planned = draft.items.get(item.key)
                draft.items[item.key] = (
                    EncodeItem(sequence.handle, item.key, done, 1)
                    if planned is None
                    else replace(planned, num_parts=planned.num_parts + 1)
                )
                draft.num_patches = total
                done += 1
        return end

    def _done(self, key: bytes, num_parts: int) -> int:
        return self._media.encoded_parts(key, num_parts)
