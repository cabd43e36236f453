"""Reads tensors of safetensors files piece by piece through one buffer of fixed size.

Plain reads rather than a mapping: the host memory in use is the buffer, whatever the files' size,
and a file that shrinks or fails under way is an error instead of a dead process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from m3stack.errors import StartupError
from m3stack.weight_files.header import TORCH_DTYPES, TensorEntry

BUFFER_BYTES = 64 << 20


class Buffer:
    """Host memory that pieces of tensors pass through; pinned, so that GPUs copy from it fast."""

    def __init__(self, num_bytes: int = BUFFER_BYTES, *, pinned: bool = False) -> None:
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        # numpy's types do not say that arrays are buffers
        self._view = memoryview(self._bytes.numpy())  # pyright: ignore[reportArgumentType]

    def __len__(self) -> int:
        return self._bytes.numel()

    def fill(self, file: int, start: int, num_bytes: int) -> int:
        """Reads bytes of an open file to the front; returns how many it could."""
        done = 0
        while done < num_bytes:
            count = os.preadv(file, [self._view[done:num_bytes]], start + done)
            if count == 0:
                break
            done += count
        return done

    def as_tensor(self, dtype: torch.dtype, shape: tuple[int, ...], num_bytes: int) -> Tensor:
        """The front of the buffer as a tensor, valid until the next `fill`."""
        return self._bytes[:num_bytes].view(dtype).view(shape)


class FileReader:
    """One open file; a context manager.

    Args:
        path: of the file.
        buffer: shared with other readers, one at a time.
    """

    def __init__(self, path: Path, buffer: Buffer) -> None:
        self._path, self._buffer = path, buffer
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise StartupError(f"{path} cannot be read: {error.strerror}") from error

    def __enter__(self) -> FileReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        os.close(self._file)

    def pieces(
        self, name: str, entry: TensorEntry, rows: range, at_most: int | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Some rows of a tensor, as many at a time as the buffer takes.

        Args:
            at_most: bytes of a piece, where less than the buffer is wanted; a row is the least.

        Yields:
            (row of the first one, [rows, values of a row]); a scalar is one row of one value. The
            tensor is a view of the buffer: it must be used up before the next one is asked for.

        Raises:
            StartupError: the bytes cannot be read.
        """
        if entry.num_bytes == 0 or not rows:
            return
        row_bytes = entry.num_bytes // (entry.shape[0] if entry.shape else 1)
        size = len(self._buffer)
        assert row_bytes <= size, f"a row of {name} takes {row_bytes} bytes, the buffer {size}"
        at_once = max(1, min(size, at_most or size) // row_bytes)
        for row in range(rows.start, rows.stop, at_once):
            count = min(at_once, rows.stop - row)
            start, num_bytes = entry.start + row * row_bytes, count * row_bytes
            try:
                done = self._buffer.fill(self._file, start, num_bytes)
                # the kernel reads on while the caller works on this piece
                os.posix_fadvise(self._file, start + num_bytes, size, os.POSIX_FADV_WILLNEED)
            except OSError as error:
                raise self._unreadable(name, error.strerror) from error
            if done < num_bytes:
                raise self._unreadable(name, f"the file ends {num_bytes - done} bytes early")
            dtype = TORCH_DTYPES[entry.dtype]
            yield row, self._buffer.as_tensor(dtype, (count, -1), num_bytes)

    def _unreadable(self, name: str, why: str | None) -> StartupError:
        return StartupError(f"{self._path.name}: tensor {name} cannot be read: {why}")
