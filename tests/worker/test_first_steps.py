"""Steps of all sizes can be run before there are pages, and leave nothing behind."""

from __future__ import annotations

import logging
import weakref

import pytest
import torch

from m3stack.batch import DeviceBatch, LayerCache
from m3stack.cache.pool import PageShape
from m3stack.checkpoints import builtin_checkpoint
from m3stack.config import WorkerConfig
from m3stack.dry_run import STAND_IN_PAGES
from m3stack.engine.budget import SchedulerLimits
from m3stack.errors import LoadingStoppedError
from m3stack.first_steps import Bounds, StepSize, one_of_each_kind, run_first_steps, sizes, step_of
from m3stack.gpu_steps import run_ahead
from m3stack.models.minimax_m3.model import M3Model
from m3stack.parallel import Alone
from tests.worker.support import load, make_cache


@pytest.fixture(scope="module")
def model() -> M3Model:
    return load(builtin_checkpoint("tiny"))


@pytest.mark.parametrize(
    "size", [StepSize((7,), 7), StepSize((1, 1, 30), 700), StepSize((1,) * 5, 3000)]
)
def test_a_step_of_any_size_fits_a_few_pages(model: M3Model, size: StepSize) -> None:
    batch = step_of(model, size, STAND_IN_PAGES)
    assert batch.token_ids_T.shape[0] == sum(size.rows)
    assert (batch.rows.seq_lens_S == size.context_tokens).all()
    with torch.inference_mode():
        logits = model(batch, make_cache(model, STAND_IN_PAGES, fill=0.0))
    assert logits.shape[0] == len(size.rows)
    assert logits.isfinite().all()


@pytest.mark.parametrize(
    ("tokens", "sequences", "context"),
    [(8192, 64, 1 << 20), (512, 1, 900), (64, 4, 64), (8192, 64, 1000), (8192, 2, 1)],
)
def test_sizes_stay_within_what_a_worker_may_run(tokens: int, sequences: int, context: int) -> None:
    found = list(sizes(max_tokens=tokens, max_sequences=sequences, context_tokens=context))
    assert len(found) == len(set(found))
    for size in found:
        assert sum(size.rows) <= max(tokens, sequences)
        assert len(size.rows) <= max(sequences, 1)
        assert max(size.rows) <= size.context_tokens <= context
    assert StepSize((1,) * sequences, context) in found
    assert any(size.rows == (min(tokens, context),) for size in found)


def test_steps_of_next_tokens_come_first_and_no_mixed_step_is_larger_than_any_can_be() -> None:
    found = list(
        sizes(max_tokens=8192, max_sequences=64, context_tokens=1 << 20, max_mixed_tokens=2048)
    )
    is_decode = [set(size.rows) == {1} for size in found]
    assert is_decode == sorted(is_decode, reverse=True)
    mixed = [size for size in found if len(set(size.rows)) > 1]
    assert max(sum(size.rows) for size in mixed) == 2048
    # rows that decode beside a prompt are attended to apart, by kernels made for their number
    assert {size.rows.count(1) for size in mixed} >= {1, 2, 8, 32, 48}
    # of prompts those first that are far apart
    assert found.index(StepSize((8192,), 8192)) < found.index(StepSize((4097,), 4097))


def shape_of(model: M3Model) -> PageShape:
    config = model.config
    return PageShape(
        config.sparse_layers,
        config.num_kv_heads,
        config.head_dim,
        config.index_dim,
        config.block_tokens,
        torch.float32,
    )


WANTED = [StepSize((n,), 10) for n in range(1, 6)]


def test_time_is_bounded_and_what_was_run_is_counted(model: M3Model) -> None:
    now = iter(range(0, 100, 10))
    assert run_first_steps(model, shape_of(model), WANTED, Bounds(1000.0)) == 5
    assert run_first_steps(model, shape_of(model), WANTED, Bounds(25.0, clock=now.__next__)) == 2


def test_a_worker_that_is_told_to_stop_begins_no_further_size(model: M3Model) -> None:
    asked: list[bool] = []
    checks: list[int] = []

    def check() -> None:
        checks.append(len(checks))
        if len(checks) > 2:
            raise LoadingStoppedError

    def agree(goes_on: bool) -> bool:
        asked.append(goes_on)
        return goes_on

    with pytest.raises(LoadingStoppedError):
        run_first_steps(model, shape_of(model), WANTED, Bounds(1000.0, check, agree))
    # the other ranks hear of it before they would wait in a collective
    assert asked == [True, True, False]


def test_ranks_end_with_the_leading_one(model: M3Model) -> None:
    words = iter([True, True, True, False])
    bounds = Bounds(0.0, agree=lambda goes_on: next(words))
    assert run_first_steps(model, shape_of(model), WANTED, bounds) == 3


@pytest.mark.parametrize("failure", [torch.OutOfMemoryError, ValueError])
def test_a_failed_step_leaves_nothing_with_the_allocator(
    model: M3Model, failure: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[weakref.ref[torch.Tensor]] = []
    emptied: list[bool] = []

    def forward(self: M3Model, batch: DeviceBatch, caches: LayerCache) -> torch.Tensor:
        activations = torch.zeros(8)
        left.append(weakref.ref(activations))
        raise failure("too much")

    monkeypatch.setattr(M3Model, "forward", forward)
    # the test's own handler keeps what is logged, and the failure with it
    monkeypatch.setattr(logging.getLogger("m3stack.gpu_steps"), "disabled", True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(left[0]() is None))
    config = WorkerConfig(first_steps_s=100.0)
    run_ahead(config, model, SchedulerLimits(64, 4, 64))
    assert emptied == [True], "memory was still held, or never given back"
    alone = Alone()
    alone.size = 2
    with pytest.raises(failure):
        run_ahead(config, model, SchedulerLimits(64, 4, 64), mesh=alone)


def test_without_a_word_a_cpu_runs_no_first_steps(model: M3Model) -> None:
    def check() -> None:
        raise AssertionError("a step was about to be run")

    run_ahead(WorkerConfig(), model, SchedulerLimits(64, 4, 64), check=check)
    run_ahead(WorkerConfig(first_steps_s=0.0), model, SchedulerLimits(64, 4, 64), check=check)


def test_one_layer_of_each_kind_stands_for_all(model: M3Model) -> None:
    part = one_of_each_kind(model)
    assert len(part.layers) == len(part.config.sparse_layers) == 2
    assert part.layers[1] is model.layers[1]
    assert len(model.layers) == model.config.num_layers == 5, "the model itself has changed"
    batch = step_of(part, StepSize((40,), 40), STAND_IN_PAGES)
    with torch.inference_mode():
        assert part(batch, make_cache(part, STAND_IN_PAGES, fill=0.0)).isfinite().all()
