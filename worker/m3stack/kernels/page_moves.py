"""Which pages have keys and values in hot slots, and how they get there: the meaning, in torch.

Host memory holds K and V of all pages, hot slots of the device those of some. A page gets a slot as
a whole, but what stands in it comes from the host by KV group, when a group asks for it.
`page_fetch` does the same on a GPU and is compared with this.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Parts = tuple[Tensor, Tensor]
"""K and V."""


@dataclass(frozen=True, slots=True)
class HotTables:
    """Where the K and V of a layer's P pages are; tensors on the device, changed in place.

    Attributes:
        slot_of_P: int32, hot slot of each page; -1: none.
        page_of_N: int32, page of each hot slot; P: none.
        used_N: int32, turn of each slot's last use; it goes up with every placing.
        is_recent_N: int32, used since the search for room last came by; second chances only.
        is_here_NG: int32, whether a group's part of the slot's page was fetched.
        turn_1: int32, number of the placing under way.
        counts_2: int64, parts asked for so far, and those of them that were fetched.
        wanted_P, listed_N: int32, for the back end's own use; the former zero between calls.
        numbers_4: int32, likewise; the last one counts pages that found no slot, since more were
            asked for than there are.
    """

    slot_of_P: Tensor
    page_of_N: Tensor
    used_N: Tensor
    is_recent_N: Tensor
    is_here_NG: Tensor
    turn_1: Tensor
    counts_2: Tensor
    wanted_P: Tensor
    listed_N: Tensor
    numbers_4: Tensor

    @classmethod
    def empty(cls, num_pages: int, num_hot: int, groups: int, device: torch.device) -> HotTables:
        """Nothing is hot."""

        def full(value: int, *size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(size, value, dtype=dtype, device=device)

        return cls(
            slot_of_P=full(-1, num_pages),
            page_of_N=full(num_pages, num_hot),
            used_N=full(0, num_hot),
            is_recent_N=full(0, num_hot),
            is_here_NG=full(0, num_hot, groups),
            turn_1=full(1, 1),
            counts_2=full(0, 2, dtype=torch.int64),
            wanted_P=full(0, num_pages),
            listed_N=full(0, num_hot),
            numbers_4=full(0, 4),
        )

    @property
    def num_pages(self) -> int:
        return self.slot_of_P.shape[0]

    @property
    def num_hot(self) -> int:
        return self.page_of_N.shape[0]


def place_pages(tables: HotTables, pages_M: Tensor) -> None:
    """Gives pages a hot slot, in the place of those not used for the longest.

    Args:
        pages_M: integers, P where there is none; at most N different ones.
    """
    turn, num_pages = tables.turn_1, tables.num_pages
    wanted = pages_M[pages_M < num_pages].unique().long()
    slots = tables.slot_of_P[wanted]
    tables.used_N[slots[slots >= 0].long()] = turn.item()
    missing = wanted[slots < 0]
    room = tables.used_N.argsort(stable=True)[: len(missing)]
    old = tables.page_of_N[room].long()
    tables.slot_of_P[old[old < num_pages]] = -1
    tables.slot_of_P[missing] = room.to(torch.int32)
    tables.page_of_N[room] = missing.to(torch.int32)
    tables.used_N[room] = turn.item()
    tables.is_here_NG[room] = 0
    turn.add_(1)


def fetch_parts(tables: HotTables, host: Parts, hot: Parts, pages_GM: Tensor) -> None:
    """Brings what groups ask for into the slots that its pages have, unless it is there.

    Args:
        host: K and V [P, G, B, D] of all pages.
        hot: the same of hot slots, [N or more, G, B, D].
        pages_GM: pages that each group asks for, P where there is none; all have a slot.
    """
    for group, pages_M in enumerate(pages_GM):
        asked = pages_M[pages_M < tables.num_pages].long()
        pages = asked.unique()
        slots = tables.slot_of_P[pages].long()
        is_cold = tables.is_here_NG[slots, group] == 0
        pages, slots = pages[is_cold], slots[is_cold]
        for source, target in zip(host, hot, strict=True):
            target[slots, group] = source[pages, group]
        tables.is_here_NG[slots, group] = 1
        tables.counts_2[0] += len(asked)
        tables.counts_2[1] += len(pages)


def save_rows(host: Parts, hot: Parts, slots_T: Tensor, hot_rows_T: Tensor) -> None:
    """Copies rows just written to hot slots to their host pages.

    Args:
        slots_T: int64 `page * B + offset`; negative ones are left out.
        hot_rows_T: the same of the hot slot, as `row_slots` gives them.
    """
    tokens = hot[0].shape[2]
    is_row_T = slots_T >= 0
    slots, rows = slots_T[is_row_T], hot_rows_T[is_row_T]
    for target, source in zip(host, hot, strict=True):
        target[slots // tokens, :, slots % tokens] = source[rows // tokens, :, rows % tokens]


def chosen_pages(
    blocks_GTK: Tensor, table_SJ: Tensor, seq_T: Tensor | None, num_pages: int
) -> Tensor:
    """int32 [G, T * K]: the pages of chosen blocks, P where there is none.

    Args:
        blocks_GTK: negative where there is none.
        table_SJ: page tables; entries that no block stands for may be anything.
        seq_T: whose row each is; None: row t is of sequence t.
    """
    groups, num_tokens, _ = blocks_GTK.shape
    if seq_T is None:
        seq_T = torch.arange(num_tokens, device=blocks_GTK.device)
    pages_GTK = table_SJ[seq_T[None, :, None], blocks_GTK.long().clamp(min=0)]
    pages_GTK = torch.where(blocks_GTK < 0, num_pages, pages_GTK)
    return pages_GTK.to(torch.int32).reshape(groups, -1)


def table_slots(tables: HotTables, table_SJ: Tensor) -> Tensor:
    """int32 [S, J]: hot slots of a page table; N for what is not hot or no page."""
    is_page_SJ = (table_SJ >= 0) & (table_SJ < tables.num_pages)
    slots_SJ = tables.slot_of_P[torch.where(is_page_SJ, table_SJ, 0).long()]
    return torch.where(is_page_SJ & (slots_SJ >= 0), slots_SJ, tables.num_hot)


def row_slots(tables: HotTables, slots_T: Tensor, tokens: int) -> Tensor:
    """int64 [T]: `slot * B + offset` in the hot slots of rows whose pages have one; -1 stays."""
    pages_T = (slots_T // tokens).clamp(min=0)
    rows_T = tables.slot_of_P[pages_T].long() * tokens + slots_T % tokens
    return torch.where(slots_T < 0, -1, rows_T)
