"""A whole training step as one CUDA graph: a small model would spend it launching operations.

A graph needs fixed shapes, so a batch is copied into buffers of a fixed capacity: predictions that
are missing weigh nothing, and pictures that are missing are drawn over positions behind the first
sequence's end, which nothing attends to (`batches.TAIL_TOKENS`). Capture happens on the stream that
all steps run on: gradients are tied to the stream of the step that first made them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from m3stack.models.minimax_m3.vision import Grid
from m3stack.train import hints
from m3stack.train.batches import TAIL_TOKENS, Batch
from m3stack.train.model import Student
from m3stack.train.operations import Layout

WARM_UP_STEPS = 2

PREDICTIONS_MARGIN, MORE_PREDICTIONS, ITEMS_MARGIN, MORE_ITEMS = 1.4, 256, 1.2, 8
"""Room in the buffers, over what the first batch of a kind needs."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the buffers hold.

    Attributes:
        predictions: loss rows.
        hints: rows with a hint.
        items: stills or clips of every grid.
    """

    predictions: int
    hints: int
    items: dict[Grid, int]

    @classmethod
    def above(cls, batch: Batch) -> Capacity:
        """Enough for batches like this one."""
        return cls(
            _with_room(batch.loss_rows_S),
            _with_room(batch.told_rows_N),
            {
                grid: int(patches.shape[0] // _patches(grid) * ITEMS_MARGIN) + MORE_ITEMS
                for grid, patches in batch.patches.items()
            },
        )

    def fits(self, batch: Batch) -> bool:
        """Whether the batch can be copied into the buffers."""
        fits = batch.loss_rows_S.shape[0] <= self.predictions
        fits = fits and batch.told_rows_N.shape[0] <= self.hints
        return fits and all(
            patches.shape[0] <= self.items.get(grid, 0) * _patches(grid)
            for grid, patches in batch.patches.items()
        )


@dataclass(frozen=True, slots=True)
class StepResult:
    """Figures of one step, on the device; overwritten by the next.

    Attributes:
        loss_S, right_S: of every prediction.
    """

    loss: Tensor
    index_loss: Tensor
    hint_loss: Tensor
    norm: Tensor
    loss_S: Tensor
    right_S: Tensor


class Buffers:
    """Tensors of a fixed size that any batch of a kind is copied into.

    Attributes:
        batch: of the full capacity; what is missing is as the module says.
        weights_S: one for every real prediction, zero for the others.
        loss_positions_RS: rows whose index loss is computed.
    """

    def __init__(self, batch: Batch, layout: Layout, device: torch.device) -> None:
        self.capacity = Capacity.above(batch)
        capacity, positions = self.capacity, layout.loss_positions_RS
        self.loss_positions_RS = None if positions is None else positions.clone()
        self.weights_S = torch.zeros(capacity.predictions, device=device)

        def room(like: Tensor, rows: int) -> Tensor:
            return torch.zeros((rows, *like.shape[1:]), dtype=like.dtype, device=device)

        def item_rows(grid: Grid) -> int:
            return capacity.items[grid] * _patches(grid)

        self.batch = Batch(
            ids_T=batch.ids_T.clone(),
            kind=batch.kind,
            loss_rows_S=room(batch.loss_rows_S, capacity.predictions),
            targets_S=room(batch.targets_S, capacity.predictions),
            answers_S=batch.answers_S,
            skills_A=batch.skills_A,
            told_rows_N=room(batch.told_rows_N, capacity.hints),
            sources_N=room(batch.sources_N, capacity.hints),
            patches={grid: room(x, item_rows(grid)) for grid, x in batch.patches.items()},
            media_rows={
                grid: room(x, item_rows(grid) * x.shape[0] // batch.patches[grid].shape[0])
                for grid, x in batch.media_rows.items()
            },
        )
        # rows behind the first sequence's end, over and over
        self._tails = {
            grid: torch.arange(rows.shape[0], device=device) % TAIL_TOKENS
            + layout.num_tokens
            - TAIL_TOKENS
            for grid, rows in self.batch.media_rows.items()
        }
        self.fill(batch, positions)

    def fill(self, batch: Batch, loss_positions_RS: Tensor | None) -> None:
        """Copies a batch that fits."""
        held, count = self.batch, batch.loss_rows_S.shape[0]
        held.ids_T.copy_(batch.ids_T)
        for buffer, values in (
            (held.loss_rows_S, batch.loss_rows_S),
            (held.targets_S, batch.targets_S),
        ):
            buffer[:count].copy_(values)
            buffer[count:].zero_()
        hinted = batch.sources_N.shape[0]
        held.told_rows_N[:hinted].copy_(batch.told_rows_N)
        held.told_rows_N[hinted:].zero_()
        held.sources_N[:hinted].copy_(batch.sources_N)
        held.sources_N[hinted:].fill_(-1)
        self.weights_S[:count].fill_(1.0)
        self.weights_S[count:].zero_()
        for grid, buffer in held.patches.items():
            rows, used = held.media_rows[grid], 0
            if grid in batch.patches:
                buffer[: batch.patches[grid].shape[0]].copy_(batch.patches[grid])
                used = batch.media_rows[grid].shape[0]
                rows[:used].copy_(batch.media_rows[grid])
            rows[used:].copy_(self._tails[grid][used:])
        if self.loss_positions_RS is not None:
            assert loss_positions_RS is not None
            self.loss_positions_RS.copy_(loss_positions_RS)


def weighted_step(student: Student, buffers: Buffers, layout: Layout) -> StepResult:
    """Forward and backward over the buffers; the norm is left zero."""
    with student.autocast:
        logits = student.logits(buffers.batch, layout)
    targets_S, weights_S = buffers.batch.targets_S, buffers.weights_S
    loss_S = functional.cross_entropy(logits, targets_S, reduction="none")
    loss = (loss_S * weights_S).sum() / weights_S.sum()
    index_loss, hint_loss = backward(student, loss)
    right_S = logits.detach().argmax(-1) == targets_S
    none = loss.new_zeros(())
    return StepResult(loss.detach(), index_loss, hint_loss, none, loss_S.detach(), right_S)


def backward(student: Student, loss: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the answers' loss and of what the layers left; gives the means of those."""
    index_losses, hint_losses = student.operations.take_losses()
    index_loss, hint_loss = (
        torch.stack(losses).sum() if losses else loss.new_zeros(())
        for losses in (index_losses, hint_losses)
    )
    (loss + index_loss + hints.WEIGHT * hint_loss).backward()
    return (
        index_loss.detach() / max(1, len(index_losses)),
        hint_loss.detach() / max(1, len(hint_losses)),
    )


@contextmanager
def as_before(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Steps inside leave weights and what the optimizer keeps as they were, each at its place."""
    weights = list(model.state_dict().values())
    kept = [weight.detach().clone() for weight in weights]
    moments = {
        parameter: {name: value.clone() for name, value in state.items()}
        for parameter, state in optimizer.state.items()
    }
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, value in zip(weights, kept, strict=True):
                weight.copy_(value)
            for parameter, state in optimizer.state.items():
                before = moments.get(parameter)
                for name, value in state.items():
                    # a parameter that had no step yet begins at zeros
                    value.zero_() if before is None else value.copy_(before[name])


class GraphedStep:
    """A step captured over its buffers; making it takes `WARM_UP_STEPS` real steps: `as_before`.

    It must be made on the stream that every step runs on, and that not the default one.

    Args:
        layout: of the step.
        update: applies the gradients; gives their norm.
        zero: drops the gradients.
    """

    def __init__(
        self,
        student: Student,
        batch: Batch,
        layout: Layout,
        update: Callable[[], Tensor],
        zero: Callable[[], None],
    ) -> None:
        self._buffers = Buffers(batch, layout, student.device)
        layout = replace(layout, loss_positions_RS=self._buffers.loss_positions_RS)
        for _ in range(WARM_UP_STEPS):
            zero()
            weighted_step(student, self._buffers, layout)
            update()
        zero()
        stream = torch.cuda.current_stream()
        self._graph = torch.cuda.CUDAGraph()
        # other threads pin memory meanwhile
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            result = weighted_step(student, self._buffers, layout)
            self._result = replace(result, norm=update())

    def fits(self, batch: Batch) -> bool:
        """Whether `run` can take the batch."""
        return self._buffers.capacity.fits(batch)

    def run(self, batch: Batch, loss_positions_RS: Tensor | None) -> StepResult:
        """One step."""
        self._buffers.fill(batch, loss_positions_RS)
        self._graph.replay()
        count = batch.loss_rows_S.shape[0]
        return replace(
            self._result,
            loss_S=self._result.loss_S[:count],
            right_S=self._result.right_S[:count],
        )


def _patches(grid: Grid) -> int:
    return grid[0] * grid[1] * grid[2]


def _with_room(rows: Tensor) -> int:
    return int(rows.shape[0] * PREDICTIONS_MARGIN) + MORE_PREDICTIONS
