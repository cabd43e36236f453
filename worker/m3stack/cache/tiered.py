"""K and V of cold pages in host memory: index keys stay, chosen pages are fetched when chosen.

A sparse layer reads the index keys of every page and the keys and values of the few it chooses.
Here the former stay on the device for all pages and the latter for the pages used last. One page
id stands for both; where its K and V are is this file's business alone. All bookkeeping is tensor
work on the device, so that the host never waits for a choice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from m3stack.cache.pool import KvPool, PageShape
from m3stack.kernels import page_moves
from m3stack.kernels.interface import HeadNorms, Kernels, LayerPages, PagedRows


class MovePages(Protocol):
    """`kernels.page_fetch`, or what it means."""

    def __call__(self, host: Tensor, hot: Tensor, sources: Tensor, targets: Tensor, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Mover:
    """How pages and rows travel."""

    fetch_pages: MovePages
    save_rows: MovePages


class PageTier:
    """K and V of one layer: all pages in host memory, the ones used last also in hot slots.

    Args:
        like: what a page of K holds, [G, B, D], on the device.
        num_pages, num_hot: P pages in all and N hot slots.
        mover: how pages travel; on a GPU it needs pinned host memory, which this takes.
    """

    def __init__(self, like: Tensor, num_pages: int, num_hot: int, mover: Mover) -> None:
        assert 0 < num_hot <= num_pages
        device, is_cuda = like.device, like.device.type == "cuda"
        self.num_pages, self.num_hot = num_pages, num_hot
        self._mover = mover

        def make(count: int, where: torch.device, pinned: bool) -> Tensor:
            size = (count, *like.shape)
            return torch.empty(size, dtype=like.dtype, device=where, pin_memory=pinned)

        # one slot more, never in use: what stands for pages that are not here reads as zeros
        self.hot = tuple(make(num_hot + 1, device, False) for _ in range(2))
        for part in self.hot:
            part[num_hot:].zero_()
        self._host = tuple(make(num_pages, torch.device("cpu"), is_cuda) for _ in range(2))
        # entry P of tables by page is a sink: it belongs to no page
        self._slot_of_P1 = torch.full((num_pages + 1,), -1, dtype=torch.int64, device=device)
        self._page_of_N = torch.full((num_hot,), num_pages, dtype=torch.int64, device=device)
        self._used_at_N = torch.zeros(num_hot, dtype=torch.int64, device=device)
        self._clock = torch.zeros((), dtype=torch.int64, device=device)
        self._ids_P1 = torch.arange(num_pages + 1, device=device)
        self._asked = torch.zeros((), dtype=torch.int64, device=device)
        self._missed = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def host_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self._host)

    def counts(self) -> tuple[int, int]:
        """Pages asked for so far, and those of them that were fetched; waits for the device."""
        return int(self._asked), int(self._missed)

    def hold(self, pages_M: Tensor) -> None:
        """Makes pages hot, in the place of those not asked for the longest.

        Args:
            pages_M: int64, P where there is none; at most N different ones.
        """
        most = min(pages_M.shape[0], self.num_hot)
        self._clock += 1
        wanted_P1 = torch.zeros_like(self._slot_of_P1, dtype=torch.bool)
        wanted_P1.index_fill_(0, pages_M, True)
        wanted_P1[self.num_pages :].fill_(False)
        is_wanted_N = wanted_P1.index_select(0, self._page_of_N)
        self._used_at_N.copy_(torch.where(is_wanted_N, self._clock, self._used_at_N))
        missing_P1 = wanted_P1 & (self._slot_of_P1 < 0)
        # the missing ones side by side: each goes to its rank, all others behind the list
        rank_P1 = torch.where(missing_P1, missing_P1.cumsum(0) - 1, most)
        listed = torch.full((most + 1,), self.num_pages, device=pages_M.device)
        listed.scatter_(0, rank_P1, self._ids_P1)
        page_m = listed[:most]
        num_missing = missing_P1.sum()
        is_page_m = self._ids_P1[:most] < num_missing
        page_m = torch.where(is_page_m, page_m, self.num_pages)
        # wanted slots were used just now, so the first ones here are not wanted
        slot_m = self._used_at_N.argsort(stable=True)[:most]
        old_m = self._page_of_N.index_select(0, slot_m)
        sink = torch.where(is_page_m, old_m, self.num_pages)
        self._slot_of_P1.index_fill_(0, sink, -1)
        self._slot_of_P1.index_copy_(0, page_m, slot_m)
        self._slot_of_P1[self.num_pages :].fill_(-1)
        self._page_of_N.index_copy_(0, slot_m, torch.where(is_page_m, page_m, old_m))
        used_m = self._used_at_N.index_select(0, slot_m)
        self._used_at_N.index_copy_(0, slot_m, torch.where(is_page_m, self._clock, used_m))
        for host, hot in zip(self._host, self.hot, strict=True):
            self._mover.fetch_pages(host, hot, page_m, slot_m)
        self._asked += wanted_P1.sum()
        self._missed += num_missing

    def slots_of(self, pages: Tensor) -> Tensor:
        """Hot slots of pages, int64; of those that are not hot, a slot of zeros."""
        slots = self._slot_of_P1[pages]
        return torch.where(slots < 0, self.num_hot, slots)

    def save(self, slots_T: Tensor, hot_slots_T: Tensor) -> None:
        """Takes rows that were written to hot slots into host memory."""
        for host, hot in zip(self._host, self.hot, strict=True):
            self._mover.save_rows(host, hot, slots_T, hot_slots_T)


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
        mover = mover_for(device)
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
            tier = PageTier(like, num_pages, num_hot, mover)
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


def mover_for(device: torch.device) -> Mover:
    """How pages travel to and from a device."""
    if device.type == "cpu":
        return Mover(page_moves.fetch_pages, page_moves.save_rows)
    # Triton is there only where there is a GPU
    from m3stack.kernels import page_fetch

    return Mover(page_fetch.fetch_pages, page_fetch.save_rows)


def _grown(one: Tensor | None, num_pages: int) -> Tensor | None:
    return None if one is None else one.new_empty((num_pages, *one.shape[1:]))


def hot_pages_at_least(shape: PageShape, *, num_blocks: int, step_tokens: int, rows: int) -> int:
    """Hot slots without which a step cannot be computed.

    Args:
        num_blocks: K that a row chooses in each group.
        step_tokens, rows: tokens and sequences of the largest step.
    """
    written = -(-step_tokens // shape.page_tokens) + rows
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
        tokens = pages.k_PGBD.shape[2]
        is_row_T = slots_T >= 0
        page_T = torch.where(is_row_T, slots_T // tokens, tier.num_pages)
        tier.hold(page_T)
        hot_slots_T = tier.slots_of(page_T) * tokens + slots_T % tokens
        hot_slots_T = torch.where(is_row_T, hot_slots_T, -1)
        index_slots_T = slots_T if index_slots_T is None else index_slots_T
        out = kernels.attention_prologue(*given, hot_slots_T, pages, index_slots_T)
        tier.save(slots_T, hot_slots_T)
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
        table_SJ = rows.page_table_SJ.long().clamp(0, tier.num_pages - 1)
        row_T = torch.arange(num_tokens, device=q_THD.device)
        seq_T = torch.searchsorted(rows.query_start_S1[1:].long(), row_T, right=True)
        # rows behind the last sequence belong to none, and choose nothing
        seq_T = seq_T.clamp(max=table_SJ.shape[0] - 1)
        page_GTK = table_SJ[seq_T[None, :, None], blocks_GTK.long().clamp(min=0)]
        page_GTK = torch.where(blocks_GTK < 0, tier.num_pages, page_GTK)
        parts: list[Tensor] = []
        for first in range(0, num_tokens, size):
            last = min(first + size, num_tokens)
            tier.hold(page_GTK[:, first:last].reshape(-1))
            hot_SJ = tier.slots_of(table_SJ).to(torch.int32)
            part = _part_of(replace(rows, page_table_SJ=hot_SJ), first, last, num_tokens)
            blocks = blocks_GTK[:, first:last].contiguous()
            parts.append(kernels.block_attention(q_THD[first:last], pages, blocks, part, scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return replace(kernels, attention_prologue=attention_prologue, block_attention=block_attention)


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
    )
