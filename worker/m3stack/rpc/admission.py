"""Lets requests with media in while there is room for their features and their uploads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass

from m3stack.cache.media import MediaClaim, MediaLedger
from m3stack.errors import ErrorKind, WorkerError


@dataclass(frozen=True, slots=True)
class MediaDemand:
    """What one request asks for: an item's features, and the bytes to upload if it is not held."""

    claim: MediaClaim
    patch_bytes: int


class Reservation:
    """Room granted to a request: pinned features and upload bytes.

    Attributes:
        needed: which items of the request must be uploaded.
    """

    def __init__(
        self, admission: MediaAdmission, demands: Sequence[MediaDemand], needed: Sequence[int]
    ) -> None:
        self._admission = admission
        self._keys = [demand.claim.key for demand in demands]
        self._demands = demands
        self._upload_bytes = sum(demands[index].patch_bytes for index in needed)
        self.needed = tuple(needed)

    @property
    def upload_bytes(self) -> int:
        return self._upload_bytes

    @property
    def missing(self) -> list[tuple[bytes, int]]:
        """Keys of the needed items, and the bytes their features take."""
        claims = [self._demands[index].claim for index in self.needed]
        return [(claim.key, claim.feature_bytes) for claim in claims]

    def found(self, keys: Container[bytes]) -> None:
        """The features of some needed items have come from elsewhere: no patches are to come."""
        self.needed = tuple(i for i in self.needed if self._demands[i].claim.key not in keys)
        left = sum(self._demands[index].patch_bytes for index in self.needed)
        freed, self._upload_bytes = self._upload_bytes - left, left
        self._admission.uploaded(freed)

    def release_upload(self) -> None:
        """The patches are gone; may be called again."""
        freed, self._upload_bytes = self._upload_bytes, 0
        self._admission.uploaded(freed)

    def release_features(self) -> None:
        """Unpins the items; only for a request that never reached the engine."""
        keys, self._keys = self._keys, []
        self._admission.unpin(keys)


class MediaAdmission:
    """First come, first served; belongs to one event loop.

    A request gets everything it asks for at once or waits in line, so no two requests can block
    each other while holding a part.

    Args:
        ledger: books on features; its release callback is taken over.
        max_upload_bytes: most bytes of patches received and not yet encoded.
        timeout_s: how long a request may wait in line.
    """

    def __init__(self, ledger: MediaLedger, *, max_upload_bytes: int, timeout_s: float) -> None:
        self._ledger = ledger
        self._max_upload_bytes = max_upload_bytes
        self._timeout_s = timeout_s
        self._upload_bytes = 0
        self._line: deque[asyncio.Event] = deque()
        self._loop = asyncio.get_running_loop()
        ledger.on_release(self._wake_soon)

    @property
    def upload_bytes(self) -> int:
        return self._upload_bytes

    async def reserve(self, demands: Sequence[MediaDemand]) -> Reservation:
        """Room for all items of a request.

        Raises:
            WorkerError: MEDIA_REJECTED if it could never fit; OVERLOADED if its turn did not come.
        """
        self._check_possible(demands)
        turn = asyncio.Event()
        self._line.append(turn)
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    if self._line[0] is turn:
                        reservation = self._try(demands)
                        if reservation is not None:
                            return reservation
                    await turn.wait()
                    turn.clear()
        except TimeoutError:
            raise WorkerError(
                ErrorKind.OVERLOADED,
                f"no room for the request's media within {self._timeout_s:g} s",
            ) from None
        finally:
            self._line.remove(turn)
            self._wake()

    def uploaded(self, num_bytes: int) -> None:
        """Bytes of patches that are gone; called by reservations."""
        self._upload_bytes -= num_bytes
        self._wake()

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Called by reservations."""
        self._ledger.release(keys)

    def _try(self, demands: Sequence[MediaDemand]) -> Reservation | None:
        # items only ever become held between here and `reserve`: this is an upper bound
        held = [self._ledger.is_encoded(demand.claim.key) for demand in demands]
        at_most = sum(demands[index].patch_bytes for index in _needed(demands, held))
        if self._upload_bytes + at_most > self._max_upload_bytes:
            return None
        reserved = self._ledger.reserve([demand.claim for demand in demands])
        if reserved is None:
            return None
        reservation = Reservation(self, demands, _needed(demands, reserved))
        self._upload_bytes += reservation.upload_bytes
        return reservation

    def _check_possible(self, demands: Sequence[MediaDemand]) -> None:
        once = {demand.claim.key: demand for demand in demands}.values()
        feature_bytes = sum(demand.claim.feature_bytes for demand in once)
        upload_bytes = sum(demand.patch_bytes for demand in once)
        for what, size, limit in (
            ("features", feature_bytes, self._ledger.budget_bytes),
            ("patches", upload_bytes, self._max_upload_bytes),
        ):
            if size > limit:
                raise WorkerError(
                    ErrorKind.MEDIA_REJECTED,
                    f"the {what} of the request's media take {size} bytes, "
                    f"this worker has room for {limit}",
                    "media",
                )

    def _wake(self) -> None:
        if self._line:
            self._line[0].set()

    def _wake_soon(self) -> None:
        # the ledger is released on the engine thread; a closed loop has nobody left to wake
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)


def _needed(demands: Sequence[MediaDemand], held: Sequence[bool]) -> list[int]:
    """Indices of the items to upload; one that a request names twice is uploaded once."""
    seen: set[bytes] = set()
    needed: list[int] = []
    for index, (demand, is_held) in enumerate(zip(demands, held, strict=True)):
        if not is_held and demand.claim.key not in seen:
            needed.append(index)
        seen.add(demand.claim.key)
    return needed
