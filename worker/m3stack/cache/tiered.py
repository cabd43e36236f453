"""K and V of cold pages in host memory: index keys stay, chosen pages are fetched when chosen.

A sparse layer reads the index keys of every page and the keys and values of the few it chooses.
Here the former stay on the device for all pages and the latter for the pages used last. One page
id stands for both; where its K and V are is this file's business alone. A page gets a hot slot as a
whole and is fetched by KV group, as groups choose it. All bookkeeping is work of the device, so
that the host never waits for a choice and a recorded step can hold it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from m3stack.cache.pool import KvPool, PageShape
from m3stack.kernels import page_moves
from m3stack.kernels.interface import HeadNorms, Kernels, LayerPages, PagedRows
from m3stack.kernels.page_moves import HotTables, Parts


class PageMoves(Protocol):
    """The operations of `kernels.page_moves`, or of `kernels.page_fetch`, which does the same."""

    def place_pages(self, tables: HotTables, pages_M: Tensor, /) -> None: ...

    def fetch_parts(
        self, tables: HotTables, host: Parts, hot: Parts, pages_GM: Tensor, /
    ) -> None: ...

    def save_rows(
        self, host: Parts, hot: Parts, slots_T: Tensor, hot_rows_T: Tensor, /
    ) -> None: ...

    def chosen_pages(
        self, blocks_GTK: Tensor, table_SJ: Tensor, seq_T: Tensor | None, num_pages: int, /
    ) -> Tensor: ...

    def table_slots(self, tables: HotTables, table_SJ: Tensor, /) -> Tensor: ...

    def row_slots(self, tables: HotTables, slots_T: Tensor, tokens: int, /) -> Tensor: ...


class PageTier:
    """K and V of one layer: all pages in host memory, the ones used last also in hot slots.

    Args:
        like: what a page of K holds, [G, B, D], on the device.
        num_pages, num_hot: P pages in all and N hot slots.
        moves: how pages travel; on a GPU it needs pinned host memory, which this takes.
    """

    def __init__(self, like: Tensor, num_pages: int, num_hot: int, moves: PageMoves) -> None:
        assert 0 < num_hot <= num_pages
        device, is_cuda = like.device, like.device.type == "cuda"
        self.num_pages, self.num_hot = num_pages, num_hot
        self._moves = moves

        def make(count: int, where: torch.device, pinned: bool) -> Tensor:
            size = (count, *like.shape)
            return torch.empty(size, dtype=like.dtype, device=where, pin_memory=pinned)

        # one slot more, never in use: what stands for pages that are not here reads as zeros
        self.hot: Parts = (make(num_hot + 1, device, False), make(num_hot + 1, device, False))
        for part in self.hot:
            part[num_hot:].zero_()
        cpu = torch.device("cpu")
        self.host: Parts = (make(num_pages, cpu, is_cuda), make(num_pages, cpu, is_cuda))
        self.tables = HotTables.empty(num_pages, num_hot, like.shape[0], device)

    @property
    def host_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.host)

    def counts(self) -> tuple[int, int]:
        """Parts of pages asked for so far, and those that were fetched; waits for the device."""
        asked, fetched = self.tables.counts_2.tolist()
        return asked, fetched

    def num_left_out(self) -> int:
        """Pages that found no slot so far: 0 unless too many were asked for. Waits."""
        return int(self.tables.numbers_4[3])

    def rows_to_write(self, slots_T: Tensor, tokens: int) -> Tensor:
        """Where a step's rows go in the hot slots, which their pages get; see `row_slots`."""
        pages_T = torch.where(slots_T >= 0, slots_T // tokens, self.num_pages)
        self._moves.place_pages(self.tables, pages_T)
        return self._moves.row_slots(self.tables, slots_T, tokens)

    def save(self, slots_T: Tensor, hot_rows_T: Tensor) -> None:
        """Takes rows that were written to hot slots into host memory."""
        self._moves.save_rows(self.host, self.hot, slots_T, hot_rows_T)

    def pages_of(self, blocks_GTK: Tensor, table_SJ: Tensor, seq_T: Tensor | None) -> Tensor:
        """See `page_moves.chosen_pages`."""
        return self._moves.chosen_pages(blocks_GTK, table_SJ, seq_T, self.num_pages)

    def bring(self, pages_GM: Tensor) -> None:
        """Makes pages hot for the groups that ask for them; at most N different ones."""
        self._moves.place_pages(self.tables, pages_GM)
        self._moves.fetch_parts(self.tables, self.host, self.hot, pages_GM)

    def hot_table(self, table_SJ: Tensor) -> Tensor:
        """A page table over the hot slots; a slot of zeros stands for what is not hot."""
        return self._moves.table_slots(self.tables, table_SJ)


@dataclass(frozen=True, slots=True)
class TieredPages(LayerPages):
    """Pages whose K and V are [N + 1, G, B, D] hot slots; page ids are rows of the index keys."""

    tier: PageTier | None = None


class TieredPool(KvPool):
    """A pool whose sparse layers keep only some pages' K and V on the device.

    Args:
        num_hot: pages of each sparse layer whose K and V are on the device.
    """

    def __init__(
        self,
        shape: PageShape,
        num_pages: int,
        device: torch.device,
        *,
        num_hot: int,
    ) -> None:
        moves = moves_for(device)
        # one page of everything: what is wanted of it is the index keys' form
        super().__init__(shape, 1, device)
        self.num_pages = num_pages
        dense = replace(shape, sparse_layers=(False,))
        like = torch.empty(
            (shape.num_kv_heads, shape.page_tokens, shape.head_dim),
            dtype=shape.layer_dtype(True),
            device=device,
        )
        layers: list[LayerPages] = []
        for layer in self.layers:
            if layer.index_k_PBD is None:
                layers.append(KvPool(dense, num_pages, device).layers[0])
                continue
            tier = PageTier(like, num_pages, num_hot, moves)
            layers.append(
                TieredPages(
                    k_PGBD=tier.hot[0],
                    v_PGBD=tier.hot[1],
                    index_k_PBD=_grown(layer.index_k_PBD, num_pages),
                    index_copy_PX=_grown(layer.index_copy_PX, num_pages),
                    tier=tier,
                )
            )
        self.layers = tuple(layers)


def moves_for(device: torch.device) -> PageMoves:
    """How pages travel to and from a device."""
    if device.type == "cpu":
        return page_moves
    # Triton is there only where there is a GPU
    from m3stack.kernels import page_fetch

    return page_fetch


def _grown(one: Tensor | None, num_pages: int) -> Tensor | None:
    return None if one is None else one.new_empty((num_pages, *one.shape[1:]))


def hot_pages_at_least(shape: PageShape, *, num_blocks: int, step_tokens: int, rows: int) -> int:
    """Hot slots without which a step cannot be computed.

    Args:
        num_blocks: K that a row chooses in each group.
        step_tokens, rows: tokens and sequences of the largest step.
    """
    # a sequence's rows may begin and end in mid-page
    written = step_tokens // shape.page_tokens + 2 * rows
    return max(shape.num_kv_heads * num_blocks, written)


def with_tier(kernels: Kernels) -> Kernels:
    """The same operations, which also serve `TieredPages`."""

    def attention_prologue(
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        index_q_TGD: Tensor | None,
        index_k_TD: Tensor | None,
        norms: HeadNorms,
        cos: Tensor,
        sin: Tensor,
        slots_T: Tensor,
        pages: LayerPages,
        index_slots_T: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        given = (q_THD, k_TGD, v_TGD, index_q_TGD, index_k_TD, norms, cos, sin)
        tier = pages.tier if isinstance(pages, TieredPages) else None
        if tier is None:
            return kernels.attention_prologue(*given, slots_T, pages, index_slots_T)
        hot_rows_T = tier.rows_to_write(slots_T, pages.k_PGBD.shape[2])
        index_slots_T = slots_T if index_slots_T is None else index_slots_T
        out = kernels.attention_prologue(*given, hot_rows_T, pages, index_slots_T)
        tier.save(slots_T, hot_rows_T)
        return out

    def block_attention(
        q_THD: Tensor, pages: LayerPages, blocks_GTK: Tensor, rows: PagedRows, scale: float
    ) -> Tensor:
        tier = pages.tier if isinstance(pages, TieredPages) else None
        if tier is None:
            return kernels.block_attention(q_THD, pages, blocks_GTK, rows, scale)
        groups, num_tokens, num_blocks = blocks_GTK.shape
        # so many rows cannot choose more pages than there are slots
        size = max(1, tier.num_hot // (groups * num_blocks))
        seq_T = _sequence_of_rows(rows, num_tokens)
        parts: list[Tensor] = []
        for first in range(0, num_tokens, size):
            last = min(first + size, num_tokens)
            blocks = blocks_GTK[:, first:last].contiguous()
            if seq_T is None:
                of_rows = rows.page_table_SJ[first:last]
                tier.bring(tier.pages_of(blocks, of_rows, None))
            else:
                tier.bring(tier.pages_of(blocks, rows.page_table_SJ, seq_T[first:last]))
            hot_SJ = tier.hot_table(rows.page_table_SJ)
            part = _part_of(replace(rows, page_table_SJ=hot_SJ), first, last, num_tokens)
            parts.append(kernels.block_attention(q_THD[first:last], pages, blocks, part, scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return replace(kernels, attention_prologue=attention_prologue, block_attention=block_attention)


def _sequence_of_rows(rows: PagedRows, num_tokens: int) -> Tensor | None:
    """int64 [T]; None where row t is the only one of sequence t."""
    num_sequences = rows.seq_lens_S.shape[0]
    if rows.max_query_len == 1 and num_tokens == num_sequences:
        return None
    row_T = torch.arange(num_tokens, device=rows.seq_lens_S.device)
    seq_T = torch.searchsorted(rows.query_start_S1[1:].long(), row_T, right=True)
    # rows behind the last sequence belong to none, and choose nothing
    return seq_T.clamp(max=num_sequences - 1)


def _part_of(rows: PagedRows, first: int, last: int, num_tokens: int) -> PagedRows:
    """The same sequences with rows `first .. last - 1` of the step only."""
    if last - first == num_tokens:
        return rows
    start_S1 = rows.query_start_S1
    # a sequence ends with its last row here; one without rows sees nothing
    cut_S = (start_S1[1:] - last).clamp(min=0)
    own_S = start_S1[1:].clamp(first, last) - start_S1[:-1].clamp(first, last)
    seq_lens_S = torch.where(own_S > 0, rows.seq_lens_S - cut_S, 0)
    return replace(
        rows,
        query_start_S1=(start_S1.clamp(first, last) - first).to(torch.int32),
        seq_lens_S=seq_lens_S.to(torch.int32),
        max_query_len=min(rows.max_query_len, last - first),
        # those of the whole step are none of the part's
        host=None,
    )
