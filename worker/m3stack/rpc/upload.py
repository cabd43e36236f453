"""Receives the patches of a request: in order, whole, on time, and as announced."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from m3stack.errors import ErrorKind, WorkerError
from m3stack.rpc.shared_pieces import read_piece
from m3stack.worker.v1 import worker_pb2 as pb

MAX_CHUNK_BYTES = 2 << 20
# a client that sends less than that in a whole timeout makes no progress
PROGRESS_BYTES = 64 << 10

ReadChunk = Callable[[], Awaitable[pb.GenerateRequest | None]]


@dataclass(frozen=True, slots=True)
class NeededItem:
    """An item whose patches the worker asked for."""

    index: int
    num_bytes: int


class Upload:
    """One request's upload.

    Args:
        read: gives the next message of the call, or None at its end.
        timeout_s: longest time without progress.
    """

    def __init__(self, read: ReadChunk, timeout_s: float) -> None:
        self._read = read
        self._timeout_s = timeout_s
        self._deadline = 0.0
        self._since_progress = 0
        self.was_shared = False
        """Whether a piece of it was left in the client's memory."""

    async def receive(self, needed: Sequence[NeededItem]) -> Mapping[int, bytearray]:
        """Patch bytes of each needed item, by index.

        Raises:
            WorkerError: DEADLINE_EXCEEDED if the client is too slow, INVALID_REQUEST if it sends
                something else, MEDIA_REJECTED if an item is broken; names the item.
        """
        self._progressed()
        return {item.index: await self._receive_item(item) for item in needed}

    async def _receive_item(self, item: NeededItem) -> bytearray:
        name = f"media[{item.index}]"
        # allocated once; the chunks are written into place
        buffer = bytearray(item.num_bytes)
        view = memoryview(buffer)
        digest = hashlib.sha256()
        received = 0
        while received < item.num_bytes:
            chunk = await self._next_chunk(name, f"{received} of {item.num_bytes} bytes")
            size = chunk.shared.num_bytes if chunk.HasField("shared") else len(chunk.data)
            _check_place(chunk, size, item, received)
            place = view[received : received + size]
            if chunk.HasField("shared"):
                self.was_shared = True
                read_piece(chunk.shared, place, name)
            else:
                place[:] = chunk.data
            # of the worker's own copy
            digest.update(place)
            received += size
            self._since_progress += size
            if self._since_progress >= PROGRESS_BYTES or received == item.num_bytes:
                self._progressed()
            is_last = received == item.num_bytes
            if chunk.patches_sha256 and not is_last:
                raise _rejected(name, f"ends at {received} of {item.num_bytes} bytes")
            if is_last and chunk.patches_sha256 != digest.digest():
                raise _rejected(
                    name,
                    "has no patches_sha256 on its last chunk"
                    if not chunk.patches_sha256
                    else "does not match its patches_sha256: the upload is damaged",
                )
        return buffer

    async def _next_chunk(self, name: str, progress: str) -> pb.MediaChunk:
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._read()
        except TimeoutError:
            raise WorkerError(
                ErrorKind.DEADLINE_EXCEEDED,
                f"{name} made no progress for {self._timeout_s:g} s: {progress} arrived",
                name,
            ) from None
        if message is None:
            raise _rejected(name, f"is incomplete: the upload ended after {progress}")
        if message.WhichOneof("body") != "chunk":
            raise WorkerError(
                ErrorKind.INVALID_REQUEST, f"expected a chunk of {name}, got another header", name
            )
        return message.chunk

    def _progressed(self) -> None:
        self._deadline = asyncio.get_running_loop().time() + self._timeout_s
        self._since_progress = 0


def _check_place(chunk: pb.MediaChunk, size: int, item: NeededItem, received: int) -> None:
    name = f"media[{item.index}]"
    if chunk.data and chunk.HasField("shared"):
        raise _rejected(name, "has a chunk of both data and shared memory")
    if chunk.item_index != item.index:
        raise _rejected(name, f"was due, a chunk of media[{chunk.item_index}] came")
    if chunk.offset != received:
        raise _rejected(name, f"was due at offset {received}, a chunk at {chunk.offset} came")
    if not 0 < size <= MAX_CHUNK_BYTES:
        raise _rejected(name, f"has a chunk of {size} bytes, expected 1 to {MAX_CHUNK_BYTES}")
    if received + size > item.num_bytes:
        raise _rejected(
            name, f"has {received + size} bytes or more, {item.num_bytes} were announced"
        )


def _rejected(name: str, complaint: str) -> WorkerError:
    return WorkerError(ErrorKind.MEDIA_REJECTED, f"{name} {complaint}", name)
