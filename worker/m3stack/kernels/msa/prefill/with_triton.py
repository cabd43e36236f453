"""Block choice and block attention for prefill chunks in Triton: portable, and the safe arm.

Scores are kept one span of pages at a time and ranked into a running list, so their memory does
not grow with the context. Attention walks the union of the blocks of 1, 2, 4 or 8 rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from m3stack.kernels.interface import NO_BLOCK, LayerPages, PagedRows
from m3stack.kernels.msa.prefill.row_tiles import (
    cut_tiles,
    require_dense_rows,
    require_powers,
    row_positions,
)

SPAN_PAGES = 1024
SCORE_TILE_ROWS = 128
RANK_WIDTH = 128
# finite, so that a row without a key so far does not meet inf - inf
FLOOR = tl.constexpr(-1.0e30)
EMPTY_KEY = tl.constexpr(0)
NO_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def score_span(
    index_q,
    index_k,
    tiles,
    page_table,
    scores,
    first_page,
    num_groups,
    table_pitch,
    page_pitch,
    key_pitch,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    SPAN: tl.constexpr,
    PAGES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Largest visible dot product of ROWS (row, group) pairs with PAGES pages of the span.

    `tiles` int64 [tiles, 4]: first flat row, rows, position of row 0 times groups, sequence.
    `scores` fp32 [flat rows, SPAN]; -inf where a page has no visible key or a NaN.
    """
    tile = tl.program_id(0)
    first_row = tl.load(tiles + tile * 4)
    num_rows = tl.load(tiles + tile * 4 + 1).to(tl.int32)
    position = tl.load(tiles + tile * 4 + 2).to(tl.int32)
    sequence = tl.load(tiles + tile * 4 + 3)
    row = tl.arange(0, ROWS)
    held = row < num_rows
    at = tl.arange(0, DIM)
    q = tl.load(
        index_q + (first_row + row)[:, None] * DIM + at[None, :], mask=held[:, None], other=0.0
    )
    own = tl.where(held & (position >= 0), (position + row) // num_groups, -1)
    last = tl.max(own, 0)
    if WIDE:
        q = q.to(tl.float32)
    begin = tl.program_id(1) * PAGES
    for local in range(begin, min(begin + PAGES, SPAN)):
        best = tl.full((ROWS,), float("-inf"), tl.float32)
        block = first_page + local
        if block * BLOCK <= last:
            page = tl.load(page_table + sequence * table_pitch + block).to(tl.int64)
            key = tl.arange(0, BLOCK)
            k = tl.load(index_k + page * page_pitch + key[None, :] * key_pitch + at[:, None])
            if WIDE:
                k = k.to(tl.float32)
            dots = tl.dot(q, k, input_precision="ieee")
            visible = (block * BLOCK + key)[None, :] <= own[:, None]
            spoiled = tl.max((visible & (dots != dots)).to(tl.int32), 1) > 0
            dots = tl.where(visible & (dots == dots), dots, float("-inf"))
            best = tl.where(spoiled, float("-inf"), tl.max(dots, 1))
        tl.store(scores + (first_row + row) * SPAN + local, best, mask=held)


@triton.jit
def rank_span(
    scores,
    positions,
    best,
    first_page,
    num_groups,
    num_local,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Merges one row's scores of a span into its best KEPT keys.

    A key is the score's order in the upper 32 bits, the complement of the block below: the greater
    key is the higher score, then the lower block. 0 is no block.
    """
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row // num_groups)
    kept = tl.load(best + row * KEPT + tl.arange(0, KEPT))
    limit = tl.where(position < 0, 0, position // BLOCK - num_local + 1)
    for start in range(0, SPAN, WIDTH):
        if first_page + start < limit:
            block = first_page + start + tl.arange(0, WIDTH)
            score = tl.load(scores + row * SPAN + start + tl.arange(0, WIDTH)) + 0.0
            bits = score.to(tl.int32, bitcast=True)
            order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 0x80000000
            key = (order << 31) | (block ^ 0x7FFFFFFF).to(tl.int64)
            key = tl.where(block < limit, key, EMPTY_KEY)
            kept = tl.topk(tl.cat(kept, tl.topk(key, KEPT), can_reorder=True), KEPT)
    tl.store(best + row * KEPT + tl.arange(0, KEPT), kept)


@triton.jit
def list_unions(
    blocks,
    tiles,
    page_table,
    unions,
    sizes,
    num_tokens,
    num_blocks,
    table_pitch,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Ascending union of a tile's blocks: page, block and a bit for each row that chose it.

    `tiles` int64 [tiles, 4]: first row, rows, position of row 0, sequence. `unions` int32
    [G, tiles, ROWS * SLOTS, 3].
    """
    tile, group = tl.program_id(0), tl.program_id(1)
    num_tiles = tl.num_programs(0)
    first_row = tl.load(tiles + tile * 4)
    num_rows = tl.load(tiles + tile * 4 + 1).to(tl.int32)
    position = tl.load(tiles + tile * 4 + 2).to(tl.int32)
    sequence = tl.load(tiles + tile * 4 + 3)
    entry = tl.arange(0, ROWS * SLOTS)
    row, slot = entry // SLOTS, entry % SLOTS
    source = (group.to(tl.int64) * num_tokens + first_row + row) * num_blocks + slot
    block = tl.load(blocks + source, mask=(row < num_rows) & (slot < num_blocks), other=-1)
    # a block after the row has no key for it, and its table entry may be no address
    block = tl.where((block < 0) | (block > (position + row) // BLOCK), NO_ID, block)
    # the same entries along the other axis, without a second load
    across = tl.sum(tl.where(entry[:, None] == entry[None, :], block[:, None], 0), 0)
    present = across != NO_ID
    same = (block[:, None] == across[None, :]) & present[None, :]
    earlier = same & (entry[:, None] < entry[None, :])
    first = present & (tl.sum(earlier.to(tl.int32), 0) == 0)
    members = tl.sum(tl.where(same, (1 << row)[:, None], 0), 0)
    first_down = tl.sum(
        tl.where(entry[:, None] == entry[None, :], first[None, :].to(tl.int32), 0), 1
    )
    lower = (block[:, None] < across[None, :]) & (first_down[:, None] > 0)
    place = tl.sum(lower.to(tl.int32), 0)
    page = tl.load(page_table + sequence * table_pitch + across, mask=first, other=0)
    base = (group.to(tl.int64) * num_tiles + tile) * (ROWS * SLOTS)
    target = unions + (base + place) * 3
    tl.store(target, page, mask=first)
    tl.store(target + 1, across, mask=first)
    tl.store(target + 2, members, mask=first)
    tl.store(sizes + group * num_tiles + tile, tl.sum(first.to(tl.int32), 0))


@triton.jit
def attend_unions(
    q,
    k_pages,
    v_pages,
    out,
    tiles,
    lengths,
    unions,
    sizes,
    scale_log2,
    num_heads,
    per_group,
    q_pitch,
    k_page_pitch,
    k_group_pitch,
    k_pitch,
    v_page_pitch,
    v_group_pitch,
    v_pitch,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Online softmax over a tile's union; each row counts only the blocks it chose itself."""
    tile, group = tl.program_id(0), tl.program_id(1)
    num_tiles = tl.num_programs(0)
    first_row = tl.load(tiles + tile * 4)
    num_rows = tl.load(tiles + tile * 4 + 1).to(tl.int32)
    position = tl.load(tiles + tile * 4 + 2).to(tl.int32)
    length = tl.load(lengths + tl.load(tiles + tile * 4 + 3))
    line = tl.arange(0, ROWS * HEADS)
    row, head = line // HEADS, line % HEADS
    held = (row < num_rows) & (head < per_group)
    at = tl.arange(0, DIM)
    offset = (first_row + row)[:, None] * q_pitch + (group * per_group + head)[:, None] * DIM + at
    queries = tl.load(q + offset, mask=held[:, None], other=0.0)
    highest = tl.full((ROWS * HEADS,), FLOOR, tl.float32)
    weight_sum = tl.zeros((ROWS * HEADS,), tl.float32)
    mixed = tl.zeros((ROWS * HEADS, DIM), tl.float32)
    entries = unions + (group.to(tl.int64) * num_tiles + tile) * (ROWS * SLOTS * 3)
    if WIDE:
        queries = queries.to(tl.float32)
    key = tl.arange(0, BLOCK)
    for index in range(0, tl.load(sizes + group * num_tiles + tile)):
        page = tl.load(entries + index * 3).to(tl.int64)
        block = tl.load(entries + index * 3 + 1)
        members = tl.load(entries + index * 3 + 2)
        k_at = k_pages + page * k_page_pitch + group * k_group_pitch
        keys = tl.load(k_at + key[None, :] * k_pitch + at[:, None])
        written = block * BLOCK + key < length
        v_at = v_pages + page * v_page_pitch + group * v_group_pitch
        v_at += key[:, None] * v_pitch + at[None, :]
        values = tl.load(v_at, mask=written[:, None], other=0.0)
        # also of e4m3 pages
        keys, values = keys.to(queries.dtype), values.to(queries.dtype)
        dots = tl.dot(queries, keys, input_precision="ieee") * scale_log2
        seen = ((members >> row) & 1)[:, None] > 0
        seen &= (block * BLOCK + key)[None, :] <= (position + row)[:, None]
        dots = tl.where(seen, dots, FLOOR)
        peak = tl.maximum(highest, tl.max(dots, 1))
        weights = tl.where(seen, tl.exp2(dots - peak[:, None]), 0.0)
        fade = tl.exp2(highest - peak)
        weight_sum = weight_sum * fade + tl.sum(weights, 1)
        mixed = mixed * fade[:, None]
        mixed = tl.dot(weights.to(values.dtype), values, mixed, input_precision="ieee")
        highest = peak
    result = mixed / tl.where(weight_sum > 0, weight_sum, 1.0)[:, None]
    target = ((first_row + row) * num_heads + group * per_group + head)[:, None] * DIM
    tl.store(out + target + at[None, :], result.to(out.dtype.element_ty), mask=held[:, None])


def choose_blocks(
    index_q_TGD: Tensor,
    index_k_PBD: Tensor,
    rows: PagedRows,
    num_blocks: int,
    num_local_blocks: int,
) -> Tensor:
    """See `interface.ChooseBlocks`; power-of-two page and head sizes of at least 16.

    Raises:
        ValueError: a size that is not such a power, or fewer than 0 local blocks.
    """
    num_tokens, groups, dim = index_q_TGD.shape
    block = index_k_PBD.shape[1]
    require_powers(page=block, head=dim)
    device = index_q_TGD.device
    if num_tokens == 0:
        return torch.empty(groups, 0, num_blocks, dtype=torch.int32, device=device)
    index_q_TGD = index_q_TGD.contiguous()
    require_dense_rows(index_k_PBD)
    kept = max(2, triton.next_power_of_2(num_blocks))
    flat_rows = num_tokens * groups
    pages = -(-rows.max_seq_len // block)
    span = min(SPAN_PAGES, max(kept, triton.next_power_of_2(pages)))
    positions_T = row_positions(rows, num_tokens)
    tiles_N4 = cut_tiles(rows, num_tokens, SCORE_TILE_ROWS, groups)
    scores = torch.empty(flat_rows, span, dtype=torch.float32, device=device)
    best = torch.zeros(flat_rows, kept, dtype=torch.int64, device=device)
    # enough programs for every processor, few enough pages lost to a program's start
    pages_each = max(1, min(64, span * tiles_N4.shape[0] // 2048))
    # a kernel is compiled for every number there is
    pages_each = 1 << pages_each.bit_length() - 1
    for first_page in range(0, pages, span):
        score_span[(tiles_N4.shape[0], -(-span // pages_each))](
            index_q_TGD,
            index_k_PBD,
            tiles_N4,
            rows.page_table_SJ,
            scores,
            first_page,
            groups,
            rows.page_table_SJ.stride(0),
            index_k_PBD.stride(0),
            index_k_PBD.stride(1),
            ROWS=SCORE_TILE_ROWS,
            BLOCK=block,
            DIM=dim,
            SPAN=span,
            PAGES=pages_each,
            WIDE=device.type == "cpu",
            num_warps=8,
        )
        rank_span[(flat_rows,)](
            scores,
            positions_T,
            best,
            first_page,
            groups,
            num_local_blocks,
            BLOCK=block,
            SPAN=span,
            WIDTH=max(kept, min(RANK_WIDTH, span)),
            KEPT=kept,
            num_warps=1,
        )
    ranked_GTK = best.view(num_tokens, groups, kept).transpose(0, 1)
    return _with_local_blocks(ranked_GTK, positions_T // block, num_blocks, num_local_blocks)


def _with_local_blocks(
    ranked_GTK: Tensor, own_T: Tensor, num_blocks: int, num_local_blocks: int
) -> Tensor:
    """Best ranked blocks and the local ones, ascending, -1 at the tail."""
    local_T1 = (own_T + 1).clamp(max=num_local_blocks)[:, None]
    place_K = torch.arange(num_blocks, device=own_T.device)
    keys_GTK = ranked_GTK.sort(dim=-1, descending=True).values[..., :num_blocks]
    lost = (place_K >= num_blocks - local_T1) | (keys_GTK == 0)
    ids_GTK = (NO_ID.value - (keys_GTK & NO_ID.value)).masked_fill(lost, NO_ID.value)
    # the last places of the list are free for the local blocks: place K - 1 - i takes own - i
    back_K = num_blocks - 1 - place_K
    local_TK = torch.where(back_K < local_T1, own_T[:, None] - back_K, NO_ID.value)
    ids_GTK = torch.minimum(ids_GTK, local_TK).sort(dim=-1).values
    return ids_GTK.masked_fill(ids_GTK == NO_ID.value, NO_BLOCK).to(torch.int32)


def block_attention(
    q_THD: Tensor,
    pages: LayerPages,
    blocks_GTK: Tensor,
    rows: PagedRows,
    scale: float,
    *,
    tile_rows: int = 4,
) -> Tensor:
    """See `interface.BlockAttention`; `tile_rows` 1 is the query-major arm.

    Raises:
        ValueError: page or head size that is not a power of two of at least 16, or a tile size
            that is not 1, 2, 4 or 8.
    """
    num_tokens, heads, dim = q_THD.shape
    groups, _, num_blocks = blocks_GTK.shape
    block, device = pages.k_PGBD.shape[2], q_THD.device
    require_powers(page=block, head=dim)
    if tile_rows not in (1, 2, 4, 8):
        raise ValueError(f"tiles of 1, 2, 4 or 8 rows, not {tile_rows}")
    out_THD = torch.zeros(q_THD.shape, dtype=q_THD.dtype, device=device)
    if num_tokens == 0:
        return out_THD
    q_THD = q_THD.contiguous()
    k_PGBD, v_PGBD = pages.k_PGBD, pages.v_PGBD
    require_dense_rows(k_PGBD, v_PGBD)
    per_group = heads // groups
    slots = triton.next_power_of_2(num_blocks)
    padded_heads = max(triton.next_power_of_2(per_group), 16 // tile_rows)
    tiles_N4 = cut_tiles(rows, num_tokens, tile_rows, 1)
    num_tiles = tiles_N4.shape[0]
    integer = {"dtype": torch.int32, "device": device}
    unions = torch.empty(groups, num_tiles, tile_rows * slots, 3, **integer)
    sizes = torch.empty(groups, num_tiles, **integer)
    list_unions[(num_tiles, groups)](
        blocks_GTK.contiguous(),
        tiles_N4,
        rows.page_table_SJ,
        unions,
        sizes,
        num_tokens,
        num_blocks,
        rows.page_table_SJ.stride(0),
        ROWS=tile_rows,
        SLOTS=slots,
        BLOCK=block,
    )
    attend_unions[(num_tiles, groups)](
        q_THD,
        k_PGBD,
        v_PGBD,
        out_THD,
        tiles_N4,
        rows.seq_lens_S,
        unions,
        sizes,
        scale * 1.4426950408889634,
        heads,
        per_group,
        heads * dim,
        *k_PGBD.stride()[:3],
        *v_PGBD.stride()[:3],
        ROWS=tile_rows,
        HEADS=padded_heads,
        SLOTS=slots,
        BLOCK=block,
        DIM=dim,
        WIDE=device.type == "cpu",
        num_warps=8 if tile_rows == 8 else 4,
        num_stages=2,
    )
    return out_THD
