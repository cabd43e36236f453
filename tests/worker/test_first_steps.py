"""Steps of all sizes can be run before there are pages, and leave nothing behind."""

from __future__ import annotations

import pytest
import torch

from m3stack.cache.pool import PageShape
from m3stack.checkpoints import builtin_checkpoint
from m3stack.dry_run import STAND_IN_PAGES
from m3stack.first_steps import StepSize, one_of_each_kind, run_first_steps, sizes, step_of
from m3stack.models.minimax_m3.model import M3Model
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


def test_time_is_bounded_and_what_was_run_is_counted(model: M3Model) -> None:
    config = model.config
    shape = PageShape(
        config.sparse_layers,
        config.num_kv_heads,
        config.head_dim,
        config.index_dim,
        config.block_tokens,
        torch.float32,
    )
    wanted = [StepSize((n,), 10) for n in range(1, 6)]
    now = iter(range(0, 100, 10))
    assert run_first_steps(model, shape, wanted, budget_s=1000.0) == 5
    assert run_first_steps(model, shape, wanted, budget_s=25.0, clock=lambda: next(now)) == 2


def test_one_layer_of_each_kind_stands_for_all(model: M3Model) -> None:
    part = one_of_each_kind(model)
    assert len(part.layers) == len(part.config.sparse_layers) == 2
    assert part.layers[1] is model.layers[1]
    assert len(model.layers) == model.config.num_layers == 5, "the model itself has changed"
    batch = step_of(part, StepSize((40,), 40), STAND_IN_PAGES)
    with torch.inference_mode():
        assert part(batch, make_cache(part, STAND_IN_PAGES, fill=0.0)).isfinite().all()
