"""What a way of moving contents between workers must do; gRPC is one (`rpc.transfer_client`).

A filling over NIXL or Mooncake reads the other worker's memory instead of a stream and gives the
same: what the other one holds, then each content with its hash. It has two halves: a `Transport` on
the worker that fetches, an `Outlet` on the one that is asked, which takes what it hands out from
`handing_out`. `tests/worker/transfer/test_fillings.py` holds every filling to what stands here, and
has a second one beside gRPC whose contents are read from mapped memory. A filling is made, and
begins to listen, where the worker is put together (`serve`), and is given to `transfers.Transfers`.

What a filling need not do: check hashes, resume, wait between attempts, bound how many run at once,
leave silent sources alone. Whoever takes contents does (`pull`, `sources`).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from m3stack.transfer.port import Data
from m3stack.types import Source

if TYPE_CHECKING:
    from m3stack.transfer.store import ContentStore

# hashing takes less than a millisecond below
LARGE_BYTES = 256 << 10


class ContentKind(Enum):
    """What a key names; value = proto number."""

    PAGE = 1
    FEATURES = 2


@dataclass(frozen=True, slots=True)
class Wanted:
    """Contents to be fetched; fields as in `worker.proto`.

    Attributes:
        sizes: bytes of each content; one that is announced with more or fewer is not taken in.
    """

    kind: ContentKind
    layout: str
    epoch: int
    keys: tuple[bytes, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.sizes) == len(self.keys)


@dataclass(frozen=True, slots=True)
class Holdings:
    """Which of the wanted keys the source holds; comes first."""

    epoch: int
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Content:
    """One content, whole.

    Attributes:
        index: of its key among the wanted ones.
        data: the taker's for as long as it holds it, also when the fetch has ended: memory that is
            used again is copied first. It need not be writable.
        sha256: what the source says `content_hash` of it is.
    """

    index: int
    data: Data
    sha256: bytes


class TransferError(Exception):
    """A transfer broke; what has come before is good.

    Attributes:
        is_final: whether asking the same source again is of no use.
        is_silent: whether the source gave no sign at all, which cost some seconds to find out.
    """

    def __init__(self, reason: str, *, is_final: bool = False, is_silent: bool = False) -> None:
        super().__init__(reason)
        self.is_final = is_final
        self.is_silent = is_silent


class Transport(Protocol):
    """Fetches contents from other workers; belongs to one event loop, which it never blocks."""

    def fetch(self, source: Source, wanted: Wanted) -> AsyncGenerator[Holdings | Content, None]:
        """Holdings, then the contents that are held, in the order of their keys.

        Several fetches run at once, also from one source. One that is closed early, or cancelled,
        lets go of all that it holds on both sides. No room is made for a content that is announced
        with another size than `wanted` says.

        Raises:
            TransferError: the source is gone, stands still, refuses, or says nonsense; final if
                it refuses or says nonsense, silent if it gave no sign for some seconds.
        """
        ...

    async def close(self) -> None:
        """Ends all connections."""
        ...


class Outlet(Protocol):
    """Hands contents out to the `Transport` of others; until it is opened it refuses all."""

    def open_for(self, store: ContentStore) -> None:
        """These are the contents: what `handing_out` makes of them."""
        ...

    def refuse(self, reason: str) -> None:
        """There is nothing to be had here, ever."""
        ...

    async def close(self) -> None:
        """Lets go of all that it listens at and holds; what is under way is cut."""
        ...


def content_hash(key: bytes, data: Data) -> bytes:
    """SHA-256 over key and content: one content in the place of another is noticed as well."""
    digest = hashlib.sha256(key)
    digest.update(data)
    return digest.digest()


async def content_hash_of(key: bytes, data: Data) -> bytes:
    """The same, beside the event loop if it takes long."""
    if len(data) < LARGE_BYTES:
        return content_hash(key, data)
    return await asyncio.to_thread(content_hash, key, data)
