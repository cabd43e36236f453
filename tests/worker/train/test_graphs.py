"""A batch in buffers of a larger size has the loss and the gradients of the batch itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from m3stack.checkpoints import builtin_checkpoint
from m3stack.models.minimax_m3 import tiny
from m3stack.models.minimax_m3.config import M3Config
from m3stack.train.batches import TAIL_TOKENS, Batch, BatchKind, BatchMaker
from m3stack.train.drills import DRILL_TOKENS
from m3stack.train.encode import Encoder
from m3stack.train.graphs import Buffers, weighted_step
from m3stack.train.loop import initial_student, loss_positions
from m3stack.train.operations import Layout, Selection


@pytest.mark.parametrize("selection", [Selection.ALL, Selection.OWN])
def test_padding_changes_nothing(selection: Selection) -> None:
    config = M3Config.from_object(tiny.config_object())
    student = initial_student(config, torch.device("cpu"), tiny.initial_weights(config))
    tokenizer: Path = builtin_checkpoint("tiny") / "tokenizer.json"
    maker, kind = BatchMaker(Encoder(tokenizer), seed=2), BatchKind(1, 640, 1)
    both = [b for b in (maker.make(number, kind) for number in range(12)) if len(b.patches) == 2]
    batch, first = sorted(both, key=lambda b: b.loss_rows_S.shape[0])[:: len(both) - 1]

    def layout_of(one: Batch) -> Layout:
        # what stands behind the end differs, and the index loss may look there
        positions = loss_positions(one, 32, seed=4).clamp(max=639 - TAIL_TOKENS)
        return Layout(1, 640, selection, loss_positions_RS=positions)

    layout = layout_of(batch)
    buffers = Buffers(first, layout_of(first), torch.device("cpu"))
    assert buffers.capacity.fits(batch)
    assert batch.loss_rows_S.shape[0] < buffers.capacity.predictions
    buffers.fill(batch, layout.loss_positions_RS)
    result = weighted_step(student, buffers, layout)
    padded = {
        name: parameter.grad.clone()
        for name, parameter in student.model.named_parameters()
        if parameter.grad is not None
    }
    student.model.zero_grad()
    logits = student.logits(batch, layout)
    loss = functional.cross_entropy(logits, batch.targets_S)
    index_losses = torch.stack(student.operations.tape.index_losses)
    (loss + index_losses.sum()).backward()
    torch.testing.assert_close(result.loss, loss.detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(result.index_loss, index_losses.detach().mean(), rtol=0, atol=1e-5)
    for name, parameter in student.model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(padded[name], parameter.grad, rtol=1e-3, atol=1e-5)


def test_padding_changes_no_hint() -> None:
    config = M3Config.from_object(tiny.config_object())
    student = initial_student(config, torch.device("cpu"), tiny.initial_weights(config))
    tokenizer: Path = builtin_checkpoint("tiny") / "tokenizer.json"
    maker, kind = BatchMaker(Encoder(tokenizer), seed=2), BatchKind(1, DRILL_TOKENS, is_drill=True)
    layout = Layout(1, DRILL_TOKENS, Selection.ALL, has_hints=True)
    first, batch = maker.make(0, kind), maker.make(1, kind)
    assert batch.sources_N.shape[0] > 8
    buffers = Buffers(first, layout, torch.device("cpu"))
    buffers.fill(batch, None)
    padded = weighted_step(student, buffers, layout)
    student.logits(batch, layout)
    _, hint_losses = student.operations.take_losses()
    # four heads of the dense layer, a group of the first sparse one
    assert len(hint_losses) == 5
    mean = torch.stack(hint_losses).detach().mean()
    torch.testing.assert_close(padded.hint_loss, mean, rtol=0, atol=1e-5)
