"""Pages between host memory and hot slots in plain torch: what `page_fetch` is compared with."""

from __future__ import annotations

from torch import Tensor


def fetch_pages(host_PX: Tensor, hot_NX: Tensor, pages_M: Tensor, slots_M: Tensor) -> None:
    """What `page_fetch.fetch_pages` means, in plain torch; on a CPU."""
    is_page_M = pages_M < host_PX.shape[0]
    hot_NX[slots_M[is_page_M]] = host_PX[pages_M[is_page_M]]


def save_rows(host_PGBD: Tensor, hot_NGBD: Tensor, slots_T: Tensor, hot_slots_T: Tensor) -> None:
    """What `page_fetch.save_rows` means, in plain torch; on a CPU."""
    tokens = hot_NGBD.shape[2]
    is_row_T = slots_T >= 0
    slots, hot_slots = slots_T[is_row_T], hot_slots_T[is_row_T]
    values = hot_NGBD[hot_slots // tokens, :, hot_slots % tokens]
    host_PGBD[slots // tokens, :, slots % tokens] = values
