"""Writes a safetensors file tensor by tensor, part by part, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from m3stack.errors import StartupError
from m3stack.weight_files.header import header_bytes, num_bytes

UNFINISHED_SUFFIX = ".tmp"

Entries = Mapping[str, tuple[str, tuple[int, ...]]]


class FileWriter:
    """One file of known tensors; a context manager.

    The file has its own name only once it is complete and on disk; before that, and for ever if an
    error ends the `with` block, it has `UNFINISHED_SUFFIX` behind it.

    Args:
        path: of the finished file.
        entries: name -> (safetensors dtype, shape), in the order of their bytes.

    Raises:
        StartupError: the file cannot be written; so do `write` and the end of the block.
    """

    def __init__(self, path: Path, entries: Entries) -> None:
        self._path, self._unfinished = path, path.with_name(path.name + UNFINISHED_SUFFIX)
        head = header_bytes(entries)
        self._starts: dict[str, int] = {}
        end = len(head)
        for name, entry in entries.items():
            self._starts[name] = end
            end += num_bytes(*entry)
        self._left = end - len(head)
        try:
            self._file = os.open(self._unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        except OSError as error:
            raise self._unwritable(error) from error
        self._write_all(memoryview(head), 0)

    def __enter__(self) -> FileWriter:
        return self

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Writes a contiguous part of a tensor, `start` bytes behind the tensor's begin."""
        raw = values.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
        # numpy's types do not say that arrays are buffers
        view = memoryview(raw)  # pyright: ignore[reportArgumentType]
        self._write_all(view, self._starts[name] + start)
        self._left -= len(view)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                assert self._left == 0, f"{self._left} bytes of {self._path} were not written"
                os.fsync(self._file)
        except OSError as failure:
            raise self._unwritable(failure) from failure
        finally:
            os.close(self._file)
        if error is None:
            self._unfinished.rename(self._path)

    def _write_all(self, view: memoryview, start: int) -> None:
        done = 0
        try:
            while done < len(view):
                done += os.pwrite(self._file, view[done:], start + done)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> StartupError:
        return StartupError(f"{self._unfinished} cannot be written: {error.strerror}")
