"""Training at toy scale: losses fall, a stopped run goes on as if it had not stopped."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from m3stack.checkpoints import builtin_checkpoint
from m3stack.models.minimax_m3 import tiny
from m3stack.models.minimax_m3.config import M3Config
from m3stack.train.__main__ import LOG_FILE, PLOT_FILE, STATE_FILE, main
from m3stack.train.batches import BatchKind, BatchMaker
from m3stack.train.encode import Encoder
from m3stack.train.graphs import as_before
from m3stack.train.loop import Budget, Trainer, initial_student
from m3stack.train.operations import Selection
from m3stack.train.recipe import Phase, Recipe
from tests.worker import support

KIND = BatchKind(1, 384, 1)
RECIPE = Recipe(
    (
        Phase(0.5, ((1.0, KIND),), Selection.ALL),
        Phase(1.0, ((1.0, KIND),), Selection.OWN),
    ),
    warmup_steps=1,
    loss_rows=16,
)


def trainer(records: list[dict[str, Any]]) -> Trainer:
    config = M3Config.from_object(tiny.config_object())
    student = initial_student(config, torch.device("cpu"), tiny.initial_weights(config))
    maker = BatchMaker(Encoder(builtin_checkpoint("tiny") / "tokenizer.json"), RECIPE.seed)
    return Trainer(student, RECIPE, maker.make, records.append)


def test_a_resumed_run_equals_one_that_never_stopped(tmp_path: Path) -> None:
    whole = trainer([])
    whole.run(Budget(4))
    first = trainer([])
    first.run(Budget(4), until=0.5)
    assert first.step == 2
    first.save(tmp_path / "state.pt")
    second = trainer([])
    second.resume(tmp_path / "state.pt")
    second.run(Budget(4))
    for name, tensor in second.student.weights().items():
        assert torch.equal(tensor, whole.student.weights()[name]), name


def test_a_state_goes_on_with_the_options_of_its_new_device(tmp_path: Path) -> None:
    whole = trainer([])
    whole.run(Budget(4))
    first = trainer([])
    first.run(Budget(4), until=0.5)
    # as a GPU's optimizer has them
    for group in first.optimizer.param_groups:
        group.update(fused=True, capturable=True, lr=torch.tensor(group["lr"]))
    first.save(tmp_path / "state.pt")
    second = trainer([])
    fresh = [dict(group) for group in second.optimizer.param_groups]
    second.resume(tmp_path / "state.pt")
    for group, own in zip(second.optimizer.param_groups, fresh, strict=True):
        for name in ("lr", "fused", "foreach", "capturable"):
            assert type(group[name]) is type(own[name]), name
            assert group[name] == own[name], name
    second.run(Budget(4))
    for name, tensor in second.student.weights().items():
        assert torch.equal(tensor, whole.student.weights()[name]), name


@pytest.mark.parametrize("steps_before", [0, 1])
def test_what_warms_up_leaves_no_trace(steps_before: int) -> None:
    whole, warmed = trainer([]), trainer([])
    for one in (whole, warmed):
        one.run(Budget(4), until=steps_before / 4)
    where = [tensor.data_ptr() for tensor in warmed.student.model.state_dict().values()]
    with as_before(warmed.student.model, warmed.optimizer):
        other = trainer([])
        other.student, other.optimizer = warmed.student, warmed.optimizer
        other.run(Budget(2))
    assert where == [tensor.data_ptr() for tensor in warmed.student.model.state_dict().values()]
    for one in (whole, warmed):
        one.run(Budget(4), until=(steps_before + 1) / 4)
    for name, tensor in warmed.student.weights().items():
        assert torch.equal(tensor, whole.student.weights()[name]), name


def test_a_run_that_ends_before_all_its_steps_reports_the_last() -> None:
    records: list[dict[str, Any]] = []
    one = trainer(records)
    one.run(Budget(4), until=0.25)
    assert [record["step"] for record in records] == [one.step] == [1]
    assert records[0]["skills"]


@pytest.mark.parametrize("change", [{"seed": 21}, {"peak_rate": 2e-3}, {"loss_rows": 32}])
def test_a_state_of_the_recipe_in_other_numbers_is_refused(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    one = trainer([])
    one.recipe = replace(RECIPE, **change)
    one.save(tmp_path / "state.pt")
    with pytest.raises(ValueError, match="was written by recipe"):
        trainer([]).resume(tmp_path / "state.pt")


def test_a_state_of_another_recipe_is_refused(tmp_path: Path) -> None:
    one = trainer([])
    one.recipe = Recipe(RECIPE.phases, name="other")
    one.save(tmp_path / "state.pt")
    with pytest.raises(ValueError, match="'other'"):
        trainer([]).resume(tmp_path / "state.pt")


def test_the_command_writes_a_checkpoint_that_the_worker_loads(tmp_path: Path) -> None:
    command = [str(tmp_path), "--batch-tokens", "1024", "--longest", "2", "--device", "cpu"]
    assert main([*command, "--steps", "2"]) == 0
    records = [json.loads(line) for line in (tmp_path / LOG_FILE).read_text().splitlines()]
    assert records[-1]["step"] == 2
    assert records[-1]["skills"]
    assert (tmp_path / STATE_FILE).is_file()
    assert "<polyline" in (tmp_path / PLOT_FILE).read_text()
    model = support.load(tmp_path)
    logits = support.PagedRunner(model).feed(support.Track(), list(range(40)))
    assert bool(logits.isfinite().all())
