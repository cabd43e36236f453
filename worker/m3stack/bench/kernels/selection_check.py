"""Whether chosen blocks are right: by score at the cut in fp64, and by the form of the list.

Two exact scores may lie closer than fp32 sums resolve, so lists are not compared with a list of
the reference; every block is held to the reference's score at the cut instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from m3stack.bench.kernels.harness import CheckError
from m3stack.kernels.interface import NO_BLOCK, PagedRows

# fp32 sums of 128 products of bf16 values of unit size: 2^-13 of |q||k|, about 128 at most here
SCORE_SLACK = 2.0**-13


def exact_scores(index_q_GD: Tensor, index_k_PBD: Tensor, table_J: Tensor, position: int) -> Tensor:
    """fp64 [G, J] block scores of one row at `position` over the pages `table_J` (int64 [J])."""
    block = index_k_PBD.shape[1]
    scores = []
    for first in range(0, len(table_J), 1024):
        keys_JBD = index_k_PBD[table_J[first : first + 1024]].double()
        dots_GJB = torch.einsum("gd,jbd->gjb", index_q_GD.double(), keys_JBD)
        slots_JB = torch.arange(keys_JBD[..., 0].numel(), device=dots_GJB.device).view(-1, block)
        hidden_JB = slots_JB + first * block > position
        scores.append(dots_GJB.masked_fill(hidden_JB, float("-inf")).amax(-1))
    return torch.cat(scores, -1).nan_to_num(nan=float("-inf"), posinf=torch.inf, neginf=-torch.inf)


def check_selection(
    blocks_GTK: Tensor,
    index_q_TGD: Tensor,
    index_k_PBD: Tensor,
    rows: PagedRows,
    num_local_blocks: int,
) -> None:
    """Holds every row of a selection to the contract of `interface.ChooseBlocks`.

    Raises:
        CheckError: names the row, the group and what is wrong.
    """
    starts = rows.query_start_S1.tolist()
    block = index_k_PBD.shape[1]
    for index, seq_len in enumerate(rows.seq_lens_S.tolist()):
        for row in range(starts[index], starts[index + 1]):
            position = seq_len - (starts[index + 1] - row) if seq_len else -1
            own = position // block
            if position < 0:
                if not bool((blocks_GTK[:, row] == NO_BLOCK).all()):
                    raise CheckError(f"row {row} of an empty sequence has blocks")
                continue
            table_J = rows.page_table_SJ[index, : own + 1].long()
            scores_GJ = exact_scores(index_q_TGD[row], index_k_PBD, table_J, position)
            norms = index_q_TGD[row].double().norm(dim=-1)
            keys = index_k_PBD[table_J].float().norm(dim=-1)
            largest = keys[torch.isfinite(keys)].amax().double() if own else keys.new_tensor(0.0)
            slack_G = 2 * SCORE_SLACK * norms * largest
            check_row(blocks_GTK[:, row], scores_GJ, slack_G, own, num_local_blocks)


def check_row(
    blocks_GK: Tensor, scores_GJ: Tensor, slack_G: Tensor, own: int, num_local_blocks: int
) -> None:
    """One row of all groups against its fp64 scores [G, own + 1]; see `check_selection`."""
    num_chosen = blocks_GK.shape[-1]
    count = min(num_chosen, own + 1)
    num_local = min(num_local_blocks, own + 1)
    for group, blocks_K in enumerate(blocks_GK.cpu()):
        chosen = blocks_K[:count].long()
        local = torch.arange(own - num_local + 1, own + 1)
        if not bool((blocks_K[count:] == NO_BLOCK).all()):
            raise CheckError(f"group {group}: tail after {count} blocks is {blocks_K.tolist()}")
        if not bool((chosen[1:] > chosen[:-1]).all()) or chosen[0] < 0 or chosen[-1] > own:
            raise CheckError(f"group {group}: not ascending within 0..{own}: {blocks_K.tolist()}")
        if not torch.equal(chosen[count - num_local :], local):
            raise CheckError(f"group {group}: local blocks missing in {blocks_K.tolist()}")
        ranked = scores_GJ[group, : own + 1 - num_local].cpu()
        need = count - num_local
        if need == 0:
            continue
        cut = ranked.topk(need).values[-1]
        taken = torch.zeros_like(ranked, dtype=torch.bool)
        taken[chosen[:need]] = True
        slack = slack_G[group].item()
        if bool((ranked[taken] < cut - slack).any()) or bool((ranked[~taken] > cut + slack).any()):
            raise CheckError(
                f"group {group}: chosen {chosen[:need].tolist()} is not the best {need} of "
                f"{own + 1} blocks; cut {cut:.6g}, slack {slack:.2g}"
            )
