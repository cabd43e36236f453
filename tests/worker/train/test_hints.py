"""Hints point at where the answer stands, and teach heads to look there."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from m3stack.checkpoints import builtin_checkpoint
from m3stack.models.minimax_m3 import tiny
from m3stack.models.minimax_m3.config import M3Config
from m3stack.train import hints, text_tasks
from m3stack.train.batches import Batch, BatchKind, BatchMaker
from m3stack.train.drills import DRILL_TOKENS
from m3stack.train.encode import Conversation, Encoder
from m3stack.train.hints import Hints
from m3stack.train.loop import initial_student
from m3stack.train.operations import Layout, Selection

ROWS, LENGTH, HEADS, GROUPS, DIM = 2, 24, 4, 2, 16


def test_a_source_of_a_drill_is_the_same_token_behind_the_same_two() -> None:
    encoder = Encoder(builtin_checkpoint("tiny") / "tokenizer.json")
    kind = BatchKind(4, DRILL_TOKENS, is_drill=True)
    batch = BatchMaker(encoder, seed=5).make(0, kind)
    assert batch.told_rows_N.shape[0] > 32
    for line, at, source in told(batch):
        assert source < at
        assert line[source - 2 : source + 1] == line[at - 2 : at + 1]


@pytest.mark.parametrize("thousands", [1, 4])
def test_a_source_of_a_password_is_where_its_owner_has_it(thousands: int) -> None:
    encoder = Encoder(builtin_checkpoint("tiny") / "tokenizer.json")
    batch = BatchMaker(encoder, seed=5).make(0, BatchKind(2, thousands * 1024, is_needle=True))
    # both words of every password that is asked for
    assert batch.told_rows_N.shape[0] == 2 * batch.skills_A.shape[0]
    (verb,) = encoder.text_ids(" is")
    seconds = 0
    for line, at, source in told(batch):
        is_second = line[at - 1] != verb
        seconds += is_second
        # the owner, the verb, and what of the password stands before
        run = 3 + is_second
        assert source < at
        assert line[source - run + 1 : source + 1] == line[at - run + 1 : at + 1]
    assert seconds == batch.skills_A.shape[0]


def test_a_source_of_a_passages_answer_is_in_the_sentence_that_tells_it() -> None:
    encoder = Encoder(builtin_checkpoint("tiny") / "tokenizer.json")
    rng, forms = random.Random(4), set[str]()
    for _ in range(60):
        thinks = rng.random() < 0.5
        turns = text_tasks.passage(rng, thinks=thinks)
        mode = "enabled" if thinks else "disabled"
        row = encoder.conversation(Conversation(tuple(turns), mode))
        asked = [turn for turn in turns if turn.told]
        values = (encoder.text_ids(f" {turn.value}") for turn in asked)
        assert len(row.sources) == sum(map(len, values)) > 0
        for at, source in row.sources:
            assert row.ids[source] == row.ids[at]
            assert source < at
            assert row.answer[at] >= 0
        source, turn = row.sources[0][1], asked[0]
        told_ids = encoder.text_ids(f" {turn.told.removesuffix('.')}")
        assert any(
            row.ids[begin + 1 : begin + len(told_ids)] == told_ids[1:] and begin < source
            for begin in range(source - len(told_ids), source)
        )
        forms.add(turn.told.split()[1])
    # every form of a fact: "Anna lives", "The pet of Anna"
    assert forms == {"lives", "likes", "has", "works", "pet"}


def told(batch: Batch) -> Iterator[tuple[list[int], int, int]]:
    """(ids of a row, position of a token that was said before, where)"""
    length = batch.kind.num_tokens
    lines = batch.ids_T.view(-1, length).tolist()
    for row, source in zip(batch.told_rows_N.tolist(), batch.sources_N.tolist(), strict=True):
        yield lines[row // length], row % length + 1, source


def test_heads_that_look_where_they_are_told_have_almost_no_loss() -> None:
    generator = torch.Generator().manual_seed(2)
    k = torch.randn(ROWS, GROUPS, LENGTH, DIM, generator=generator)
    k = torch.nn.functional.normalize(k, dim=-1)
    q = torch.zeros(ROWS, LENGTH, HEADS, DIM)
    for head, lag in enumerate(hints.LAGS):
        q[:, lag:, head] = 40 * k[:, head // (HEADS // GROUPS), : LENGTH - lag]
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


def test_some_positions_of_a_long_row_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(ROWS, LENGTH, HEADS, DIM, generator=generator)
    k = torch.randn(ROWS, GROUPS, LENGTH, DIM, generator=generator)
    monkeypatch.setattr(hints, "LAG_DOTS", 4 * LENGTH)
    losses = hints.lag_losses(q, k, 0.3)
    # every sixth position of the first row, and the last
    for head, (lag, loss) in enumerate(zip(hints.LAGS, losses, strict=True)):
        dots = [
            (q[0, at, head] @ k[0, head // (HEADS // GROUPS), : at + 1].T * 0.3).log_softmax(-1)
            for at in (5, 11, 17, 23)
        ]
        want = -torch.stack([logs[-1 - lag] for logs in dots]).mean()
        torch.testing.assert_close(loss, want)


def test_hints_leave_pictures_alone() -> None:
    config = M3Config.from_object(tiny.config_object())
    student = initial_student(config, torch.device("cpu"), tiny.initial_weights(config))
    maker = BatchMaker(Encoder(builtin_checkpoint("tiny") / "tokenizer.json"), seed=5)
    batches = (maker.make(number, BatchKind(2, 1024, 1)) for number in range(20))
    batch = next(batch for batch in batches if batch.patches and len(batch.told_rows_N))
    student.logits(batch, Layout(2, 1024, Selection.ALL, has_hints=True))
    _, hint_losses = student.operations.take_losses()
    torch.stack(hint_losses).sum().backward()
    moved = {
        name for name, x in student.model.named_parameters() if x.grad is not None and x.grad.any()
    }
    assert any("layers.1" in name for name in moved)
    assert not [name for name in moved if name.startswith(("vision", "projector"))]
