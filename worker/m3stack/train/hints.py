"""Hints: attention that some heads are told, beside what they learn from the answers.

From answers alone heads did not come to look behind the words that stood before the answer: they
chose among all passwords of a document. So, in drills and long documents only, the heads of one
group are told: those of the dense layer to attend to the last token and to the one before it,
those of the first sparse layers to where the answer was said.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WEIGHT = 0.3
"""Of the hints' losses beside the loss of the answers."""

LAGS = (1, 2)
"""How far back each head of the dense layer's first group looks."""

SPARSE_LAYERS = 2
"""So many of them, from the first, have a group that is told where the answer was said."""

DENSE_TOKENS, DENSE_ROWS = 2048, 8192
"""Longer rows teach the dense layer nothing, and so many positions of a step are enough."""

GATHERED_TOKENS = 1024
"""Up to this length every predicting row has its sequence's keys gathered."""

MINUS_INFINITY = float("-inf")


@dataclass(frozen=True, slots=True)
class Hints:
    """Of one step.

    Attributes:
        rows_S: int64, rows of the step that predict.
        sources_S: int64, where in its sequence the predicted token was said before; -1: no hint.
    """

    rows_S: Tensor
    sources_S: Tensor


def lag_losses(q_RLHD: Tensor, k_RGLD: Tensor, scale: float) -> list[Tensor]:
    """How surprised the first group's heads are that they should attend `LAGS` back."""
    length = q_RLHD.shape[1]
    rows = max(1, DENSE_ROWS // length)
    q, k = q_RLHD[:rows, :, : len(LAGS)].float(), k_RGLD[:rows, 0].float()
    at = torch.arange(length, device=q.device)
    dots = torch.einsum("rqhd,rkd->rhqk", q, k) * scale
    logs = dots.masked_fill(at > at[:, None], MINUS_INFINITY).log_softmax(-1)
    losses: list[Tensor] = []
    for head, lag in enumerate(LAGS):
        wanted = (at[lag:] - lag).expand(q.shape[0], -1)[..., None]
        losses.append(-logs[:, head, lag:].gather(-1, wanted).mean())
    return losses


def source_loss(hints: Hints, q_RLHD: Tensor, k_RGLD: Tensor, scale: float) -> Tensor:
    """The same for where the answer was said, over the rows with a hint."""
    _, length, heads, _ = q_RLHD.shape
    sequence_S, at_S = hints.rows_S // length, hints.rows_S % length
    share = heads // k_RGLD.shape[1]
    q_SHD, keys = q_RLHD.flatten(0, 1)[hints.rows_S][:, :share].float(), k_RGLD[:, 0].float()
    if length <= GATHERED_TOKENS:
        dots = torch.einsum("shd,skd->shk", q_SHD, keys[sequence_S]) * scale
    else:
        # few sequences: a gather of the keys would be larger than all the products
        dots = torch.einsum("shd,rkd->srhk", q_SHD, keys) * scale
        own = sequence_S[:, None, None, None].expand(-1, 1, share, length)
        dots = dots.gather(1, own)[:, 0]
    place = torch.arange(length, device=q_RLHD.device)
    logs = dots.masked_fill((place > at_S[:, None])[:, None], MINUS_INFINITY).log_softmax(-1)
    wanted = hints.sources_S.clamp(min=0)[:, None, None].expand(-1, share, 1)
    told_S = logs.gather(-1, wanted)[..., 0].mean(-1)
    has_hint = hints.sources_S >= 0
    return -torch.where(has_hint, told_S, 0.0).sum() / has_hint.sum().clamp(min=1)


def sources(ids: list[int], predicted: list[int], after: int | None) -> list[int]:
    """Where each predicted token was first said behind the same two tokens, or -1.

    Args:
        ids: of one sequence.
        predicted: positions in it, ascending.
        after: only for tokens right behind this one; None is all.
    """
    first: dict[tuple[int, int, int], int] = {}
    for at in range(2, len(ids)):
        first.setdefault((ids[at - 2], ids[at - 1], ids[at]), at)
    found: list[int] = []
    for at in predicted:
        place = first.get((ids[at - 2], ids[at - 1], ids[at]), at)
        is_asked = after is None or ids[at - 1] == after
        found.append(place if place < at and is_asked else -1)
    return found
