"""Hints point at where the answer stands, and teach heads to look there."""

from __future__ import annotations

import pytest
import torch

from m3stack.checkpoints import builtin_checkpoint
from m3stack.train import hints
from m3stack.train.batches import BatchKind, BatchMaker
from m3stack.train.drills import DRILL_TOKENS
from m3stack.train.encode import Encoder
from m3stack.train.hints import Hints

ROWS, LENGTH, HEADS, GROUPS, DIM = 2, 24, 4, 2, 16


@pytest.mark.parametrize(
    "kind",
    [BatchKind(4, DRILL_TOKENS, is_drill=True), BatchKind(2, 1024, is_needle=True)],
)
def test_a_source_is_the_same_token_behind_the_same_two(kind: BatchKind) -> None:
    encoder = Encoder(builtin_checkpoint("tiny") / "tokenizer.json")
    batch = BatchMaker(encoder, seed=5).make(0, kind)
    has_source = batch.sources_S >= 0
    assert has_source.sum() > 8
    ids_RL = batch.ids_T.view(kind.num_rows, kind.num_tokens)
    for row, source in zip(
        batch.loss_rows_S[has_source].tolist(), batch.sources_S[has_source].tolist(), strict=True
    ):
        line, at = ids_RL[row // kind.num_tokens].tolist(), row % kind.num_tokens + 1
        assert source < at
        assert line[source - 2 : source + 1] == line[at - 2 : at + 1]
    if kind.is_needle:
        # the password alone is told, not the words that every answer has
        (verb,) = encoder.text_ids(" is")
        assert all(int(batch.ids_T[row]) == verb for row in batch.loss_rows_S[has_source])


def test_heads_that_look_where_they_are_told_have_almost_no_loss() -> None:
    generator = torch.Generator().manual_seed(2)
    k = torch.randn(ROWS, GROUPS, LENGTH, DIM, generator=generator)
    k = torch.nn.functional.normalize(k, dim=-1)
    q = torch.zeros(ROWS, LENGTH, HEADS, DIM)
    for head, lag in enumerate(hints.LAGS):
        q[:, lag:, head] = 40 * k[:, 0, : LENGTH - lag]
    losses = hints.lag_losses(q, k, 1.0)
    assert all(float(loss) < 0.1 for loss in losses)
    assert all(float(loss) > 1.0 for loss in hints.lag_losses(q.flip(2), k, 1.0))
    rows = torch.tensor([20, LENGTH + 9, LENGTH + 3])
    sources = torch.tensor([4, 7, -1])
    for row, source in zip(rows.tolist(), sources.tolist(), strict=True):
        q[row // LENGTH, row % LENGTH, :2] = 40 * k[row // LENGTH, 0, source]
    assert float(hints.source_loss(Hints(rows, sources), q, k, 1.0)) < 0.1
    assert float(hints.source_loss(Hints(rows, (sources + 1).clamp(max=5)), q, k, 1.0)) > 1.0


def test_long_rows_have_the_same_loss_as_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(ROWS, LENGTH, HEADS, DIM, generator=generator)
    k = torch.randn(ROWS, GROUPS, LENGTH, DIM, generator=generator)
    told = Hints(torch.tensor([5, LENGTH + 11, LENGTH + 2]), torch.tensor([2, 8, -1]))
    short = hints.source_loss(told, q, k, 0.3)
    monkeypatch.setattr(hints, "GATHERED_TOKENS", LENGTH - 1)
    torch.testing.assert_close(hints.source_loss(told, q, k, 0.3), short)
