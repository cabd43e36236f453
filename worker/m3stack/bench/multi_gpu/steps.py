"""Steps of a given shape over shuffled pages, and how long they take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from m3stack.batch import DeviceBatch
from m3stack.kernels.interface import PagedRows

Call = Callable[[], object]

# replays between two events, so that ranks that start a moment apart weigh little
REPLAYS = 4


def step(
    *,
    num_rows: int,
    ends: Sequence[int],
    num_pages: int,
    page_tokens: int,
    vocab_size: int,
    device: torch.device,
) -> DeviceBatch:
    """`num_rows` random tokens for each sequence, which then is `ends[s]` long.

    No page belongs to two sequences unless they need more pages than there are: then every page is
    read, and read anew in another order.
    """
    width = -(-max(ends) // page_tokens)
    generator = torch.Generator().manual_seed(2)
    needed = len(ends) * width
    laps = [torch.randperm(num_pages, generator=generator) for _ in range(0, needed, num_pages)]
    table_SJ = torch.cat(laps)[:needed].view(len(ends), width).to(torch.int32)
    positions = torch.cat([torch.arange(end - num_rows, end) for end in ends])
    sequence_T = torch.arange(len(ends)).repeat_interleave(num_rows)
    pages_T = table_SJ[sequence_T, positions // page_tokens].long()
    # the same ones whatever the pages are
    generator.manual_seed(3)
    tokens = torch.randint(vocab_size, positions.shape, generator=generator)
    last_rows = torch.arange(1, len(ends) + 1) * num_rows - 1
    return DeviceBatch(
        token_ids_T=tokens.to(device),
        positions_T=positions.to(device),
        slots_T=(pages_T * page_tokens + positions % page_tokens).to(device),
        rows=PagedRows(
            query_start_S1=(torch.arange(len(ends) + 1) * num_rows).to(torch.int32).to(device),
            seq_lens_S=torch.tensor(list(ends), dtype=torch.int32, device=device),
            page_table_SJ=table_SJ.to(device),
            max_query_len=num_rows,
            max_seq_len=max(ends),
        ),
        sample_rows_S=last_rows.to(device),
        media=(),
    )


class Stopwatch:
    """Median milliseconds of a call on all ranks together.

    On a GPU a call is captured once in a CUDA graph and replayed, unless it is to run eagerly.

    Args:
        barrier: returns when all ranks are here.
    """

    def __init__(self, device: torch.device, barrier: Callable[[], None], *, repeats: int) -> None:
        self._device, self._barrier, self._repeats = device, barrier, repeats

    def median_ms(self, call: Call, *, is_captured: bool = True) -> float:
        """Of `repeats` runs, after two that are not counted."""
        replays = 1
        if self._device.type == "cuda" and is_captured:
            call, replays = self._captured(call), REPLAYS
        for _ in range(2):
            call()
        return statistics.median(self._one_ms(call, replays) for _ in range(self._repeats))

    def _one_ms(self, call: Call, replays: int) -> float:
        self._settle()
        if self._device.type == "cpu":
            began = time.perf_counter()
            call()
            return (time.perf_counter() - began) * 1e3
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / replays

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self._barrier()
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _captured(self, call: Call) -> Call:
        # what is built at first use cannot be built while a graph is captured
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """In the Frobenius norm, in fp64."""
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm())
