"""Block choice over index keys that ranks hold in parts: candidates of each, then their merge.

Rank r of R holds the index keys of every R-th page, beginning with page r. It scores the blocks of
its pages for the index queries of all groups and gives its best as candidates, which carry score
and block id in one integer whose order is the total order of `interface.ChooseBlocks`. The best
of all ranks' candidates are therefore exactly the blocks that one rank with all keys would choose.

These are plain torch: the definition that faster back ends are held to.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from m3stack.kernels.interface import NO_BLOCK, PagedRows, PartRows
from m3stack.kernels.msa.reference import block_scores
from m3stack.kernels.paged_rows import row_positions

NO_CANDIDATE = torch.iinfo(torch.int64).min
"""Stands behind every candidate."""

_LOW_32 = (1 << 32) - 1
# what orders a score of minus infinity; NaN counts as one
_LEAST = 0x007FFFFF - (1 << 31)


def part_of_rows(
    rows: PagedRows, *, rank: int, ranks: int, page_tokens: int, last_row: int, num_local: int
) -> PartRows:
    """What a rank scores of a step; device work of fixed shapes, without a sync.

    Args:
        rank, ranks: the pages held here are those with `page % ranks == rank`, as row
            `page // ranks` of the index-key tensor.
        last_row: of that tensor; its keys are NaN.
        num_local: local blocks of a row, at least 1.
    """
    lens_S, starts_S1 = rows.seq_lens_S, rows.query_start_S1
    first_S = lens_S - starts_S1.diff()
    # blocks below this one may be ranked by all rows
    shared_S = (first_S // page_tokens - (num_local - 1)).clamp(min=0)[:, None]
    pages_SJ = rows.page_table_SJ
    ids_J = torch.arange(pages_SJ.shape[1], dtype=torch.int32, device=pages_SJ.device)
    used_SJ = ids_J * page_tokens < lens_S[:, None]
    own_SJ = used_SJ & (pages_SJ % ranks == rank)
    kept_SJ = own_SJ & (ids_J < shared_S)
    num_kept_S = kept_SJ.sum(1, dtype=torch.int32)[:, None]
    places_SJ = torch.where(
        kept_SJ,
        kept_SJ.cumsum(1, dtype=torch.int32) - 1,
        num_kept_S + ids_J - shared_S,
    )
    # what is neither kept nor behind the kept ones goes to one column too many
    places_SJ = torch.where(
        kept_SJ | (used_SJ & (ids_J >= shared_S)), places_SJ, pages_SJ.shape[1]
    ).long()
    wide = (pages_SJ.shape[0], pages_SJ.shape[1] + 1)
    table_SJ = pages_SJ.new_full(wide, last_row)
    table_SJ.scatter_(1, places_SJ, torch.where(own_SJ, pages_SJ // ranks, last_row))
    blocks_SJ = pages_SJ.new_full(wide, NO_BLOCK)
    blocks_SJ.scatter_(1, places_SJ, torch.where(own_SJ, ids_J, NO_BLOCK))
    short_S = lens_S - (shared_S - num_kept_S)[:, 0] * page_tokens
    return PartRows(
        PagedRows(
            query_start_S1=starts_S1,
            seq_lens_S=short_S.to(torch.int32),
            page_table_SJ=table_SJ[:, :-1],
            max_query_len=rows.max_query_len,
            max_seq_len=rows.max_seq_len,
        ),
        blocks_SJ[:, :-1],
    )


def own_slots(slots_T: Tensor, *, rank: int, ranks: int, page_tokens: int) -> Tensor:
    """Slots of index keys held in parts, for slots of whole pages; -1 where another rank's."""
    page_T = slots_T // page_tokens
    row_T = page_T // ranks
    is_own_T = (slots_T >= 0) & (page_T % ranks == rank)
    return torch.where(is_own_T, row_T * page_tokens + slots_T % page_tokens, -1)


def pack(scores: Tensor, blocks: Tensor) -> Tensor:
    """Candidates int64 of fp32 scores and block ids; more is better, and none are equal."""
    scores = scores.float() + 0.0  # -0 becomes +0
    bits = scores.view(torch.int32).long()
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = order.masked_fill(scores.isnan(), _LEAST)
    return (order << 32) | (_LOW_32 - blocks.long())


def blocks_of(candidates: Tensor) -> Tensor:
    """The block ids int64 of candidates."""
    return _LOW_32 - (candidates & _LOW_32)


def choose_candidates(
    index_q_TGD: Tensor, index_k_PBD: Tensor, part: PartRows, num_blocks: int, num_local: int
) -> Tensor:
    """The best blocks that a rank holds; see `interface.ChooseCandidates`.

    Returns:
        int64 [G, T, K], descending.
    """
    num_tokens = index_q_TGD.shape[0]
    block = index_k_PBD.shape[1]
    rows, device = part.rows, index_q_TGD.device
    scores_GTJ = block_scores(index_q_TGD, index_k_PBD, rows)
    width = min(scores_GTJ.shape[-1], part.blocks_SJ.shape[1])
    own_T = row_positions(rows, num_tokens, device) // block
    num_rows_S = rows.query_start_S1.long().diff()
    sequence_T = torch.arange(len(num_rows_S), device=device).repeat_interleave(num_rows_S)
    sequence_T = functional.pad(sequence_T, (0, num_tokens - len(sequence_T)))
    blocks_TJ = part.blocks_SJ[sequence_T, :width]
    free_TJ = torch.arange(width, device=device) < (own_T + 1 - num_local)[:, None]
    packed_GTJ = pack(scores_GTJ[..., :width], blocks_TJ)
    packed_GTJ = packed_GTJ.masked_fill(~free_TJ | (blocks_TJ == NO_BLOCK), NO_CANDIDATE)
    if width < num_blocks:
        packed_GTJ = functional.pad(packed_GTJ, (0, num_blocks - width), value=NO_CANDIDATE)
    return packed_GTJ.topk(num_blocks, dim=-1).values


def merge_candidates(
    candidates_RGTK: Tensor, rows: PagedRows, page_tokens: int, num_local: int
) -> Tensor:
    """The blocks each row attends to; see `interface.MergeCandidates`.

    Returns:
        int32 [G, T, K], ascending, -1 padded at the tail.
    """
    _, groups, num_tokens, num_blocks = candidates_RGTK.shape
    device = candidates_RGTK.device
    own_T1 = (row_positions(rows, num_tokens, device) // page_tokens)[:, None]
    num_local_T1 = (own_T1 + 1).clamp(max=num_local)
    all_GTn = candidates_RGTK.permute(1, 2, 0, 3).flatten(2)
    best_GTK = all_GTn.topk(num_blocks, dim=-1).values
    places_K = torch.arange(num_blocks, device=device)
    # a place that stays empty sorts behind every block
    empty = torch.iinfo(torch.int64).max
    is_won = (best_GTK != NO_CANDIDATE) & (places_K < num_blocks - num_local_T1)
    won_GTK = blocks_of(best_GTK).masked_fill(~is_won, empty)
    local_TL = own_T1 - torch.arange(num_local, device=device)
    local_TL = local_TL.masked_fill(local_TL < 0, empty)
    picked = torch.cat([won_GTK, local_TL.expand(groups, -1, -1)], dim=-1)
    picked = picked.sort(dim=-1).values[..., :num_blocks]
    return picked.masked_fill(picked == empty, NO_BLOCK).to(torch.int32)
