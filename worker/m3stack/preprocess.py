"""Pictures and clips as the model sees them: patch rows as NumPy arrays, by the gateway's own code.

For programs that talk to a worker themselves, and for data pipelines. The work runs without the
interpreter's lock, so that threads run side by side.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice
from os import PathLike
from typing import Any
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from m3stack import _gateway
from m3stack.errors import ErrorKind, WorkerError

CHANNELS = 3


@dataclass(frozen=True, slots=True)
class PatchRows:
    """One picture or clip, cut up.

    Args:
        rows: u8 [N, channels, frames of a temporal patch, side, side], merge block by merge block;
            a picture has one frame, which the model's patch embedding reads twice. Read-only.
        grid: temporal patches, rows, columns; their product is N.
        frames: numbers of the frames taken from a clip, ascending.
        times_s: when each temporal patch of a clip begins.
    """

    rows: NDArray[np.uint8]
    grid: tuple[int, int, int]
    frames: list[int] = field(default_factory=list[int])
    times_s: list[float] = field(default_factory=list[float])


class Preprocessor:
    """Makes patch rows for one checkpoint.

    Args:
        model_path: checkpoint directory; its weights are not read.

    Raises:
        ValueError: the directory cannot be used; the text says why.
    """

    def __init__(self, model_path: str | PathLike[str]) -> None:
        self._preparer = _gateway.Preparer(model_path)
        self._side, self._frames, _merge = self._preparer.patch_layout()

    def image(
        self,
        data: bytes,
        *,
        detail: str | None = None,
        max_long_side_pixel: int | None = None,
    ) -> PatchRows:
        """Patch rows of a picture's file bytes; the controls are those of a chat request.

        Raises:
            WorkerError: as the gateway would refuse the picture.
        """
        try:
            rows, grid = self._preparer.preprocess_image(
                data, detail=detail, max_long_side_pixel=max_long_side_pixel
            )
        except _gateway.RefusedError as refused:
            raise _refusal(refused) from refused
        return PatchRows(rows=self._shaped(rows, 1), grid=grid)

    def video(
        self,
        data: bytes,
        *,
        detail: str | None = None,
        max_long_side_pixel: int | None = None,
        fps: float | None = None,
    ) -> PatchRows:
        """Patch rows of a clip's file bytes, with the controls of a chat request.

        Raises:
            WorkerError: as the gateway would refuse the clip; it needs FFmpeg.
        """
        try:
            rows, grid, frames, times_s = self._preparer.preprocess_video(
                data, detail=detail, max_long_side_pixel=max_long_side_pixel, fps=fps
            )
        except _gateway.RefusedError as refused:
            raise _refusal(refused) from refused
        shaped = self._shaped(rows, self._frames)
        return PatchRows(rows=shaped, grid=grid, frames=frames, times_s=times_s)

    def images(
        self, files: Iterable[bytes], *, threads: int | None = None, **controls: Any
    ) -> Iterator[PatchRows]:
        """Patch rows of many pictures in their order, on several threads; at most twice as many
        pictures as threads are read ahead, so that files may be endless.

        Raises:
            WorkerError: at the place of a picture that the gateway would refuse; the iterator
                then goes on with the next.
        """
        threads = threads or os.cpu_count() or 1
        return _Batch(partial(self.image, **controls), files, threads, 2 * threads)

    def videos(
        self, files: Iterable[bytes], *, threads: int | None = None, **controls: Any
    ) -> Iterator[PatchRows]:
        """Patch rows of many clips in their order, on several threads; at most as many clips as
        threads are read ahead: their rows are large.

        Raises:
            WorkerError: at the place of a clip that the gateway would refuse; the iterator then
                goes on with the next.
        """
        threads = threads or os.cpu_count() or 1
        return _Batch(partial(self.video, **controls), files, threads, threads)

    def _shaped(self, rows: bytes, frames: int) -> NDArray[np.uint8]:
        shape = (-1, CHANNELS, frames, self._side, self._side)
        return np.frombuffer(rows, np.uint8).reshape(shape)


class _Batch(Iterator[PatchRows]):
    """Rows of files in their order, made on threads of its own while some are ahead."""

    def __init__(
        self,
        make: Callable[[bytes], PatchRows],
        files: Iterable[bytes],
        threads: int,
        max_ahead: int,
    ) -> None:
        self._make = make
        self._files = iter(files)
        self._max_ahead = max_ahead
        self._ahead: deque[Future[PatchRows]] = deque()
        self._pool = ThreadPoolExecutor(threads)
        # who stops in the middle waits for nothing, and what has not begun never does
        finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)

    def __next__(self) -> PatchRows:
        for data in islice(self._files, self._max_ahead - len(self._ahead)):
            self._ahead.append(self._pool.submit(self._make, data))
        if not self._ahead:
            self._pool.shutdown()
            raise StopIteration
        return self._ahead.popleft().result()


def image(data: bytes, model_path: str | PathLike[str], **controls: Any) -> PatchRows:
    """`Preprocessor.image` for a checkpoint directory, which stays open."""
    return _open(os.fspath(model_path)).image(data, **controls)


def video(data: bytes, model_path: str | PathLike[str], **controls: Any) -> PatchRows:
    """`Preprocessor.video` for a checkpoint directory, which stays open."""
    return _open(os.fspath(model_path)).video(data, **controls)


@lru_cache(maxsize=4)
def _open(model_path: str) -> Preprocessor:
    return Preprocessor(model_path)


def _refusal(refused: _gateway.RefusedError) -> WorkerError:
    message, param, _code, _status = refused.args
    return WorkerError(ErrorKind.INVALID_REQUEST, message, param or "")
