"""Dense attention in plain torch: full within packed rows, and causal over paged keys."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from m3stack.kernels.interface import LayerPages, PagedRows
from m3stack.kernels.paged_rows import TILE_VALUES, Tile, TileCost, tiles


def varlen_attention(
    q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, cu_seqlens: Tensor, max_len: int, scale: float
) -> Tensor:
    """Full attention within each packed row; see `interface.VarlenAttention`.

    Returns:
        [N, H, D] in the dtype of `q_NHD`.
    """
    heads = q_NHD.shape[1]
    out_NHD = torch.empty_like(q_NHD)
    bounds = cu_seqlens.tolist()
    for first, last in pairwise(bounds):
        q, k, v = (wide(x[first:last]).transpose(0, 1) for x in (q_NHD, k_NHD, v_NHD))
        rows = max(1, TILE_VALUES // (heads * max(1, last - first)))
        for begin in range(0, last - first, rows):
            weights = (q[:, begin : begin + rows] @ k.mT * scale).softmax(-1)
            end = min(first + begin + rows, last)
            out_NHD[first + begin : end] = (weights @ v).transpose(0, 1).to(q_NHD.dtype)
    return out_NHD


def paged_attention(q_THD: Tensor, pages: LayerPages, rows: PagedRows, scale: float) -> Tensor:
    """Causal attention over every visible key; see `interface.PagedAttention`.

    Returns:
        [T, H, D] in the dtype of `q_THD`; zeros for rows of empty sequences.
    """
    _, groups, block, dim = pages.k_PGBD.shape
    out_THD = torch.zeros_like(q_THD)

    def cost(num_pages: int, num_rows: int) -> TileCost:
        return TileCost(num_pages * groups * block * dim, num_pages * q_THD.shape[1] * block)

    for tile in tiles(rows, block, cost):
        k_SGnD, v_SGnD = gather_pages(pages, tile)
        visible_SRn = visible_slots(tile, block)
        out_SRHD = attend(wide(q_THD[tile.rows_SR]), k_SGnD, v_SGnD, visible_SRn[:, None], scale)
        out_THD[tile.rows_SR] = out_SRHD.to(q_THD.dtype)
    return out_THD


def attend(q_SRHD: Tensor, k_SGnD: Tensor, v_SGnD: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Exact softmax attention of R rows of each sequence over the n keys they share.

    Args:
        q_SRHD: fp32 or fp64.
        k_SGnD, v_SGnD: the same; v is finite wherever a row does not look.
        seen: bool [S, G or 1, R, n].

    Returns:
        [S, R, H, D]; zeros where nothing is seen.
    """
    sequences, num_rows, heads, dim = q_SRHD.shape
    groups, num_keys = k_SGnD.shape[1:3]
    per_group = heads // groups
    q = q_SRHD.view(sequences, num_rows, groups, per_group, dim).transpose(1, 2)
    logits = q.reshape(sequences, groups, -1, dim) @ k_SGnD.mT * scale
    logits = logits.view(sequences, groups, num_rows, per_group, num_keys)
    weights = logits.masked_fill_(~seen[..., None, :], float("-inf")).softmax(-1)
    mixed = weights.view(sequences, groups, -1, num_keys) @ v_SGnD
    mixed = mixed.view(sequences, groups, num_rows, per_group, dim)
    # the softmax of a row that sees nothing is NaN
    mixed = torch.where(seen.any(-1)[..., None, None], mixed, 0.0).transpose(1, 2)
    return mixed.reshape(sequences, num_rows, heads, dim)


def gather_pages(pages: LayerPages, tile: Tile) -> tuple[Tensor, Tensor]:
    """Keys and values [S, G, J*B, D] of a tile's sequences; values not yet written are zero."""
    _, groups, block, dim = pages.k_PGBD.shape
    sequences, num_pages = tile.table_SJ.shape
    flat = tile.table_SJ.reshape(-1)
    per_page, joined = (sequences, num_pages, groups, block, dim), (sequences, groups, -1, dim)
    k = wide(pages.k_PGBD.index_select(0, flat)).view(per_page).transpose(1, 2).reshape(joined)
    v = wide(pages.v_PGBD.index_select(0, flat)).view(per_page).transpose(1, 2).reshape(joined)
    slots_n = torch.arange(num_pages * block, device=v.device)
    # index_select has copied: the cache itself stays as it is
    unwritten_Sn = slots_n >= tile.seq_lens_S[:, None]
    return k, v.masked_fill_(unwritten_Sn[:, None, :, None], 0.0)


def visible_slots(tile: Tile, block: int) -> Tensor:
    """bool [S, R, J*B]: slots at or before each row."""
    slots_n = torch.arange(tile.table_SJ.shape[1] * block, device=tile.table_SJ.device)
    return slots_n <= tile.positions_SR[..., None]


def wide(x: Tensor) -> Tensor:
    """fp32, or fp64 where it already is: what references compute in."""
    return x if x.dtype == torch.float64 else x.float()
