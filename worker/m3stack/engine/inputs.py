"""Builds the tensors of a step from its plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from m3stack.batch import DeviceBatch, MediaRows
from m3stack.engine.plan import Row
from m3stack.engine.sequence import UNKNOWN_TOKEN, PlacedMedia
from m3stack.engine.transfer import to_device
from m3stack.kernels.interface import HostLengths, PagedRows


class _PageRow:
    """The pages of one sequence as an array, which grows with the list it is made from.

    A long context has thousands of pages, and a step adds one at most: converting all of them anew
    would take longer than everything else the host does.
    """

    def __init__(self, source: Sequence[int]) -> None:
        self.source = source
        self._count = 0
        self._pages = np.empty(0, dtype=np.int32)

    def first(self, count: int) -> np.ndarray:
        """The first `count` pages, int32."""
        if self._count < count:
            grown = len(self.source)
            if grown > len(self._pages):
                larger = np.empty(max(grown, 2 * len(self._pages)), dtype=np.int32)
                larger[: self._count] = self._pages[: self._count]
                self._pages = larger
            self._pages[self._count : grown] = self.source[self._count : grown]
            self._count = grown
        return self._pages[:count]


@dataclass(frozen=True, slots=True)
class TokenFeed:
    """Tokens that the step before is choosing.

    Attributes:
        chosen_S: int64, on the device; negative where there was no choice.
        place_of: whose token stands where, by handle.
    """

    chosen_S: Tensor
    place_of: Mapping[int, int]


class InputBuilder:
    """Turns rows of a plan into a `DeviceBatch`.

    Args:
        page_tokens: tokens B of a page.
        device: where the batch goes.
    """

    def __init__(self, page_tokens: int, device: torch.device) -> None:
        self._page_tokens = page_tokens
        self._device = device
        self._tables: dict[int, _PageRow] = {}

    def forget(self, handle: int) -> None:
        """Drops what is kept of a sequence."""
        self._tables.pop(handle, None)

    def build(
        self, rows: Sequence[Row], media: tuple[MediaRows, ...], feed: TokenFeed | None = None
    ) -> DeviceBatch:
        """The batch of a step.

        Args:
            rows: at least one.
            media: as `media_rows` gave them for the same rows.
            feed: has the tokens that are unknown in the rows.
        """
        lengths = [len(row.token_ids) for row in rows]
        query_start = [0]
        for length in lengths:
            query_start.append(query_start[-1] + length)
        seq_lens = [row.end for row in rows]
        page_table_SJ = self._page_table(rows)
        lengths_S = torch.tensor(lengths)
        row_of_T = torch.repeat_interleave(torch.arange(len(rows)), lengths_S)
        # position = start of the sequence's chunk + distance from its first row
        offsets_S = torch.tensor(
            [row.start - start for row, start in zip(rows, query_start, strict=False)]
        )
        positions_T = torch.arange(query_start[-1]) + offsets_S[row_of_T]
        pages_T = page_table_SJ[row_of_T, positions_T // self._page_tokens].to(torch.int64)
        slots_T = pages_T * self._page_tokens + positions_T % self._page_tokens
        token_ids = [token for row in rows for token in row.token_ids]
        sample_rows = [
            query_start[index + 1] - 1
            for index, row in enumerate(rows)
            if row.output_index is not None
        ]
        starts_S1 = torch.tensor(query_start, dtype=torch.int32)
        lens_S = torch.tensor(seq_lens, dtype=torch.int32)
        return DeviceBatch(
            token_ids_T=self._tokens(token_ids, rows, query_start, feed),
            positions_T=self._send(positions_T),
            slots_T=self._send(slots_T),
            rows=PagedRows(
                query_start_S1=self._send(starts_S1),
                seq_lens_S=self._send(lens_S),
                page_table_SJ=self._send(page_table_SJ),
                max_query_len=max(lengths),
                max_seq_len=max(seq_lens),
                host=HostLengths(starts_S1, lens_S),
            ),
            sample_rows_S=self._send(torch.tensor(sample_rows, dtype=torch.int64)),
            media=media,
        )

    def _tokens(
        self,
        token_ids: list[int],
        rows: Sequence[Row],
        query_start: Sequence[int],
        feed: TokenFeed | None,
    ) -> Tensor:
        """int64 [T], with what the step before chooses where the host does not know it."""
        token_ids_T = self._send(torch.tensor(token_ids, dtype=torch.int64))
        unknown = [index for index, row in enumerate(rows) if row.token_ids[-1] == UNKNOWN_TOKEN]
        if not unknown:
            return token_ids_T
        assert feed is not None, "a token is unknown, and nobody is choosing it"
        targets = [query_start[index + 1] - 1 for index in unknown]
        places = [feed.place_of[rows[index].handle] for index in unknown]
        both_2N = self._send(torch.tensor([targets, places], dtype=torch.int64))
        # where there was no choice the request fails: its row is computed for nothing
        chosen_N = feed.chosen_S.index_select(0, both_2N[1]).clamp(min=0)
        return token_ids_T.index_copy_(0, both_2N[0], chosen_N)

    def _page_table(self, rows: Sequence[Row]) -> Tensor:
        """int32 [S, J]; entries past a row's pages repeat page 0 and are not to be used."""
        counts = [-(-row.end // self._page_tokens) for row in rows]
        table_SJ = np.zeros((len(rows), max(counts)), dtype=np.int32)
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            known = self._tables.get(row.handle)
            if known is None or known.source is not row.pages:
                known = self._tables[row.handle] = _PageRow(row.pages)
            table_SJ[index, :count] = known.first(count)
        return torch.from_numpy(table_SJ)

    def _send(self, tensor: Tensor) -> Tensor:
        return to_device(tensor, self._device)


def media_rows(
    rows: Sequence[Row],
    media_of: Callable[[int], tuple[PlacedMedia, ...]],
    features_of: Callable[[bytes], Tensor],
) -> tuple[MediaRows, ...]:
    """Which features replace which rows of a step.

    Args:
        rows: rows of the plan, in order.
        media_of: placed media of a sequence, by handle.
        features_of: [n, M] features, by key.
    """
    result: list[MediaRows] = []
    first_row = 0
    for row in rows:
        for item in media_of(row.handle):
            if item.first >= row.end or item.end <= row.start:
                continue
            first_feature = 0
            for span in item.spans:
                low = max(span.offset, row.start)
                high = min(span.offset + span.length, row.end)
                if low < high:
                    features = features_of(item.key)
                    feature = first_feature + low - span.offset
                    start = first_row + low - row.start
                    result.append(
                        MediaRows(
                            rows_N=torch.arange(start, start + high - low, device=features.device),
                            features_NM=features[feature : feature + high - low],
                        )
                    )
                first_feature += span.length
        first_row += len(row.token_ids)
    return tuple(result)
