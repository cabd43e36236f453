"""Runs the vision tower once per part of a media item; keeps features while the ledger says so.

A part is a run of whole attention segments of a clip, which see nothing of each other, or a still.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from m3stack.batch import PatchBatch
from m3stack.cache.media import media_key
from m3stack.engine.plan import EncodeItem
from m3stack.engine.sequence import NO_SEGMENTS
from m3stack.types import MediaItem, PatchFormat, Request

_log = logging.getLogger(__name__)

EncodeMedia = Callable[[PatchBatch], list[Tensor]]


class FeatureBook(Protocol):
    """What the encoder asks and tells of the media ledger."""

    def is_encoded(self, key: bytes) -> bool: ...

    def mark_encoded(self, key: bytes, num_parts: int = 1, *, is_whole: bool = True) -> None: ...


class FollowerBook:
    """The book of a rank that follows: what is kept is decided where the ledger is."""

    def __init__(self) -> None:
        self._encoded: set[bytes] = set()

    def is_encoded(self, key: bytes) -> bool:
        return key in self._encoded

    def mark_encoded(self, key: bytes, num_parts: int = 1, *, is_whole: bool = True) -> None:
        if is_whole:
            self._encoded.add(key)

    def forget(self, keys: Sequence[bytes]) -> None:
        self._encoded.difference_update(keys)


@dataclass(frozen=True, slots=True)
class _Upload:
    """Patches that wait for their encoding."""

    item: MediaItem
    patch_format: PatchFormat


@dataclass(frozen=True, slots=True)
class _Part:
    """Temporal patches `start .. end - 1` of an item, to be encoded now."""

    handle: int
    key: bytes
    item: MediaItem
    patch_format: PatchFormat
    start: int
    end: int
    num_parts: int
    """Of the item, encoded once this one is."""

    @property
    def grid_thw(self) -> tuple[int, int, int]:
        return (self.end - self.start, *self.item.grid_thw[1:])

    @property
    def tokens_per_slice(self) -> int:
        """Features of one temporal patch."""
        _, h, w = self.item.grid_thw
        return h * w // self.patch_format.merge_size**2


class Encoder:
    """Media features by key. The engine thread owns it; the ledger decides what is kept.

    Args:
        encode: the model's vision tower and projector.
        ledger: books on what is held; told of every item encoded here.
        device: where patches and features live.
        segment_patches: temporal patches of a clip that the tower sees together.
    """

    def __init__(
        self,
        encode: EncodeMedia,
        ledger: FeatureBook,
        device: torch.device,
        *,
        segment_patches: int = NO_SEGMENTS,
    ) -> None:
        self._segment_patches = segment_patches
        self._encode = encode
        self._ledger = ledger
        self._device = device
        self._features: dict[bytes, Tensor] = {}
        self._uploads: dict[int, dict[bytes, _Upload]] = {}

    def begin(self, handle: int, request: Request) -> None:
        """Takes over the patches of a request."""
        if request.patch_format is None:
            return
        uploads = {
            media_key(item, request.patch_format): _Upload(item, request.patch_format)
            for item in request.media
            if item.patches is not None
        }
        if uploads:
            self._uploads[handle] = uploads

    def forget(self, handle: int) -> None:
        """Drops the patches of a request; its features stay while the ledger keeps them."""
        self._uploads.pop(handle, None)

    def holds(self, key: bytes) -> bool:
        """Whether the features of a pinned item exist."""
        return self._ledger.is_encoded(key)

    def features(self, key: bytes) -> Tensor:
        """[n, M] features of a pinned item; those of parts not yet encoded are undefined."""
        return self._features[key]

    def adopt(self, key: bytes, features: Tensor) -> None:
        """Takes over all features [n, M] of an item that were encoded elsewhere.

        The book of this rank is told by whoever brings them.
        """
        self._features[key] = features

    def drop(self, keys: Sequence[bytes]) -> None:
        """Frees the features of items that were evicted."""
        for key in keys:
            self._features.pop(key, None)

    def run(self, wanted: Sequence[EncodeItem]) -> Mapping[int, str]:
        """Encodes parts of items, all of one format together.

        Returns:
            What went wrong, for the requests whose item could not be encoded.
        """
        failures: dict[int, str] = {}
        batches: dict[PatchFormat, list[_Part]] = {}
        for encode in wanted:
            part = self._part(encode)
            batches.setdefault(part.patch_format, []).append(part)
        for patch_format, parts in batches.items():
            failures.update(self._run_batch(patch_format, parts))
        return failures

    def _part(self, encode: EncodeItem) -> _Part:
        upload = self._uploads[encode.handle][encode.key]
        num_parts = encode.first_part + encode.num_parts
        return _Part(
            handle=encode.handle,
            key=encode.key,
            item=upload.item,
            patch_format=upload.patch_format,
            start=encode.first_part * self._segment_patches,
            end=min(num_parts * self._segment_patches, upload.item.grid_thw[0]),
            num_parts=num_parts,
        )

    def settle(self, handle: int) -> bool:
        """Drops patches whose features exist; True when that leaves the request none to keep."""
        uploads = self._uploads.get(handle)
        if uploads is None:
            return False
        for key in [key for key in uploads if self.holds(key)]:
            del uploads[key]
        if not uploads:
            del self._uploads[handle]
        return not uploads

    def _run_batch(self, patch_format: PatchFormat, parts: Sequence[_Part]) -> Mapping[int, str]:
        try:
            features = self._encode(self._patch_batch(patch_format, parts))
            _check_features(features, parts)
        except Exception as error:  # noqa: BLE001 - whatever an item did, it alone fails
            if len(parts) == 1:
                handle, key = parts[0].handle, parts[0].key
                _log.exception("media_encode_failed handle=%d key=%s", handle, key.hex()[:16])
                return {handle: f"the vision encoder failed: {type(error).__name__}"}
            # one bad item must not take the others with it
            failures: dict[int, str] = {}
            for part in parts:
                failures.update(self._run_batch(patch_format, [part]))
            return failures
        for part, tensor in zip(parts, features, strict=True):
            self._keep(part, tensor)
        return {}

    def _keep(self, part: _Part, features: Tensor) -> None:
        num_slices = part.item.grid_thw[0]
        is_whole = part.end == num_slices
        if part.start == 0:
            self._features[part.key] = (
                features
                if is_whole
                else features.new_empty(num_slices * part.tokens_per_slice, features.shape[1])
            )
        if not (part.start == 0 and is_whole):
            first, last = part.start * part.tokens_per_slice, part.end * part.tokens_per_slice
            self._features[part.key][first:last] = features
        self._ledger.mark_encoded(part.key, part.num_parts, is_whole=is_whole)

    def _patch_batch(self, patch_format: PatchFormat, parts: Sequence[_Part]) -> PatchBatch:
        return PatchBatch(
            patches=tuple(self._to_device(part) for part in parts),
            frames_per_patch=tuple(part.item.frames_per_patch for part in parts),
            grids_thw=tuple(part.grid_thw for part in parts),
            mean=patch_format.mean,
            std=patch_format.std,
        )

    def _to_device(self, part: _Part) -> Tensor:
        assert part.item.patches is not None
        t, h, w = part.item.grid_thw
        # frombuffer shares the upload's memory: no copy on the host
        flat = torch.frombuffer(part.item.patches, dtype=torch.uint8)
        rows = flat.view(t * h * w, -1)[part.start * h * w : part.end * h * w]
        return rows.to(self._device)


def _check_features(features: Sequence[Tensor], parts: Sequence[_Part]) -> None:
    for part, tensor in zip(parts, features, strict=True):
        expected = part.grid_thw[0] * part.tokens_per_slice
        if tensor.shape[0] != expected:
            raise ValueError(f"{tensor.shape[0]} features for a grid that gives {expected}")
