"""The largest step can be run before there are pages for it."""

from __future__ import annotations

import pytest
import torch

from m3stack import gpu_steps
from m3stack.cache.pool import PageShape
from m3stack.checkpoints import builtin_checkpoint
from m3stack.config import WorkerConfig
from m3stack.dry_run import STAND_IN_PAGES, largest_encode, largest_step, run_largest_step
from m3stack.models.minimax_m3.model import M3Model
from m3stack.parallel import ALONE
from m3stack.step_limits import scheduler_limits
from tests.worker.support import load, make_cache


@pytest.fixture(scope="module")
def model() -> M3Model:
    return load(builtin_checkpoint("tiny"))


@pytest.mark.parametrize(("num_tokens", "context"), [(1, 1), (40, 40), (40, 3000), (128, 4096)])
def test_a_step_of_any_context_fits_a_few_pages(
    model: M3Model, num_tokens: int, context: int
) -> None:
    batch = largest_step(
        model, num_tokens=num_tokens, context_tokens=context, num_pages=STAND_IN_PAGES
    )
    assert batch.rows.max_seq_len == context
    assert batch.positions_T[-1] == context - 1
    assert int(batch.rows.page_table_SJ.max()) < STAND_IN_PAGES
    with torch.inference_mode():
        logits = model(batch, make_cache(model, STAND_IN_PAGES, fill=0.0))
    assert logits.isfinite().all()


def test_it_runs_whole_and_says_nothing_of_a_cpu(model: M3Model) -> None:
    config = model.config
    shape = PageShape(
        config.sparse_layers,
        config.num_kv_heads,
        config.head_dim,
        config.index_dim,
        config.block_tokens,
        torch.float32,
    )
    taken = run_largest_step(model, shape, num_tokens=64, context_tokens=500, num_patches=64)
    assert taken == 0


@pytest.mark.parametrize("num_patches", [1, 16, 1000])
def test_the_largest_encode_is_about_as_large_as_asked(model: M3Model, num_patches: int) -> None:
    batch = largest_encode(model, num_patches)
    (grid,) = batch.grids_thw
    merge = model.config.vision.merge_size
    assert grid[1] % merge == 0 == grid[2] % merge
    assert batch.patches[0].shape[0] == grid[1] * grid[2] <= max(num_patches, merge**2)


def test_pages_leave_room_on_the_rank_that_has_the_least(
    model: M3Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = WorkerConfig(model_path=str(builtin_checkpoint("tiny")), device="cpu")
    limits = scheduler_limits(config, "cpu")
    monkeypatch.setattr(gpu_steps, "free_bytes", lambda device: 10 << 30)
    told: list[int] = []

    def least(own: int) -> int:
        told.append(own)
        return 7 << 30

    reserved = gpu_steps.bytes_scarcest(config, model, limits, mesh=ALONE, least=least)
    assert told == [10 << 30]
    assert reserved == 3 << 30
