"""A second way of transfer: contents stand in memory that the other worker maps and reads itself.

The shape of one over NIXL or Mooncake, for workers of one host: a small control connection says
what is held and where it stands, and the bytes themselves are read by whoever wants them.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import tempfile
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path

from m3stack.errors import ErrorKind, WorkerError
from m3stack.transfer.handing_out import Asked, checked, contents, holdings
from m3stack.transfer.interface import Content, Holdings, TransferError, Wanted
from m3stack.transfer.store import ContentStore
from m3stack.types import Source

MAX_LINE_BYTES = 1 << 20


class MappedOutlet:
    """The source's half.

    Args:
        folder: where contents stand until they have been read; both workers see it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._store: ContentStore | None = None
        self._refusal = WorkerError(ErrorKind.WORKER_UNAVAILABLE, "the worker is still loading")
        self._server: asyncio.Server | None = None
        self._calls: set[asyncio.Task[None]] = set()

    async def listen(self) -> Source:
        """Begins to answer; says where."""
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", limit=MAX_LINE_BYTES)
        host, port = self._server.sockets[0].getsockname()
        return Source(f"{host}:{port}")

    def open_for(self, store: ContentStore) -> None:
        self._store = store

    def refuse(self, reason: str) -> None:
        self._refusal = WorkerError(ErrorKind.INVALID_REQUEST, reason)

    @property
    def num_calls(self) -> int:
        """Calls that have not ended."""
        return len(self._calls)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for call in tuple(self._calls):
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            await self._serve(reader, writer)
        except WorkerError as error:
            is_final = error.kind is ErrorKind.INVALID_REQUEST
            writer.write(_line({"error": error.message, "is_final": is_final}))
        except (ConnectionError, asyncio.IncompleteReadError):
            # whoever asked has left
            pass
        finally:
            self._calls.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = json.loads(await reader.readuntil(b"\n"))
        if self._store is None:
            raise self._refusal
        keys = [bytes.fromhex(key) for key in request.pop("keys")]
        asked = checked(self._store, keys=keys, **request)
        held = await holdings(self._store, asked)
        writer.write(_line({"epoch": held.epoch, "indices": held.indices}))
        async with aclosing(contents(self._store, asked, held)) as found:
            async for content in found:
                await self._lay_out(asked, content, reader, writer)
        writer.write(_line({"is_end": True}))
        await writer.drain()

    async def _lay_out(
        self,
        asked: Asked,
        content: Content,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """One content, there until it has been mapped."""
        descriptor, name = tempfile.mkstemp(dir=self._folder, prefix=asked.kind.name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content.data)
            place = {"index": content.index, "name": name, "sha256": content.sha256.hex()}
            writer.write(_line(place | {"num_bytes": len(content.data)}))
            await writer.drain()
            await reader.readuntil(b"\n")
        finally:
            # memory that is mapped lives on
            os.unlink(name)


class MappedTransport:
    """The target's half.

    Args:
        silence_s: longest silence of a source.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._writers: set[asyncio.StreamWriter] = set()

    async def fetch(
        self, source: Source, wanted: Wanted
    ) -> AsyncGenerator[Holdings | Content, None]:
        host, _, port = source.address.rpartition(":")
        try:
            reader, writer = await asyncio.open_connection(host, int(port), limit=MAX_LINE_BYTES)
        except OSError as error:
            raise TransferError(f"unreachable: {error}") from error
        self._writers.add(writer)
        try:
            request = {"kind": wanted.kind.value, "layout": wanted.layout, "epoch": wanted.epoch}
            writer.write(_line(request | {"keys": [key.hex() for key in wanted.keys]}))
            said = await self._read(reader)
            yield Holdings(said["epoch"], tuple(said["indices"]))
            last = -1
            while not (said := await self._read(reader)).get("is_end"):
                index, num_bytes = said["index"], said["num_bytes"]
                if not last < index < len(wanted.keys) or num_bytes != wanted.sizes[index]:
                    raise TransferError("the source says what was not asked for", is_final=True)
                last = index
                data = _mapped(Path(said["name"]), num_bytes)
                writer.write(b"\n")
                yield Content(index, data, bytes.fromhex(said["sha256"]))
        except (ConnectionError, asyncio.IncompleteReadError, FileNotFoundError) as error:
            raise TransferError(f"the source has gone: {error}") from error
        finally:
            self._writers.discard(writer)
            writer.close()

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> dict:
        try:
            async with asyncio.timeout(self._silence_s):
                said = json.loads(await reader.readuntil(b"\n"))
        except TimeoutError:
            text = f"the source was silent for {self._silence_s:g} s"
            raise TransferError(text, is_final=True, is_silent=True) from None
        if "error" in said:
            raise TransferError(said["error"], is_final=said["is_final"])
        return said


def _mapped(path: Path, num_bytes: int) -> memoryview:
    """The bytes where they stand, not to be written to; mapped for as long as somebody looks."""
    if num_bytes == 0:
        return memoryview(b"")
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_READ))


def _line(message: dict) -> bytes:
    with suppress(TypeError):
        return json.dumps(message).encode() + b"\n"
    raise AssertionError(f"no JSON: {message!r}")
