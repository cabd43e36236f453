"""The training loop: steps, the losses of each skill, checkpoints that a run can resume from."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.moe import MixtureOfExperts
from m3stack.train.batches import SKILLS, Batch, BatchKind
from m3stack.train.graphs import GraphedStep, StepResult, as_before, backward
from m3stack.train.model import Student
from m3stack.train.operations import Layout, Selection
from m3stack.train.recipe import Phase, Recipe

Source = Callable[[int, BatchKind], Batch]

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Budget:
    """When a run ends: after so many steps or seconds, whichever comes first."""

    steps: int
    seconds: float = float("inf")


@dataclass(slots=True)
class Scores:
    """Running figures of each skill since the last report, kept on the device.

    Attributes:
        sums: fp32 [skills, 4]: tokens, loss, answers, answers that are right token by token.
    """

    sums: Tensor

    @classmethod
    def empty(cls, device: torch.device) -> Scores:
        return cls(torch.zeros((len(SKILLS), 4), device=device))

    def add(self, batch: Batch, loss_S: Tensor, right_S: Tensor) -> None:
        skill_S = batch.skills_A[batch.answers_S]
        self.sums[:, 0].index_add_(0, skill_S, torch.ones_like(loss_S))
        self.sums[:, 1].index_add_(0, skill_S, loss_S)
        is_right = torch.ones(batch.skills_A.shape, device=loss_S.device)
        is_right.scatter_reduce_(0, batch.answers_S, right_S.float(), "amin")
        self.sums[:, 2].index_add_(0, batch.skills_A, torch.ones_like(is_right))
        self.sums[:, 3].index_add_(0, batch.skills_A, is_right)

    def take(self) -> dict[str, dict[str, float]]:
        """Loss a token and share of right answers of every skill, and starts anew."""
        rows = self.sums.tolist()
        self.sums.zero_()
        return {
            name: {
                "loss": round(loss / tokens, 4),
                "right": round(right / answers, 4),
                "answers": int(answers),
            }
            for name, (tokens, loss, answers, right) in sorted(zip(SKILLS, rows, strict=True))
            if tokens
        }


class Trainer:
    """Owns the student, its optimizer and where the run stands.

    Args:
        source: gives batch `number` of a kind, on the CPU; numbers of a kind count up from 0.
        uses_graphs: steps run as CUDA graphs, one a kind of batch; of no effect without a GPU.
            Where capture fails, steps go on without, a warning says why and every record how many.
        report: told one record every `report_s` seconds, and one of the steps after those at the
            end of a run.
    """

    def __init__(
        self,
        student: Student,
        recipe: Recipe,
        source: Source,
        report: Callable[[dict[str, Any]], None],
        *,
        report_s: float = 5.0,
        uses_graphs: bool = False,
    ) -> None:
        self.student, self.recipe = student, recipe
        self._source, self._report, self._report_s = source, report, report_s
        self._is_gpu = student.device.type == "cuda"
        self._uses_graphs = uses_graphs and self._is_gpu
        self._graphs: dict[tuple[BatchKind, Selection, bool, bool], GraphedStep] = {}
        self._stream = torch.cuda.Stream(student.device) if self._is_gpu else None
        self.step, self.elapsed_s = 0, 0.0
        self._graphed_steps = 0
        self._used: dict[BatchKind, int] = {}
        self._scores = Scores.empty(student.device)
        self.optimizer = _optimizer(student, recipe)

    @property
    def used(self) -> dict[BatchKind, int]:
        """Batches of every kind that were taken."""
        return dict(self._used)

    def run(
        self,
        budget: Budget,
        *,
        after_step: Callable[[Trainer, float], None] | None = None,
        until: float = 1.0,
    ) -> None:
        """Trains until the budget is spent.

        Args:
            after_step: told the trainer and its progress after every step.
            until: progress at which to pause.
        """
        stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with stream:
            self._run(budget, after_step, until)
        if self._is_gpu:
            torch.cuda.synchronize(self.student.device)

    def _run(
        self,
        budget: Budget,
        after_step: Callable[[Trainer, float], None] | None,
        until: float,
    ) -> None:
        began, last_report = time.monotonic() - self.elapsed_s, time.monotonic()
        first_step, self._graphed_steps = self.step, 0
        progress, figures = 0.0, {}

        def report(now: float) -> None:
            record: dict[str, Any] = {
                "step": self.step,
                "progress": round(progress, 4),
                "seconds": round(now - began, 2),
                "steps_per_s": round((self.step - first_step) / (now - last_report), 2),
                "graphed": round(self._graphed_steps / (self.step - first_step), 3),
                **{name: round(float(value), 4) for name, value in figures.items()},
                "skills": self._scores.take(),
            }
            self._report(record)

        while True:
            self.elapsed_s = time.monotonic() - began
            reached = max(self.step / budget.steps, self.elapsed_s / budget.seconds)
            if reached >= until:
                break
            progress = reached
            figures = self._train_step(progress)
            self.step += 1
            if after_step is not None:
                after_step(self, progress)
            now = time.monotonic()
            if now - last_report >= self._report_s:
                report(now)
                last_report, first_step = time.monotonic(), self.step
                self._graphed_steps = 0
        # by steps or by seconds, a run ends with a record
        if self.step > first_step:
            report(time.monotonic())

    def _train_step(self, progress: float) -> dict[str, Tensor | float]:
        recipe, student = self.recipe, self.student
        phase = recipe.phase_at(progress)
        kind = recipe.kind_at(self.step, phase)
        number = self._used.get(kind, 0)
        self._used[kind] = number + 1
        batch = self._source(number, kind).mapped(
            lambda tensor: tensor.to(student.device, non_blocking=True)
        )
        rate = recipe.rate(self.step, progress)
        self._set_rate(rate)
        layout = self._layout(batch, phase)
        result = self._graphed(batch, layout) or self._eager(batch, layout)
        with torch.no_grad():
            self._scores.add(batch, result.loss_S, result.right_S)
        return {
            "loss": result.loss,
            "index_loss": result.index_loss,
            "hint_loss": result.hint_loss,
            "norm": result.norm,
            "rate": rate,
        }

    def _eager(self, batch: Batch, layout: Layout) -> StepResult:
        student = self.student
        self.optimizer.zero_grad(set_to_none=True)
        with student.autocast:
            logits = student.logits(batch, layout)
        loss_S = functional.cross_entropy(logits, batch.targets_S, reduction="none")
        loss = loss_S.mean()
        index_loss, hint_loss = backward(student, loss)
        norm = self._update()
        right_S = logits.detach().argmax(-1) == batch.targets_S
        return StepResult(loss.detach(), index_loss, hint_loss, norm, loss_S.detach(), right_S)

    def _graphed(self, batch: Batch, layout: Layout) -> StepResult | None:
        """The step as a CUDA graph, where that is asked for and the batch fits."""
        if not self._uses_graphs:
            return None
        has_index_loss = layout.loss_positions_RS is not None
        key = (batch.kind, layout.selection, has_index_loss, layout.has_hints)
        if key not in self._graphs:
            self._drop_graphs_unlike(key)
            zero = partial(self.optimizer.zero_grad, set_to_none=True)
            try:
                # the steps that it takes are none of the run's
                with as_before(self.student.model, self.optimizer):
                    made = GraphedStep(self.student, batch, layout, self._update, zero)
                self._graphs[key] = made
            except RuntimeError as error:
                _LOGGER.warning("training graphs=off kind=%s reason=%s", batch.kind, error)
                self._uses_graphs = False
                self.student.operations.take_losses()
                return None
        graph = self._graphs[key]
        if not graph.fits(batch):
            return None
        self._graphed_steps += 1
        return graph.run(batch, layout.loss_positions_RS)

    def _drop_graphs_unlike(self, key: tuple[BatchKind, Selection, bool, bool]) -> None:
        """Frees the graphs of earlier phases: each holds the memory of a whole step."""
        stale = [other for other in self._graphs if other[1:] != key[1:]]
        if stale:
            torch.cuda.synchronize(self.student.device)
            for other in stale:
                del self._graphs[other]
            torch.cuda.empty_cache()

    def _update(self) -> Tensor:
        """Clips the gradients and applies them, unless one is not finite."""
        parameters = [p for p in self.student.model.parameters() if p.requires_grad]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.recipe.clip_norm)
        if self._is_gpu:
            # the fused optimizer leaves everything as it is where this is not zero
            self.optimizer.found_inf = (~norm.isfinite()).float()  # pyright: ignore[reportAttributeAccessIssue]
            self.optimizer.step()
        elif bool(norm.isfinite()):
            self.optimizer.step()
        self._balance_experts()
        return norm.detach()

    def _set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _layout(self, batch: Batch, phase: Phase) -> Layout:
        positions = None
        if phase.has_index_loss:
            positions = loss_positions(batch, self.recipe.loss_rows, self.recipe.seed + self.step)
        return Layout(
            batch.kind.num_rows,
            batch.kind.num_tokens,
            phase.selection,
            loss_positions_RS=positions,
            has_hints=phase.has_hints,
        )

    @torch.no_grad()
    def _balance_experts(self) -> None:
        """Moves every expert's bias against its load, as routers with a bias are trained."""
        student = self.student
        experts = [m for m in student.model.modules() if isinstance(m, MixtureOfExperts)]
        for layer, load in zip(experts, student.operations.tape.loads, strict=True):
            layer.router_bias.add_(self.recipe.bias_rate * torch.sign(load.mean() - load))

    def save(self, path: Path) -> None:
        """Writes everything that `resume` needs."""
        state = {
            "model": self.student.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "elapsed_s": self.elapsed_s,
            "used": [(astuple(kind), count) for kind, count in self._used.items()],
            "recipe": repr(self.recipe),
        }
        unfinished = path.with_suffix(".tmp")
        torch.save(state, unfinished)
        unfinished.replace(path)

    def resume(self, path: Path) -> None:
        """Continues where another run of the same recipe stopped, on whatever device that was.

        On a CPU the whole is bit by bit the run that never stopped. With CUDA graphs it is up to
        rounding: buffers are as large as the first batch after the start asks for.

        Raises:
            ValueError: the file is of another recipe, or of one of other sizes, seed or rate.
        """
        state = torch.load(path, map_location=self.student.device, weights_only=True)
        if state["recipe"] != repr(self.recipe):
            raise ValueError(
                f"{path} was written by recipe {state['recipe']}, this is {self.recipe!r}"
            )
        self.student.model.load_state_dict(state["model"])
        # how the other device was served is none of what the run has learned
        groups = zip(state["optimizer"]["param_groups"], self.optimizer.param_groups, strict=True)
        for theirs, own in groups:
            theirs.update({name: own[name] for name in ("lr", "fused", "foreach", "capturable")})
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.elapsed_s = state["step"], state["elapsed_s"]
        self._used = {BatchKind(*kind): count for kind, count in state["used"]}


def loss_positions(batch: Batch, num_rows: int, seed: int) -> Tensor:
    """Rows whose index loss stands for all: half of them any, half of those that predict.

    Returns:
        int64 [R, S] on the batch's device.
    """
    kind, device = batch.kind, batch.ids_T.device
    per_row = max(2, num_rows // kind.num_rows)
    generator = torch.Generator(device).manual_seed(seed)

    def draw(high: int, count: int) -> Tensor:
        shape = (kind.num_rows, count)
        return torch.randint(high, shape, device=device, generator=generator)

    anywhere = draw(kind.num_tokens, per_row // 2)
    if batch.loss_rows_S.shape[0] == 0:
        return anywhere
    picked = draw(batch.loss_rows_S.shape[0], per_row - per_row // 2)
    # each sequence draws among its own predicting rows
    bounds = torch.searchsorted(
        batch.loss_rows_S, torch.arange(kind.num_rows + 1, device=device) * kind.num_tokens
    )
    first, count = bounds[:-1, None], (bounds[1:] - bounds[:-1]).clamp(min=1)[:, None]
    chosen = (first + picked % count).clamp(max=batch.loss_rows_S.shape[0] - 1)
    answering = batch.loss_rows_S[chosen] % kind.num_tokens
    return torch.cat([anywhere, answering], dim=1)


def json_lines(path: Path) -> Callable[[dict[str, Any]], None]:
    """A report that appends its records to a file and prints them in short."""

    def report(record: dict[str, Any]) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        skills = " ".join(
            f"{name}={scores['right']:.2f}" for name, scores in record["skills"].items()
        )
        keys = ("step", "seconds", "steps_per_s", "graphed", "loss", "index_loss", "norm")
        head = " ".join(f"{key} {record[key]:g}" for key in keys)
        print(f"{head} | {skills}", flush=True)

    return report


def fast_operations(device: torch.device) -> dict[str, Any]:
    """Options of a `Student` on a device: what Triton does better, on a GPU."""
    if device.type != "cuda":
        return {}
    from m3stack.train.fused import fused_pointwise
    from m3stack.train.fused_sparse import fused_sparse

    return {"pointwise": fused_pointwise(), "kernels": fused_sparse()}


def initial_student(
    config: M3Config, device: torch.device, weights: Iterator[tuple[str, Tensor]], **options: Any
) -> Student:
    """A student with the weights that every run starts from."""
    student = Student(config, device, **options)
    student.load(dict(weights))
    return student


def _optimizer(student: Student, recipe: Recipe) -> torch.optim.AdamW:
    decayed: list[Tensor] = []
    kept: list[Tensor] = []
    for name, parameter in student.model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_matrix = parameter.dim() > 1 and "embedding" not in name
        (decayed if is_matrix else kept).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    is_gpu = student.device.type == "cuda"
    rate = torch.tensor(recipe.peak_rate, device=student.device) if is_gpu else recipe.peak_rate
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=is_gpu, capturable=is_gpu)
