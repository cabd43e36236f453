"""What a student's attention does: recall of the index branch, and how much text sees pictures."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from m3stack.train import sparse
from m3stack.train.batches import Batch
from m3stack.train.loop import Scores, loss_positions
from m3stack.train.model import Student
from m3stack.train.operations import Layout, Selection

HEAT_TOKENS = 96
"""Side of a heat-map."""


@torch.no_grad()
def index_recall(
    student: Student, batch: Batch, selection: Selection, positions: Tensor
) -> list[list[float]]:
    """Share of the true attention mass that lies in the chosen blocks, by sparse layer and group.

    Attention is full in the layers themselves, so that the true mass is what a perfect choice
    would have to cover.

    Args:
        positions: int64 [R, S], rows of each sequence that are looked at.
    """
    config, kind = student.config, batch.kind
    pick = torch.arange(kind.num_rows, device=positions.device)[:, None]
    found: list[list[float]] = []

    def probe(q: Tensor, k: Tensor, index_q: Tensor, index_k: Tensor) -> None:
        blocks = sparse.choose(
            index_q,
            index_k,
            block=config.block_tokens,
            num_blocks=config.topk_blocks,
            is_shared=selection is Selection.SHARED,
            generator=_generator(positions) if selection is Selection.RANDOM else None,
        )
        blocks = blocks.transpose(1, 2)[pick, positions].transpose(1, 2)
        total_G = torch.zeros(config.num_kv_heads, device=q.device)
        shares_of = sparse.attention_shares(q[pick, positions], k, positions, config.head_dim**-0.5)
        for start, shares in shares_of:
            by_block = shares.unflatten(-1, (-1, config.block_tokens)).sum(-1)
            chosen = blocks[:, :, start : start + shares.shape[2]]
            kept = by_block.gather(-1, chosen.clamp(min=0)).masked_fill(chosen < 0, 0.0)
            total_G += kept.sum((0, 2, 3))
        mean_G = total_G / positions.numel()
        found.append([round(share, 4) for share in mean_G.tolist()])

    layout = Layout(kind.num_rows, kind.num_tokens, Selection.ALL, probe=probe)
    with student.autocast:
        student.logits(batch, layout)
    return found


def any_and_answering(batch: Batch, num_rows: int = 512) -> Tensor:
    """Rows of each sequence, int64 [R, S]: half are any, half predict an answer."""
    return loss_positions(batch, num_rows, seed=1)


def telling(batch: Batch) -> Tensor:
    """Rows that predict what the text has told, int64 [R, S], as many of each sequence."""
    length = batch.kind.num_tokens
    rows = [
        batch.told_rows_N[batch.told_rows_N // length == row] % length
        for row in range(batch.kind.num_rows)
    ]
    fewest = min(len(mine) for mine in rows)
    return torch.stack([mine[:fewest] for mine in rows])


@torch.no_grad()
def vision_mass(student: Student, batch: Batch) -> tuple[list[float], Tensor, Tensor]:
    """Share of the attention of answering rows that goes to pictures and clips, a sparse layer.

    Returns:
        The shares, and fp32 [HEAT_TOKENS, HEAT_TOKENS]: the mean attention of the first row's
        tokens around its first picture on one another, over layers and groups; and fp32
        [HEAT_TOKENS], one where such a token is a picture's.
    """
    config, kind = student.config, batch.kind
    is_media = torch.zeros(batch.ids_T.shape[0], device=batch.ids_T.device)
    for rows in batch.media_rows.values():
        is_media[rows] = 1.0
    is_media_RL = is_media.view(kind.num_rows, kind.num_tokens)
    answering = torch.zeros_like(is_media)
    answering[batch.loss_rows_S] = 1.0
    answering_RL = answering.view(kind.num_rows, kind.num_tokens)
    positions = torch.arange(kind.num_tokens, device=is_media.device).expand(kind.num_rows, -1)
    masses: list[float] = []
    heat = torch.zeros((HEAT_TOKENS, HEAT_TOKENS))
    begin = int(is_media_RL[0].argmax()) - 8
    window = slice(begin, begin + HEAT_TOKENS)

    def probe(q: Tensor, k: Tensor, index_q: Tensor, index_k: Tensor) -> None:
        total = 0.0
        for start, shares in sparse.attention_shares(q, k, positions, config.head_dim**-0.5):
            seen = torch.einsum("rgsl,rl->rgs", shares, is_media_RL).mean(1)
            total += float((seen * answering_RL[:, start : start + shares.shape[2]]).sum())
            rows = torch.arange(start, start + shares.shape[2], device=shares.device)
            inside = (rows >= window.start) & (rows < window.stop)
            heat[(rows[inside] - begin).cpu()] += shares[0].mean(0)[inside, window].float().cpu()
        masses.append(round(total / float(answering.sum()), 4))

    layout = Layout(kind.num_rows, kind.num_tokens, Selection.ALL, probe=probe)
    with student.autocast:
        student.logits(batch, layout)
    return masses, heat / len(masses), is_media_RL[0, window].cpu()


@torch.no_grad()
def skill_scores(student: Student, batches: list[Batch], selection: Selection) -> dict[str, Any]:
    """Loss a token and share of answers that are right token by token, each token given."""
    scores = Scores.empty(student.device)
    for batch in batches:
        layout = Layout(
            batch.kind.num_rows,
            batch.kind.num_tokens,
            selection,
            generator=_generator(batch.ids_T),
        )
        with student.autocast:
            logits = student.logits(batch, layout)
        loss_S = functional.cross_entropy(logits, batch.targets_S, reduction="none")
        scores.add(batch, loss_S, logits.argmax(-1) == batch.targets_S)
    return scores.take()


def _generator(like: Tensor) -> torch.Generator:
    return torch.Generator(like.device).manual_seed(11)
