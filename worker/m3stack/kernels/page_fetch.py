"""Pages between pinned host memory and hot slots, in Triton; meanings in `page_moves`.

All bookkeeping is done by kernels, so that the host never waits for a choice and a recorded step
can hold it. On a GPU host tensors must be pinned: kernels read and write them over the bus.
Room is found by second chances instead of exact ages: which pages are hot may differ from the
plain form, what is read never does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from m3stack.kernels.page_moves import HotTables, Parts

ENTRIES, SWEEP, VALUES = 256, 1024, 4096
# programs that share what is to be fetched: enough loads under way to fill the bus
FETCHERS = 256


@triton.jit
def _want_kernel(
    entries, slot_of, used, is_recent, turn, wanted, listed, numbers,
    num_entries, num_pages, num_hot, divisor, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Marks slots as in use, and lists once each page that has none."""
    at = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    entry = tl.load(entries + at, mask=at < num_entries, other=-1)
    page = tl.where(entry < 0, num_pages, entry // divisor)
    is_page = page < num_pages
    slot = tl.load(slot_of + page, mask=is_page, other=-1)
    is_hot = is_page & (slot >= 0)
    tl.store(used + slot, tl.load(turn), mask=is_hot)
    tl.store(is_recent + slot, 1, mask=is_hot)
    is_missing = is_page & (slot < 0)
    before = tl.atomic_xchg(wanted + page, 1, mask=is_missing)
    is_first = is_missing & (before == 0)
    place = tl.atomic_add(numbers + tl.zeros_like(page), 1, mask=is_first)
    tl.store(listed + place, page.to(tl.int32), mask=is_first & (place < num_hot))
    # more pages than there are slots are the caller's mistake: they are left out, and counted
    tl.store(wanted + page, 0, mask=is_first & (place >= num_hot))
    if tl.program_id(0) == 0:
        # of the fetch that follows
        tl.store(numbers + 1, 0)


@triton.jit
def _place_kernel(
    slot_of, page_of, used, is_recent, is_here, turn, wanted, listed, numbers,
    num_pages, num_hot, max_sweeps, GROUPS: tl.constexpr, SWEEP: tl.constexpr,
):  # fmt: skip
    """One program: goes round the slots from where it stopped, and takes those not used lately."""
    now = tl.load(turn)
    asked = tl.load(numbers)
    count = tl.minimum(asked, num_hot)
    hand = tl.load(numbers + 2)
    lane = tl.arange(0, SWEEP)
    inside = lane < num_hot
    done = count * 0
    sweep = 0
    while (done < count) & (sweep < max_sweeps):
        slot = (hand + lane) % num_hot
        is_free = inside & (tl.load(used + slot, mask=inside, other=0) != now)
        is_taken = is_free & (tl.load(is_recent + slot, mask=inside, other=1) == 0)
        rank = tl.cumsum(is_taken.to(tl.int32), 0) - 1
        found = tl.sum(is_taken.to(tl.int32), 0)
        need = count - done
        wins = is_taken & (rank < need)
        last = tl.max(tl.where(wins, lane + 1, 0), 0)
        reach = tl.where(found >= need, last, tl.minimum(num_hot, SWEEP))
        passed = is_free & (lane < reach)
        tl.store(is_recent + slot, 0, mask=passed)
        # a slot's second chance is over before another page takes it
        tl.debug_barrier()
        page = tl.load(listed + done + rank, mask=wins, other=0)
        old = tl.load(page_of + slot, mask=wins, other=num_pages)
        tl.store(slot_of + old, -1, mask=wins & (old < num_pages))
        tl.store(slot_of + page, slot, mask=wins)
        tl.store(page_of + slot, page, mask=wins)
        tl.store(used + slot, now, mask=wins)
        tl.store(is_recent + slot, 1, mask=wins)
        for group in tl.static_range(GROUPS):
            tl.store(is_here + slot * GROUPS + group, 0, mask=wins)
        tl.store(wanted + page, 0, mask=wins)
        done += tl.minimum(found, need)
        hand = (hand + reach) % num_hot
        sweep += 1
        tl.debug_barrier()
    tl.store(numbers, 0)
    tl.store(numbers + 2, hand)
    tl.store(numbers + 3, tl.load(numbers + 3) + asked - done)
    while done < count:
        page = tl.load(listed + done + lane, mask=done + lane < count, other=0)
        tl.store(wanted + page, 0, mask=done + lane < count)
        done += SWEEP
    tl.store(turn, now + 1)


@triton.jit
def _list_kernel(
    pages, slot_of, is_here, fetches, numbers, counts,
    num_entries, of_group, num_pages, GROUPS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Lists once each part that is asked for and not there."""
    at = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    page = tl.load(pages + at, mask=at < num_entries, other=num_pages)
    group = at // of_group
    is_page = page < num_pages
    slot = tl.load(slot_of + page, mask=is_page, other=-1)
    is_asked = is_page & (slot >= 0)
    before = tl.atomic_xchg(is_here + slot * GROUPS + group, 1, mask=is_asked)
    is_first = is_asked & (before == 0)
    place = tl.atomic_add(numbers + 1 + tl.zeros_like(page), 1, mask=is_first)
    tl.store(fetches + 2 * place, page * GROUPS + group, mask=is_first)
    tl.store(fetches + 2 * place + 1, slot * GROUPS + group, mask=is_first)
    tl.atomic_add(counts, tl.sum(is_asked.to(tl.int64), 0))
    tl.atomic_add(counts + 1, tl.sum(is_first.to(tl.int64), 0))


@triton.jit
def _fetch_kernel(
    host_k, host_v, hot_k, hot_v, fetches, numbers, part_values, step,
    VALUES: tl.constexpr,
):  # fmt: skip
    count = tl.load(numbers + 1)
    at = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    held = at < part_values
    number = tl.program_id(0)
    while number < count:
        source = tl.load(fetches + 2 * number).to(tl.int64) * part_values
        target = tl.load(fetches + 2 * number + 1).to(tl.int64) * part_values
        k = tl.load(host_k + source + at, mask=held)
        v = tl.load(host_v + source + at, mask=held)
        tl.store(hot_k + target + at, k, mask=held)
        tl.store(hot_v + target + at, v, mask=held)
        number += step


@triton.jit
def _save_kernel(
    host_k, host_v, hot_k, hot_v, slots, hot_rows, tokens, groups,
    DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    hot_row = tl.load(hot_rows + row)
    if slot >= 0:
        dim = tl.arange(0, WIDTH)
        held = dim < DIM
        source = ((hot_row // tokens) * groups + group) * tokens + hot_row % tokens
        target = ((slot // tokens) * groups + group) * tokens + slot % tokens
        tl.store(host_k + target * DIM + dim, tl.load(hot_k + source * DIM + dim, mask=held), held)
        tl.store(host_v + target * DIM + dim, tl.load(hot_v + source * DIM + dim, mask=held), held)


@triton.jit
def _chosen_kernel(
    blocks, table, seqs, out, num_entries, num_tokens, chosen, table_row, num_pages,
    HAS_SEQS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    inside = at < num_entries
    block = tl.load(blocks + at, mask=inside, other=-1)
    row = (at // chosen) % num_tokens
    seq = row.to(tl.int64)
    if HAS_SEQS:
        seq = tl.load(seqs + row, mask=inside, other=0).to(tl.int64)
    page = tl.load(table + seq * table_row + block, mask=block >= 0, other=num_pages)
    tl.store(out + at, page.to(tl.int32), mask=inside)


@triton.jit
def _table_kernel(table, slot_of, out, num_entries, num_pages, num_hot, ENTRIES: tl.constexpr):
    at = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    inside = at < num_entries
    page = tl.load(table + at, mask=inside, other=-1)
    is_page = (page >= 0) & (page < num_pages)
    slot = tl.load(slot_of + page, mask=is_page, other=-1)
    tl.store(out + at, tl.where(slot < 0, num_hot, slot), mask=inside)


@triton.jit
def _row_kernel(slots, slot_of, out, num_rows, tokens, ENTRIES: tl.constexpr):
    at = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    inside = at < num_rows
    slot = tl.load(slots + at, mask=inside, other=-1)
    is_row = slot >= 0
    hot = tl.load(slot_of + slot // tokens, mask=is_row, other=-1).to(tl.int64)
    tl.store(out + at, tl.where(is_row, hot * tokens + slot % tokens, -1), mask=inside)


def place_pages(tables: HotTables, pages_M: Tensor, *, page_rows: int = 1) -> None:
    """See `page_moves.place_pages`.

    Args:
        page_rows: entries may also be `page * page_rows + offset`, negative where there is none.
    """
    count = pages_M.numel()
    _want_kernel[(triton.cdiv(count, ENTRIES),)](
        pages_M, tables.slot_of_P, tables.used_N, tables.is_recent_N, tables.turn_1,
        tables.wanted_P, tables.listed_N, tables.numbers_4,
        count, tables.num_pages, tables.num_hot, page_rows, ENTRIES=ENTRIES,
    )  # fmt: skip
    sweep = min(SWEEP, triton.next_power_of_2(tables.num_hot))
    _place_kernel[(1,)](
        tables.slot_of_P, tables.page_of_N, tables.used_N, tables.is_recent_N, tables.is_here_NG,
        tables.turn_1, tables.wanted_P, tables.listed_N, tables.numbers_4,
        tables.num_pages, tables.num_hot, 3 * triton.cdiv(tables.num_hot, sweep) + 3,
        GROUPS=tables.is_here_NG.shape[1], SWEEP=sweep,
        num_warps=max(1, min(8, sweep // 32)),
    )  # fmt: skip


def fetch_parts(tables: HotTables, host: Parts, hot: Parts, pages_GM: Tensor) -> None:
    """See `page_moves.fetch_parts`; tensors are contiguous, a placing of the pages was the last."""
    groups, of_group = pages_GM.shape
    count = pages_GM.numel()
    fetches_M2 = torch.empty((count, 2), dtype=torch.int32, device=pages_GM.device)
    _list_kernel[(triton.cdiv(count, ENTRIES),)](
        pages_GM, tables.slot_of_P, tables.is_here_NG, fetches_M2, tables.numbers_4,
        tables.counts_2, count, of_group, tables.num_pages, GROUPS=groups, ENTRIES=ENTRIES,
    )  # fmt: skip
    part_values = hot[0][0, 0].numel()
    step = min(count, FETCHERS)
    _fetch_kernel[(step, triton.cdiv(part_values, VALUES))](
        *host, *hot, fetches_M2, tables.numbers_4, part_values, step, VALUES=VALUES
    )


def save_rows(host: Parts, hot: Parts, slots_T: Tensor, hot_rows_T: Tensor) -> None:
    """See `page_moves.save_rows`; tensors are contiguous."""
    groups, tokens, dim = hot[0].shape[1:]
    _save_kernel[(slots_T.shape[0], groups)](
        *host, *hot, slots_T, hot_rows_T, tokens, groups,
        DIM=dim, WIDTH=triton.next_power_of_2(dim),
    )  # fmt: skip


def chosen_pages(
    blocks_GTK: Tensor, table_SJ: Tensor, seq_T: Tensor | None, num_pages: int
) -> Tensor:
    """See `page_moves.chosen_pages`."""
    groups, num_tokens, chosen = blocks_GTK.shape
    blocks_GTK, count = blocks_GTK.contiguous(), blocks_GTK.numel()
    size = (groups, num_tokens * chosen)
    out_GM = torch.empty(size, dtype=torch.int32, device=blocks_GTK.device)
    _chosen_kernel[(triton.cdiv(count, ENTRIES),)](
        blocks_GTK, table_SJ, blocks_GTK if seq_T is None else seq_T, out_GM,
        count, num_tokens, chosen, table_SJ.stride(0), num_pages,
        HAS_SEQS=seq_T is not None, ENTRIES=ENTRIES,
    )  # fmt: skip
    return out_GM


def table_slots(tables: HotTables, table_SJ: Tensor) -> Tensor:
    """See `page_moves.table_slots`."""
    table_SJ, count = table_SJ.contiguous(), table_SJ.numel()
    out_SJ = torch.empty_like(table_SJ, dtype=torch.int32)
    _table_kernel[(triton.cdiv(count, ENTRIES),)](
        table_SJ, tables.slot_of_P, out_SJ, count, tables.num_pages, tables.num_hot,
        ENTRIES=ENTRIES,
    )  # fmt: skip
    return out_SJ


def row_slots(tables: HotTables, slots_T: Tensor, tokens: int) -> Tensor:
    """See `page_moves.row_slots`."""
    out_T = torch.empty_like(slots_T)
    count = slots_T.shape[0]
    _row_kernel[(triton.cdiv(count, ENTRIES),)](
        slots_T, tables.slot_of_P, out_T, count, tokens, ENTRIES=ENTRIES
    )
    return out_T
