"""How the plain torch kernels divide a step's rows into batches of bounded size.

Sequences with equally many rows are computed together: a decode step is one batch of one row
each, a prefill chunk is a batch of one sequence. R in a name is the rows of each sequence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from m3stack.kernels.interface import HostLengths, PagedRows

TILE_VALUES = 1 << 21
"""Largest intermediate of a tile, in values: 8 MiB of fp32, near what caches hold."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows that are computed together.

    Attributes:
        rows_SR: int64 row numbers of the step.
        positions_SR: int64 absolute positions of those rows.
        seq_lens_S: int64, keys that are written.
        table_SJ: int64 pages; entries a sequence does not have are 0, fit to be read and ignored.
    """

    rows_SR: Tensor
    positions_SR: Tensor
    seq_lens_S: Tensor
    table_SJ: Tensor


@dataclass(frozen=True, slots=True)
class TileCost:
    """Values of the largest intermediates, for each sequence and for each of its rows."""

    sequence: int
    row: int


def tiles(rows: PagedRows, block: int, cost: Callable[[int, int], TileCost]) -> Iterator[Tile]:
    """Covers every row of every non-empty sequence exactly once.

    Args:
        cost: number of pages and number of rows of a sequence -> what computing it needs.
    """
    starts, lengths = rows.query_start_S1.tolist(), rows.seq_lens_S.tolist()
    by_count: defaultdict[int, list[int]] = defaultdict(list)
    for sequence, seq_len in enumerate(lengths):
        count = starts[sequence + 1] - starts[sequence]
        if count > 0 and seq_len > 0:
            by_count[count].append(sequence)
    for count, members in by_count.items():
        # neighbours of like length share a tile, so that padding stays small
        members.sort(key=lambda sequence: -lengths[sequence])
        while members:
            pages = -(-lengths[members[0]] // block)
            need = cost(pages, count)
            taken = members[: max(1, TILE_VALUES // (need.sequence + count * need.row))]
            members = members[len(taken) :]
            max_rows = max(1, TILE_VALUES // (need.row * len(taken)))
            batch = _batch(rows, taken, pages, block)
            for begin in range(0, count, max_rows):
                yield _tile(batch, count, range(begin, min(begin + max_rows, count)))


@dataclass(frozen=True, slots=True)
class _Batch:
    first_row_S: Tensor
    seq_lens_S: Tensor
    table_SJ: Tensor


def _batch(rows: PagedRows, sequences: list[int], pages: int, block: int) -> _Batch:
    first_S, lens_S, table_SJ = rows.query_start_S1[:-1], rows.seq_lens_S, rows.page_table_SJ
    if len(sequences) < lens_S.shape[0]:
        index_S = torch.tensor(sequences, device=lens_S.device)
        first_S, lens_S, table_SJ = first_S[index_S], lens_S[index_S], table_SJ[index_S]
    lens_S, table_SJ = lens_S.long(), table_SJ[:, :pages].long()
    if len(sequences) > 1:
        # what a table holds behind a sequence's end is no address
        first_slot_J = torch.arange(0, pages * block, block, device=lens_S.device)
        table_SJ = table_SJ.masked_fill(first_slot_J >= lens_S[:, None], 0)
    return _Batch(first_S.long(), lens_S, table_SJ)


def _tile(batch: _Batch, count: int, offsets: range) -> Tile:
    offsets_R = torch.arange(offsets.start, offsets.stop, device=batch.seq_lens_S.device)
    return Tile(
        rows_SR=batch.first_row_S[:, None] + offsets_R,
        positions_SR=(batch.seq_lens_S - count)[:, None] + offsets_R,
        seq_lens_S=batch.seq_lens_S,
        table_SJ=batch.table_SJ,
    )


def row_positions(rows: PagedRows, num_tokens: int, device: torch.device) -> Tensor:
    """Absolute position int64 [T] of every row of the step; -1 for rows of empty sequences."""
    starts_S1, lens_S = rows.query_start_S1.long(), rows.seq_lens_S.long()
    # rows of an empty sequence land far below zero, whatever their number
    shift_S = (lens_S - starts_S1[1:]).masked_fill(lens_S == 0, -(1 << 40))
    shift_T = shift_S.repeat_interleave(starts_S1.diff())
    positions_T = (shift_T + torch.arange(shift_T.shape[0], device=device)).clamp(min=-1)
    return functional.pad(positions_T, (0, num_tokens - shift_T.shape[0]), value=-1)


def sequences(rows: PagedRows, block: int) -> Iterator[tuple[int, int, int, Tensor]]:
    """Yields (first row, last row, length, its pages int64) of every non-empty sequence."""
    starts = rows.query_start_S1.tolist()
    for index, seq_len in enumerate(rows.seq_lens_S.tolist()):
        first, last = starts[index], starts[index + 1]
        if last > first and seq_len > 0:
            yield first, last, seq_len, rows.page_table_SJ[index, : -(-seq_len // block)].long()


def positions(first: int, last: int, seq_len: int, device: torch.device) -> Tensor:
    """Absolute positions int64 [last - first] of a sequence's rows."""
    return torch.arange(seq_len - (last - first), seq_len, device=device)


def split_single_rows(rows: PagedRows) -> tuple[int, PagedRows, PagedRows] | None:
    """The sequences of one row that a step begins with, and those behind them; waits for nothing.

    Returns:
        How many the former are, and the rows of both; None if one part would be empty, or if the
        host does not know the lengths.
    """
    if rows.host is None:
        return None
    starts_S1, lens_S = rows.host.query_start_S1, rows.host.seq_lens_S
    longer = (starts_S1.diff() != 1).nonzero()
    count = int(longer[0]) if len(longer) else len(lens_S)
    if count in (0, len(lens_S)):
        return None
    single = PagedRows(
        query_start_S1=rows.query_start_S1[: count + 1],
        seq_lens_S=rows.seq_lens_S[:count],
        page_table_SJ=rows.page_table_SJ[:count],
        max_query_len=1,
        max_seq_len=int(lens_S[:count].max()),
        host=HostLengths(starts_S1[: count + 1], lens_S[:count]),
    )
    others = PagedRows(
        query_start_S1=rows.query_start_S1[count:] - count,
        seq_lens_S=rows.seq_lens_S[count:],
        page_table_SJ=rows.page_table_SJ[count:],
        max_query_len=rows.max_query_len,
        max_seq_len=int(lens_S[count:].max()),
        host=HostLengths(starts_S1[count:] - count, lens_S[count:]),
    )
    return count, single, others
