"""Runs the vision tower once per media item and keeps the features while the ledger says so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from m3stack.batch import PatchBatch
from m3stack.cache.media import MediaLedger, media_key
from m3stack.types import MediaItem, PatchFormat, Request

_log = logging.getLogger(__name__)

EncodeMedia = Callable[[PatchBatch], list[Tensor]]


@dataclass(frozen=True, slots=True)
class _Upload:
    """Patches that wait for their encoding."""

    item: MediaItem
    patch_format: PatchFormat


class Encoder:
    """Media features by key. The engine thread owns it; the ledger decides what is kept.

    Args:
        encode: the model's vision tower and projector.
        ledger: books on what is held; told of every item encoded here.
        device: where patches and features live.
    """

    def __init__(self, encode: EncodeMedia, ledger: MediaLedger, device: torch.device) -> None:
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
        """[n, M] features of an encoded item that a running request has pinned."""
        return self._features[key]

    def run(self, wanted: Sequence[tuple[int, bytes]]) -> Mapping[int, str]:
        """Encodes items, each named by the request that brings its patches, and its key.

        Returns:
            What went wrong, for the requests whose item could not be encoded.
        """
        for key in self._ledger.take_evicted():
            self._features.pop(key, None)
        failures: dict[int, str] = {}
        batches: dict[PatchFormat, list[tuple[int, bytes, MediaItem]]] = {}
        for handle, key in wanted:
            upload = self._uploads[handle][key]
            batches.setdefault(upload.patch_format, []).append((handle, key, upload.item))
        for patch_format, entries in batches.items():
            failures.update(self._run_batch(patch_format, entries))
        return failures

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

    def _run_batch(
        self, patch_format: PatchFormat, entries: Sequence[tuple[int, bytes, MediaItem]]
    ) -> Mapping[int, str]:
        try:
            features = self._encode(self._patch_batch(patch_format, entries))
            _check_features(features, entries, patch_format)
        except Exception as error:  # noqa: BLE001 - whatever an item did, it alone fails
            if len(entries) == 1:
                handle, key, _ = entries[0]
                _log.exception("media_encode_failed handle=%d key=%s", handle, key.hex()[:16])
                return {handle: f"the vision encoder failed: {type(error).__name__}"}
            # one bad item must not take the others with it
            failures: dict[int, str] = {}
            for entry in entries:
                failures.update(self._run_batch(patch_format, [entry]))
            return failures
        for (_, key, _), tensor in zip(entries, features, strict=True):
            self._features[key] = tensor
            self._ledger.mark_encoded(key)
        return {}

    def _patch_batch(
        self, patch_format: PatchFormat, entries: Sequence[tuple[int, bytes, MediaItem]]
    ) -> PatchBatch:
        items = [item for _, _, item in entries]
        return PatchBatch(
            patches=tuple(self._to_device(item) for item in items),
            frames_per_patch=tuple(item.frames_per_patch for item in items),
            grids_thw=tuple(item.grid_thw for item in items),
            mean=patch_format.mean,
            std=patch_format.std,
        )

    def _to_device(self, item: MediaItem) -> Tensor:
        assert item.patches is not None
        num_patches = item.grid_thw[0] * item.grid_thw[1] * item.grid_thw[2]
        # frombuffer shares the upload's memory: no copy on the host
        flat = torch.frombuffer(item.patches, dtype=torch.uint8)
        return flat.view(num_patches, -1).to(self._device)


def _check_features(
    features: Sequence[Tensor],
    entries: Sequence[tuple[int, bytes, MediaItem]],
    patch_format: PatchFormat,
) -> None:
    for (_, _, item), tensor in zip(entries, features, strict=True):
        t, h, w = item.grid_thw
        expected = t * h * w // patch_format.merge_size**2
        if tensor.shape[0] != expected:
            raise ValueError(f"{tensor.shape[0]} features for a grid that gives {expected}")
