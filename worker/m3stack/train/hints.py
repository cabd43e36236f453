"""Hints: attention that some heads are told, beside what they learn from the answers.

From answers alone heads did not come to look behind the words that stood before the answer: they
chose among all passwords of a document. So, where a text has told the answer, some heads are told:
those of the dense layer's first groups to attend to the last tokens, those of the first sparse
layer's first group to where the answer was said. No other layer is: what is found in one layer
alone is not found by chance in another when blocks are chosen at random.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WEIGHT = 0.5
"""Of the hints' losses beside the loss of the answers."""

LAGS = (1, 2, 3, 4)
"""How far back each of the dense layer's first heads looks: a fact of a person stands so far behind
the name.
"""

SPARSE_LAYERS = 1
"""So many of them, from the first, have a group that is told where the answer was said."""

LAG_DOTS = 1 << 24
"""So many products of a head with keys are enough to tell the dense layer, a step."""

GATHERED_TOKENS = 1024
"""Up to this length every hinted row has its sequence's keys gathered."""

MINUS_INFINITY = float("-inf")


@dataclass(frozen=True, slots=True)
class Hints:
    """Of one step.

    Attributes:
        rows_N: int64, rows of the step that predict what was said before.
        sources_N: int64, where in its sequence that was; -1: no hint.
        has_lags: whether the dense layer is told too. Never where there are pictures: the lags'
            loss is least where features tell nothing, and it once made them so.
    """

    rows_N: Tensor
    sources_N: Tensor
    has_lags: bool = True


def lag_losses(q_RLHD: Tensor, k_RGLD: Tensor, scale: float) -> list[Tensor]:
    """How surprised the first heads are that they should attend `LAGS` back.

    Of long rows some positions stand for all.
    """
    length, share = q_RLHD.shape[1], q_RLHD.shape[2] // k_RGLD.shape[1]
    stride = -(-length * length // LAG_DOTS)
    # the last position is always among them
    first = (length - 1) % stride
    place = torch.arange(length, device=q_RLHD.device)
    at = place[first::stride]
    rows = min(q_RLHD.shape[0], max(1, LAG_DOTS // (length * at.shape[0])))
    losses: list[Tensor] = []
    for head, lag in enumerate(LAGS):
        q, k = q_RLHD[:rows, first::stride, head].float(), k_RGLD[:rows, head // share].float()
        dots = torch.einsum("rqd,rkd->rqk", q, k) * scale
        logs = dots.masked_fill(place > at[:, None], MINUS_INFINITY).log_softmax(-1)
        wanted = (at - lag).clamp(min=0).expand(rows, -1)[..., None]
        told = logs.gather(-1, wanted)[..., 0]
        has_place = at >= lag
        losses.append(-torch.where(has_place, told, 0.0).sum() / (rows * has_place.sum()))
    return losses


def source_loss(hints: Hints, q_RLHD: Tensor, k_RGLD: Tensor, scale: float) -> Tensor:
    """The same for where the answer was said, over the rows with a hint."""
    _, length, heads, _ = q_RLHD.shape
    sequence_N, at_N = hints.rows_N // length, hints.rows_N % length
    share = heads // k_RGLD.shape[1]
    q_NHD, keys = q_RLHD.flatten(0, 1)[hints.rows_N][:, :share].float(), k_RGLD[:, 0].float()
    if length <= GATHERED_TOKENS:
        dots = torch.einsum("nhd,nkd->nhk", q_NHD, keys[sequence_N]) * scale
    else:
        # few sequences: a gather of the keys would be larger than all the products
        dots = torch.einsum("nhd,rkd->nrhk", q_NHD, keys) * scale
        own = sequence_N[:, None, None, None].expand(-1, 1, share, length)
        dots = dots.gather(1, own)[:, 0]
    place = torch.arange(length, device=q_RLHD.device)
    logs = dots.masked_fill((place > at_N[:, None])[:, None], MINUS_INFINITY).log_softmax(-1)
    wanted = hints.sources_N.clamp(min=0)[:, None, None].expand(-1, share, 1)
    told_N = logs.gather(-1, wanted)[..., 0].mean(-1)
    has_hint = hints.sources_N >= 0
    return -torch.where(has_hint, told_N, 0.0).sum() / has_hint.sum().clamp(min=1)


def sources(ids: list[int], predicted: list[int]) -> list[int]:
    """Where each predicted token was first said behind the same two tokens, or -1.

    Args:
        ids: of one sequence.
        predicted: positions in it, ascending.
    """
    first: dict[tuple[int, int, int], int] = {}
    for at in range(2, len(ids)):
        first.setdefault((ids[at - 2], ids[at - 1], ids[at]), at)
    found: list[int] = []
    for at in predicted:
        place = first.get((ids[at - 2], ids[at - 1], ids[at]), at)
        found.append(place if place < at else -1)
    return found
