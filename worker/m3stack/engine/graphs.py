"""Decode steps replayed from recordings: one for every size of batch and every range of lengths.

A recorded step reads its inputs from tensors of its own. A batch is copied there, and filled up to
the recorded size with rows that see nothing and write nothing.

Ranks that share a model get the same batches in the same order, so that they begin the same
recordings at the same steps. Each is kept by all of them or by none.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from m3stack.batch import DeviceBatch, LayerCache
from m3stack.kernels.interface import PagedRows

_log = logging.getLogger(__name__)

Forward = Callable[[DeviceBatch, LayerCache], Tensor]

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
# up to that many tokens all lengths share a recording; behind it every doubling has its own, since
# kernels divide their work by the longest sequence
SHORT_TOKENS = 2048
# steps of one kind before it is worth the time that recording takes
USES_BEFORE_RECORDING = 4


class Recording(Protocol):
    """A step that can be run again."""

    @property
    def num_bytes(self) -> int:
        """Device memory it holds, beyond what others of its recorder hold."""
        ...

    def replay(self) -> Tensor:
        """Runs it; the result is good until the next replay of any recording."""
        ...

    def release(self) -> None:
        """Gives back what it holds, once a replay under way has ended; it is not run again."""
        ...


class Recorder(Protocol):
    """Makes recordings of functions of device tensors."""

    def warm_up(self, run: Callable[[], Tensor]) -> None:
        """Runs it, so that what is made at first use is there."""
        ...

    def record(self, run: Callable[[], Tensor]) -> Recording:
        """Keeps what it queues; collectives in it may be queued and not run."""
        ...


Agree = Callable[[int | None], int | None]
"""The most bytes that a recording takes on any rank; None if one of them has none."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a recording is made for: at most so many rows, and keys of at most so many tokens."""

    num_rows: int
    max_seq_len: int


class _Inputs:
    """The tensors that a recorded step reads; rows not in use see and write nothing."""

    def __init__(self, kind: _Kind, page_tokens: int, device: torch.device) -> None:
        size = kind.num_rows
        self._in_use = 0
        self._width = -(-kind.max_seq_len // page_tokens)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.batch = DeviceBatch(
            token_ids_T=zeros(size, dtype=torch.int64),
            positions_T=zeros(size, dtype=torch.int64),
            slots_T=zeros(size, dtype=torch.int64).fill_(-1),
            rows=PagedRows(
                query_start_S1=torch.arange(size + 1, dtype=torch.int32, device=device),
                seq_lens_S=zeros(size, dtype=torch.int32),
                page_table_SJ=zeros(size, self._width, dtype=torch.int32),
                max_query_len=1,
                max_seq_len=kind.max_seq_len,
            ),
            sample_rows_S=torch.arange(size, device=device),
            media=(),
        )

    def fill(self, batch: DeviceBatch) -> None:
        """Copies a batch in; queued, like all else."""
        mine, count = self.batch, batch.token_ids_T.shape[0]
        width = min(self._width, batch.rows.page_table_SJ.shape[1])
        mine.token_ids_T[:count].copy_(batch.token_ids_T)
        mine.positions_T[:count].copy_(batch.positions_T)
        mine.slots_T[:count].copy_(batch.slots_T)
        mine.rows.seq_lens_S[:count].copy_(batch.rows.seq_lens_S)
        mine.rows.page_table_SJ[:count, :width].copy_(batch.rows.page_table_SJ[:, :width])
        if count < self._in_use:
            mine.slots_T[count : self._in_use].fill_(-1)
            mine.rows.seq_lens_S[count : self._in_use].zero_()
        self._in_use = count


class DecodeGraphs:
    """A forward that replays decode steps, and runs all others as they are.

    Args:
        forward: the model's.
        caches: those every call comes with.
        record: how steps are recorded.
        page_tokens: tokens B of a page.
        max_sequences: rows of the largest batch worth recording.
        budget_bytes: device memory of all recordings; at the bound no more are made.
        agree: tells all ranks what a recording takes on each; None where there is one rank.

    Attributes:
        num_bytes: device memory of all recordings, on the rank where each of them takes the most.
        num_replays: steps that were replayed.
    """

    def __init__(
        self,
        forward: Forward,
        caches: LayerCache,
        *,
        record: Recorder,
        page_tokens: int,
        max_sequences: int,
        budget_bytes: int,
        agree: Agree | None = None,
    ) -> None:
        self._forward = forward
        self._caches = caches
        self._recorder = record
        self._agree = agree
        self._page_tokens = page_tokens
        self._sizes = sorted({*(size for size in SIZES if size < max_sequences), max_sequences})
        self._budget_bytes = budget_bytes
        self._uses: dict[_Kind, int] = {}
        self._recorded: dict[_Kind, tuple[_Inputs, Recording]] = {}
        self._failed: set[_Kind] = set()
        # between replays and whoever has recordings given back
        self._lock = threading.Lock()
        self._is_released = False
        self.num_bytes = 0
        self.num_replays = 0

    @property
    def num_recordings(self) -> int:
        """Kinds of step that were recorded."""
        return len(self._recorded)

    def release(self) -> None:
        """Gives all recordings back, and makes no more; any thread may call it, more than once.

        What a collective runs over cannot be closed while a recording of it is left.
        """
        with self._lock:
            self._is_released = True
            for _, recording in self._recorded.values():
                recording.release()
            self._recorded.clear()

    def __call__(self, batch: DeviceBatch, caches: LayerCache) -> Tensor:
        """The logits of a step.

        Raises:
            RuntimeError: another rank is gone, or out of step.
        """
        assert caches is self._caches
        kind = self._kind(batch)
        if kind is not None and self._wants(kind):
            self._record(kind, batch.token_ids_T.device)
        with self._lock:
            found = None if kind is None else self._recorded.get(kind)
            if found is not None:
                inputs, recording = found
                inputs.fill(batch)
                self.num_replays += 1
                return recording.replay()[: batch.token_ids_T.shape[0]]
        return self._forward(batch, caches)

    def _kind(self, batch: DeviceBatch) -> _Kind | None:
        """What recording would serve a batch; None if it is no decode step of a recorded size."""
        num_rows = batch.rows.seq_lens_S.shape[0]
        is_decode = batch.rows.max_query_len == 1 and batch.sample_rows_S.shape[0] == num_rows
        if batch.media or not is_decode or num_rows > self._sizes[-1]:
            return None
        size = next(size for size in self._sizes if size >= num_rows)
        reach = SHORT_TOKENS
        while reach < batch.rows.max_seq_len:
            reach *= 2
        return _Kind(size, reach)

    def _wants(self, kind: _Kind) -> bool:
        """Whether a kind of step is to be recorded now; all ranks give the same answer."""
        if kind in self._recorded or kind in self._failed or self._is_released:
            return False
        self._uses[kind] = self._uses.get(kind, 0) + 1
        is_full = self.num_bytes >= self._budget_bytes
        return not is_full and self._uses[kind] >= USES_BEFORE_RECORDING

    def _record(self, kind: _Kind, device: torch.device) -> None:
        """Records a kind of step on all ranks, or notes that it cannot be."""
        inputs = _Inputs(kind, self._page_tokens, device)

        def run() -> Tensor:
            # an object of its own every time: what a kernel remembers of rows that it has seen
            # on the host must not get into a recording
            batch = inputs.batch
            return self._forward(replace(batch, rows=replace(batch.rows)), self._caches)

        recording = self._try(run, kind, device)
        num_bytes = None if recording is None else recording.num_bytes
        if self._agree is not None:
            num_bytes = self._agree(num_bytes)
        with self._lock:
            if recording is None or num_bytes is None or self._is_released:
                self._failed.add(kind)
                if recording is not None:
                    recording.release()
                    _log.warning("graph_given_up rows=%d reason=another_rank", kind.num_rows)
                return
            self._recorded[kind] = (inputs, recording)
        self.num_bytes += num_bytes
        _log.info(
            "graph_recorded rows=%d max_seq_len=%d bytes=%d total_bytes=%d budget_bytes=%d",
            kind.num_rows,
            kind.max_seq_len,
            recording.num_bytes,
            self.num_bytes,
            self._budget_bytes,
        )

    def _try(
        self, run: Callable[[], Tensor], kind: _Kind, device: torch.device
    ) -> Recording | None:
        """This rank's recording; None if there can be none."""
        if self._agree is not None:
            # it meets the other ranks, and where it fails this one is out of step, as in any step
            self._recorder.warm_up(run)
        try:
            if self._agree is None:
                self._recorder.warm_up(run)
            return self._recorder.record(run)
        except Exception:  # noqa: BLE001 - this kind of step goes on as it is
            if device.type == "cuda":
                # raises if it was not the recording alone that failed
                torch.cuda.synchronize(device)
            _log.exception("graph_failed rows=%d max_seq_len=%d", kind.num_rows, kind.max_seq_len)
            return None


class _CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor, num_bytes: int) -> None:
        self._graph = graph
        self._output = output
        self.num_bytes = num_bytes

    def replay(self) -> Tensor:
        self._graph.replay()
        return self._output

    def release(self) -> None:
        self._graph.reset()


class CudaRecorder:
    """Records CUDA graphs that share one pool of memory: they never run at the same time.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._nothing = torch.zeros(1, device=device)
        self._begin_pool()

    def warm_up(self, run: Callable[[], Tensor]) -> None:
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream(self._device).wait_stream(side)

    def record(self, run: Callable[[], Tensor]) -> Recording:
        # what is free is given back, for the recording to take it, and so as not to be counted
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        graph, output = self._captured(run, self._pool)
        num_bytes = max(0, torch.cuda.memory_reserved(self._device) - before)
        return _CudaRecording(graph, output, num_bytes)

    def _begin_pool(self) -> None:
        """A pool for the recordings to come; those there are keep theirs."""
        self._pool = torch.cuda.graph_pool_handle()
        # a pool that all graphs have left cannot be used again: this one stays
        self._stays, _ = self._captured(self._nothing.zero_, self._pool)

    def _captured(
        self, run: Callable[[], Tensor], pool: Any
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # other threads may use the device meanwhile, as whoever reads its counters does
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                output = run()
                graph.capture_end()
            except BaseException:
                self._break_off(graph, pool)
                raise
        return graph, output

    def _break_off(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """Leaves stream, allocator and random numbers as they were before a capture that failed.

        `capture_end` stops half way where the capture is no longer valid.
        Source: torch 2.11, aten/src/ATen/cuda/CUDAGraph.cpp.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            # torch has no public name for it; where it was done already, it says so
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index or 0, pool)
            # what else waits to hear of a capture's end hears of the end of this one
            self._begin_pool()
        else:
            graph.reset()
