"""Pages between pinned host memory and the device, by kernels that read where to on the device.

On a GPU the host tensors must be pinned: kernels then read and write them over the bus, in order
with everything else on the stream and without the host taking part.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

VALUES_A_PROGRAM = 4096


@triton.jit
def _fetch_kernel(host, hot, pages, slots, num_pages, page_values, VALUES: tl.constexpr):
    entry = tl.program_id(0)
    page = tl.load(pages + entry)
    slot = tl.load(slots + entry)
    if page < num_pages:
        at = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
        held = at < page_values
        values = tl.load(host + page * page_values + at, mask=held)
        tl.store(hot + slot * page_values + at, values, mask=held)


@triton.jit
def _save_kernel(
    host, hot, slots, hot_slots, tokens, groups, DIM: tl.constexpr, WIDTH: tl.constexpr
):
    row, group = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    hot_slot = tl.load(hot_slots + row)
    if slot >= 0:
        dim = tl.arange(0, WIDTH)
        held = dim < DIM
        source = ((hot_slot // tokens) * groups + group) * tokens + hot_slot % tokens
        target = ((slot // tokens) * groups + group) * tokens + slot % tokens
        values = tl.load(hot + source * DIM + dim, mask=held)
        tl.store(host + target * DIM + dim, values, mask=held)


def fetch_pages(host_PX: Tensor, hot_NX: Tensor, pages_M: Tensor, slots_M: Tensor) -> None:
    """Copies host pages into hot slots, one for each entry whose page is below P.

    Args:
        host_PX, hot_NX: contiguous, equal but for the first dimension.
        pages_M, slots_M: int64; slots of copied pages are distinct.
    """
    values = hot_NX[0].numel()
    grid = (pages_M.shape[0], triton.cdiv(values, VALUES_A_PROGRAM))
    _fetch_kernel[grid](
        host_PX, hot_NX, pages_M, slots_M, host_PX.shape[0], values, VALUES=VALUES_A_PROGRAM
    )


def save_rows(host_PGBD: Tensor, hot_NGBD: Tensor, slots_T: Tensor, hot_slots_T: Tensor) -> None:
    """Copies rows just written to hot slots to their host pages.

    Args:
        host_PGBD, hot_NGBD: contiguous.
        slots_T: int64 `page * B + offset`; negative ones are left out.
        hot_slots_T: the same of the hot slot.
    """
    groups, tokens, dim = hot_NGBD.shape[1:]
    _save_kernel[(slots_T.shape[0], groups)](
        host_PGBD, hot_NGBD, slots_T, hot_slots_T, tokens, groups,
        DIM=dim, WIDTH=triton.next_power_of_2(dim),
    )  # fmt: skip
