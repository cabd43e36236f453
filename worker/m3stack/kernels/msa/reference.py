"""MiniMax Sparse Attention in plain torch: the definition every faster back end is held to.

Source: arXiv 2606.13392 and transformers 5.24 `minimax_m3_vl`; tie rule and output order are the
house contract (`interface.ChooseBlocks`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from m3stack.kernels.attention.reference import attend, gather_pages, visible_slots, wide
from m3stack.kernels.interface import NO_BLOCK, LayerPages, PagedRows
from m3stack.kernels.paged_rows import (
    Tile,
    TileCost,
    positions,
    row_positions,
    sequences,
    tiles,
)

__all__ = [
    "block_attention",
    "block_scores",
    "choose_blocks",
    "positions",
    "rank_blocks",
    "row_positions",
    "sequences",
]

MINUS_INFINITY = float("-inf")


def block_scores(index_q_TGD: Tensor, index_k_PBD: Tensor, rows: PagedRows) -> Tensor:
    """Largest unscaled dot product of every row with the visible keys of every block.

    Args:
        index_q_TGD: [T, G, D] after norm and rotary, any float dtype.
        index_k_PBD: [P, B, D] paged index keys.
        rows: positions and page tables of the step.

    Returns:
        fp32 (fp64 for fp64 input) [G, T, J] with J = ceil(max_seq_len / B); -inf where a row sees
        no key of the block. A NaN key makes its block's score NaN.
    """
    num_tokens, groups, dim = index_q_TGD.shape
    block = index_k_PBD.shape[1]
    num_blocks = -(-rows.max_seq_len // block)
    index_q_TGD = wide(index_q_TGD)
    scores_TGJ = index_q_TGD.new_full((num_tokens, groups, num_blocks), MINUS_INFINITY)

    def cost(num_pages: int, num_rows: int) -> TileCost:
        return TileCost(num_pages * block * dim, num_pages * groups * block)

    for tile in tiles(rows, block, cost):
        sequences, num_pages = tile.table_SJ.shape
        keys = index_k_PBD.index_select(0, tile.table_SJ.reshape(-1))
        keys_SnD = wide(keys).view(sequences, num_pages * block, dim)
        queries = index_q_TGD[tile.rows_SR].view(sequences, -1, dim)
        dots = (queries @ keys_SnD.mT).view(*tile.rows_SR.shape, groups, num_pages * block)
        dots = dots.masked_fill_(~visible_slots(tile, block)[:, :, None], MINUS_INFINITY)
        dots = dots.view(*tile.rows_SR.shape, groups, num_pages, block)
        scores_TGJ[tile.rows_SR, :, :num_pages] = dots.amax(-1)
    return scores_TGJ.transpose(0, 1)


def choose_blocks(
    index_q_TGD: Tensor,
    index_k_PBD: Tensor,
    rows: PagedRows,
    num_blocks: int,
    num_local_blocks: int,
    _index_copy_PX: Tensor | None = None,
) -> Tensor:
    """Blocks each row attends to; see `interface.ChooseBlocks`.

    Returns:
        int32 [G, T, K], ascending, -1 padded at the tail.
    """
    block = index_k_PBD.shape[1]
    if rows.max_seq_len <= num_blocks * block:
        return _every_block(index_q_TGD, rows, block, num_blocks)
    scores_GTJ = block_scores(index_q_TGD, index_k_PBD, rows)
    return rank_blocks(scores_GTJ, rows, block, num_blocks, num_local_blocks)


def rank_blocks(
    scores_GTJ: Tensor, rows: PagedRows, block: int, num_blocks: int, num_local_blocks: int
) -> Tensor:
    """Applies the total order (score descending, lower id; NaN last; local blocks forced)."""
    _, num_tokens, width = scores_GTJ.shape
    device = scores_GTJ.device
    own_T1 = (row_positions(rows, num_tokens, device) // block)[:, None]
    # blocks 0 .. num_free - 1 compete for the places that the local blocks leave
    num_local_T1 = (own_T1 + 1).clamp(max=num_local_blocks)
    num_free_T1 = own_T1 + 1 - num_local_T1
    ids_J = torch.arange(width, device=device)
    ranked = scores_GTJ.nan_to_num(nan=MINUS_INFINITY, posinf=torch.inf, neginf=MINUS_INFINITY)
    ranked = (ranked + 0.0).masked_fill(ids_J >= num_free_T1, MINUS_INFINITY)  # -0 becomes +0
    # stable: equal scores keep the lower id first, so no later block passes a competing one
    order_GTK = ranked.argsort(dim=-1, descending=True, stable=True)[..., :num_blocks]
    order_GTK = functional.pad(order_GTK, (0, num_blocks - order_GTK.shape[-1]))
    places_K = torch.arange(num_blocks, device=device)
    num_won_T1 = torch.minimum(num_free_T1, num_blocks - num_local_T1)
    local_TK = num_free_T1 + places_K - num_won_T1
    picked = torch.where(places_K < num_won_T1, order_GTK, local_TK)
    # a place that stays empty sorts behind every block
    empty = torch.iinfo(torch.int64).max
    picked = picked.masked_fill(places_K >= num_won_T1 + num_local_T1, empty).sort(dim=-1).values
    return picked.masked_fill(picked == empty, NO_BLOCK).to(torch.int32)


def block_attention(
    q_THD: Tensor, pages: LayerPages, blocks_GTK: Tensor, rows: PagedRows, scale: float
) -> Tensor:
    """Exact softmax attention of each row over its chosen blocks; see `interface.BlockAttention`.

    Returns:
        [T, H, D] in the dtype of `q_THD`; zeros for rows that see no key.
    """
    _, groups, block, dim = pages.k_PGBD.shape
    heads, num_chosen = q_THD.shape[1], blocks_GTK.shape[2]

    def cost(num_pages: int, num_rows: int) -> TileCost:
        if _reads_every_page(num_pages, num_rows, num_chosen):
            return TileCost(num_pages * groups * block * dim, num_pages * heads * block)
        return TileCost(0, num_chosen * groups * block * dim)

    out_THD = torch.zeros_like(q_THD)
    blocks_TGK = blocks_GTK.transpose(0, 1).long()
    for tile in tiles(rows, block, cost):
        q_SRHD, blocks_SRGK = wide(q_THD[tile.rows_SR]), blocks_TGK[tile.rows_SR]
        num_pages, num_rows = tile.table_SJ.shape[1], tile.rows_SR.shape[1]
        read = _attend_gathered
        if _reads_every_page(num_pages, num_rows, num_chosen):
            read = _attend_masked
        out_THD[tile.rows_SR] = read(q_SRHD, pages, blocks_SRGK, tile, scale).to(q_THD.dtype)
    return out_THD


def _reads_every_page(num_pages: int, num_rows: int, num_chosen: int) -> bool:
    # many rows share what is read; one row alone should not read what it did not choose
    return num_pages <= num_chosen * (1 if num_rows == 1 else 4)


def _attend_masked(
    q_SRHD: Tensor, pages: LayerPages, blocks_SRGK: Tensor, tile: Tile, scale: float
) -> Tensor:
    block, num_pages = pages.k_PGBD.shape[2], tile.table_SJ.shape[1]
    k_SGnD, v_SGnD = gather_pages(pages, tile)
    # one column too many takes the places that hold no block
    chosen = blocks_SRGK.new_zeros(*blocks_SRGK.shape[:3], num_pages + 1, dtype=torch.bool)
    chosen.scatter_(-1, blocks_SRGK.masked_fill(blocks_SRGK < 0, num_pages), True)
    chosen_SGRn = chosen[..., :num_pages].transpose(1, 2).repeat_interleave(block, dim=-1)
    return attend(q_SRHD, k_SGnD, v_SGnD, chosen_SGRn & visible_slots(tile, block)[:, None], scale)


def _attend_gathered(
    q_SRHD: Tensor, pages: LayerPages, blocks_SRGK: Tensor, tile: Tile, scale: float
) -> Tensor:
    _, groups, block, dim = pages.k_PGBD.shape
    table_SRGJ = tile.table_SJ[:, None, None].expand(*blocks_SRGK.shape[:3], -1)
    page_SRGK = table_SRGJ.gather(-1, blocks_SRGK.clamp(min=0))
    group_G1 = torch.arange(groups, device=page_SRGK.device)[:, None]
    slots_SRGKB = blocks_SRGK[..., None] * block + torch.arange(block, device=page_SRGK.device)
    seen = (slots_SRGKB >= 0) & (slots_SRGKB <= tile.positions_SR[:, :, None, None, None])
    # every row is a sequence of its own here: it reads its own pages
    seen = seen.view(-1, groups, 1, seen.shape[3] * block)
    k = wide(pages.k_PGBD[page_SRGK, group_G1]).view(*seen.shape[:2], -1, dim)
    v = wide(pages.v_PGBD[page_SRGK, group_G1]).view(*seen.shape[:2], -1, dim)
    # indexing has copied: the cache itself stays as it is
    v = v.masked_fill_(~seen.mT, 0.0)
    return attend(q_SRHD.view(-1, 1, *q_SRHD.shape[2:]), k, v, seen, scale).view(q_SRHD.shape)


def _every_block(index_q_TGD: Tensor, rows: PagedRows, block: int, num_blocks: int) -> Tensor:
    num_tokens, groups, _ = index_q_TGD.shape
    own_T = row_positions(rows, num_tokens, index_q_TGD.device) // block
    ids_K = torch.arange(num_blocks, device=index_q_TGD.device)
    blocks_TK = torch.where(ids_K <= own_T[:, None], ids_K, NO_BLOCK).to(torch.int32)
    return blocks_TK.expand(groups, -1, -1).contiguous()
