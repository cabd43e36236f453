"""MiniMax Sparse Attention in plain torch: the definition every faster back end is held to.

Source: arXiv 2606.13392 and transformers 5.24 `minimax_m3_vl`; tie rule and output order are the
house contract (`interface.ChooseBlocks`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from m3stack.kernels.interface import NO_BLOCK, LayerPages, PagedRows


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
    num_tokens, groups, _ = index_q_TGD.shape
    block = index_k_PBD.shape[1]
    num_blocks = -(-rows.max_seq_len // block)
    dtype = torch.float64 if index_q_TGD.dtype == torch.float64 else torch.float32
    scores_GTJ = torch.full(
        (groups, num_tokens, num_blocks), float("-inf"), dtype=dtype, device=index_q_TGD.device
    )
    for first, last, seq_len, pages in sequences(rows, block):
        keys_JBD = index_k_PBD[pages].to(dtype)
        positions_T = positions(first, last, seq_len, keys_JBD.device)
        slots_JB = torch.arange(keys_JBD.shape[0] * block, device=keys_JBD.device).view(-1, block)
        # rows past the sequence may hold anything, NaN included: keep them out of the product
        written_JB = slots_JB < seq_len
        keys_JBD = keys_JBD.masked_fill(~written_JB[..., None], 0)
        dots_TGJB = torch.einsum("tgd,jbd->tgjb", index_q_TGD[first:last].to(dtype), keys_JBD)
        visible_TJB = slots_JB[None] <= positions_T[:, None, None]
        dots_TGJB = dots_TGJB.masked_fill(~visible_TJB[:, None], float("-inf"))
        scores_GTJ[:, first:last, : len(pages)] = dots_TGJB.amax(-1).transpose(0, 1)
    return scores_GTJ


def choose_blocks(
    index_q_TGD: Tensor,
    index_k_PBD: Tensor,
    rows: PagedRows,
    num_blocks: int,
    num_local_blocks: int,
) -> Tensor:
    """Blocks each row attends to; see `interface.ChooseBlocks`.

    Returns:
        int32 [G, T, K], ascending, -1 padded at the tail.
    """
    scores_GTJ = block_scores(index_q_TGD, index_k_PBD, rows)
    return rank_blocks(scores_GTJ, rows, index_k_PBD.shape[1], num_blocks, num_local_blocks)


def rank_blocks(
    scores_GTJ: Tensor, rows: PagedRows, block: int, num_blocks: int, num_local_blocks: int
) -> Tensor:
    """Applies the total order (score descending, lower id; NaN last; local blocks forced)."""
    groups, num_tokens, width = scores_GTJ.shape
    device = scores_GTJ.device
    chosen_GTK = torch.full(
        (groups, num_tokens, num_blocks), NO_BLOCK, dtype=torch.int32, device=device
    )
    if width == 0:
        return chosen_GTK
    own_T = row_positions(rows, num_tokens, device) // block
    ids_J = torch.arange(width, device=device)
    visible_TJ = ids_J[None] <= own_T[:, None]
    local_TJ = visible_TJ & (ids_J[None] > own_T[:, None] - num_local_blocks)
    ranked = scores_GTJ.nan_to_num(nan=float("-inf"), posinf=torch.inf, neginf=float("-inf"))
    ranked = ranked + 0.0  # -0 becomes +0
    ranked = ranked.masked_fill(~visible_TJ[None], float("-inf"))
    # a stable sort by three keys, least significant first: id, score, class
    order = ranked.argsort(dim=-1, descending=True, stable=True)
    rank_class = torch.where(local_TJ, 0, torch.where(visible_TJ, 1, 2)).expand(groups, -1, -1)
    by_class = rank_class.gather(-1, order).argsort(dim=-1, stable=True)
    order = order.gather(-1, by_class)[..., :num_blocks]
    kept = visible_TJ.expand(groups, -1, -1).gather(-1, order)
    picked = torch.where(kept, order, width).sort(dim=-1).values
    picked = torch.where(picked < width, picked, NO_BLOCK).to(torch.int32)
    chosen_GTK[..., : picked.shape[-1]] = picked
    return chosen_GTK


def block_attention(
    q_THD: Tensor, pages: LayerPages, blocks_GTK: Tensor, rows: PagedRows, scale: float
) -> Tensor:
    """Exact softmax attention of each row over its chosen blocks; see `interface.BlockAttention`.

    Returns:
        [T, H, D] in the dtype of `q_THD`; zeros for rows that see no key.
    """
    num_tokens, heads, dim = q_THD.shape
    _, groups, block, _ = pages.k_PGBD.shape
    per_group = heads // groups
    dtype = torch.float64 if q_THD.dtype == torch.float64 else torch.float32
    out_THD = torch.zeros_like(q_THD)
    for first, last, seq_len, table in sequences(rows, block):
        positions_T = positions(first, last, seq_len, q_THD.device)
        for group in range(groups):
            chosen_TK = blocks_GTK[group, first:last].long()
            valid_TK = chosen_TK >= 0
            page_TK = table[chosen_TK.clamp(min=0)]
            k_TKBD = pages.k_PGBD[page_TK, group].to(dtype)
            v_TKBD = pages.v_PGBD[page_TK, group].to(dtype)
            slots_TKB = chosen_TK[..., None] * block + torch.arange(block, device=q_THD.device)
            seen_TKB = valid_TK[..., None] & (slots_TKB <= positions_T[:, None, None])
            v_TKBD = v_TKBD.masked_fill(~seen_TKB[..., None], 0)
            q_Thd = q_THD[first:last, group * per_group : (group + 1) * per_group].to(dtype)
            logits = torch.einsum("thd,tkbd->thkb", q_Thd, k_TKBD) * scale
            logits = logits.masked_fill(~seen_TKB[:, None], float("-inf")).flatten(2)
            weights = logits.softmax(-1)
            weights = weights.masked_fill(~seen_TKB.any(-1).any(-1)[:, None, None], 0)
            mixed = torch.einsum("thn,tnd->thd", weights, v_TKBD.flatten(1, 2))
            out_THD[first:last, group * per_group : (group + 1) * per_group] = mixed.to(q_THD.dtype)
    return out_THD


def sequences(rows: PagedRows, block: int):
    """Yields (first row, last row, length, its pages int64) of every non-empty sequence."""
    starts = rows.query_start_S1.tolist()
    lengths = rows.seq_lens_S.tolist()
    for index, seq_len in enumerate(lengths):
        first, last = starts[index], starts[index + 1]
        if last > first and seq_len > 0:
            yield first, last, seq_len, rows.page_table_SJ[index, : -(-seq_len // block)].long()


def positions(first: int, last: int, seq_len: int, device: torch.device) -> Tensor:
    """Absolute positions int64 [last - first] of a sequence's rows."""
    return torch.arange(seq_len - (last - first), seq_len, device=device)


def row_positions(rows: PagedRows, num_tokens: int, device: torch.device) -> Tensor:
    """Absolute position int64 [T] of every row of the step; -1 for rows of empty sequences."""
    result_T = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
    starts = rows.query_start_S1.tolist()
    for index, seq_len in enumerate(rows.seq_lens_S.tolist()):
        first, last = starts[index], starts[index + 1]
        if seq_len > 0:
            result_T[first:last] = positions(first, last, seq_len, device)
    return result_T
