"""Which media features the worker holds or has promised room for, within a byte budget.

The RPC side asks and pins before an upload, the engine side records what it encoded; this ledger
is the one place both touch, so a lock guards it (held for microseconds, never over a wait).
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from m3stack.types import MediaItem, PatchFormat


def media_key(item: MediaItem, patch_format: PatchFormat) -> bytes:
    """Identity of an item's features: its content hash and all that decides how it is read.

    A client that repeats a hash with another grid or format gets another key, hence no hit.
    """
    digest = hashlib.blake2b(digest_size=32)
    digest.update(
        struct.pack(
            "<32sIIIIIIIII",
            item.media_hash,
            item.kind.value,
            *item.grid_thw,
            item.frames_per_patch,
            patch_format.channels,
            patch_format.patch_size,
            patch_format.temporal_patch_size,
            patch_format.merge_size,
        )
    )
    digest.update(struct.pack(f"<I{len(patch_format.mean)}f", 0, *patch_format.mean))
    digest.update(struct.pack(f"<I{len(patch_format.std)}f", 1, *patch_format.std))
    return digest.digest()


@dataclass(frozen=True, slots=True)
class MediaClaim:
    """One item a request needs, and the bytes its features take."""

    key: bytes
    feature_bytes: int


@dataclass(slots=True)
class _Entry:
    feature_bytes: int
    pins: int = 0
    num_parts: int = 0
    is_encoded: bool = False


class MediaLedger:
    """Books on media features: pinned by requests, encoded or not, idle ones least recent first.

    A request pins all its items at once or none, so requests that wait never hold what others
    wait for. A pinned entry is never evicted, hence what `reserve` reported as held stays held.

    Args:
        budget_bytes: most bytes of features, promised ones included.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._entries: dict[bytes, _Entry] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._evicted: list[bytes] = []
        self._booked_bytes = 0
        self._on_release: Callable[[], None] | None = None

    @property
    def budget_bytes(self) -> int:
        return self._budget_bytes

    @property
    def booked_bytes(self) -> int:
        """Bytes of all entries, pinned or idle."""
        with self._lock:
            return self._booked_bytes

    @property
    def num_pinned(self) -> int:
        with self._lock:
            return sum(entry.pins > 0 for entry in self._entries.values())

    def on_release(self, callback: Callable[[], None]) -> None:
        """Sets what is called, from any thread and outside the lock, after pins were released."""
        self._on_release = callback

    def reserve(self, claims: Sequence[MediaClaim]) -> tuple[bool, ...] | None:
        """Pins every claimed item; True where its features are held already.

        Returns None, and pins nothing, while there is no room.
        """
        with self._lock:
            fresh = {claim.key: claim for claim in claims if claim.key not in self._entries}
            missing_bytes = sum(claim.feature_bytes for claim in fresh.values())
            claimed = {claim.key for claim in claims}
            evictable_bytes = sum(
                self._entries[key].feature_bytes for key in self._idle if key not in claimed
            )
            if self._booked_bytes - evictable_bytes + missing_bytes > self._budget_bytes:
                return None
            for key in claimed:
                self._idle.pop(key, None)
            while self._booked_bytes + missing_bytes > self._budget_bytes:
                self._drop(self._idle.popitem(last=False)[0])
            held = tuple(
                claim.key in self._entries and self._entries[claim.key].is_encoded
                for claim in claims
            )
            for claim in fresh.values():
                self._entries[claim.key] = _Entry(claim.feature_bytes)
            self._booked_bytes += missing_bytes
            for claim in claims:
                self._entries[claim.key].pins += 1
            return held

    def release(self, keys: Sequence[bytes]) -> None:
        """Gives up one pin a key; features nobody pins are kept until room is needed."""
        if not keys:
            return
        with self._lock:
            for key in keys:
                entry = self._entries[key]
                assert entry.pins > 0, "a media item was released once too often"
                entry.pins -= 1
                if entry.pins == 0 and entry.is_encoded:
                    self._idle[key] = None
                elif entry.pins == 0:
                    self._drop(key)
        if self._on_release is not None:
            self._on_release()

    def is_encoded(self, key: bytes) -> bool:
        """Whether the features of a pinned item exist."""
        with self._lock:
            entry = self._entries.get(key)
            return entry is not None and entry.is_encoded

    def encoded_parts(self, key: bytes, num_parts: int) -> int:
        """How many parts of a pinned item of `num_parts` are encoded."""
        with self._lock:
            entry = self._entries[key]
            return num_parts if entry.is_encoded else entry.num_parts

    def mark_encoded(self, key: bytes, num_parts: int = 1, *, is_whole: bool = True) -> None:
        """Records that the features of the first parts of a pinned item exist now."""
        with self._lock:
            entry = self._entries[key]
            entry.num_parts, entry.is_encoded = num_parts, is_whole

    def is_promised(self, key: bytes) -> bool:
        """Whether somebody waits for the features of an item."""
        with self._lock:
            entry = self._entries.get(key)
            return entry is not None and not entry.is_encoded

    def adopt(self, key: bytes) -> bool:
        """Records that the features of an item have come from elsewhere, if anybody wants them.

        They take the place of those that were to be freed, if the item had been evicted before.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.is_encoded:
                return False
            entry.num_parts, entry.is_encoded = 1, True
            self._evicted = [evicted for evicted in self._evicted if evicted != key]
            return True

    def take_evicted(self) -> list[bytes]:
        """Keys whose features the encoder must free; each is reported once."""
        with self._lock:
            # an evicted item may have been claimed anew meanwhile; its old features go all the same
            evicted, self._evicted = self._evicted, []
            return evicted

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        self._booked_bytes -= entry.feature_bytes
        if entry.num_parts:
            self._evicted.append(key)
