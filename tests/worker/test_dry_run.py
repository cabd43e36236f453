"""The largest step can be run before there are pages for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from m3stack import gpu_steps
from m3stack.cache.pool import PageShape
from m3stack.checkpoints import builtin_checkpoint
from m3stack.config import WorkerConfig
from m3stack.dry_run import STAND_IN_PAGES, largest_encode, largest_step, run_largest_step
from m3stack.engine.budget import SchedulerLimits, split_budget
from m3stack.engine.sequence import Sequence
from m3stack.models.minimax_m3.model import M3Model
from m3stack.parallel import ALONE
from m3stack.step_limits import scheduler_limits
from m3stack.types import Request
from tests.worker.engine.history_model import sampling
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


@pytest.mark.parametrize(
    ("num_tokens", "context", "counts"),
    [(300, 300, [300]), (301, 300, [300, 1]), (600, 200, [200] * 3), (500, 150, [150] * 3 + [50])],
)
def test_a_step_beyond_a_context_is_one_of_many_prompts(
    model: M3Model, num_tokens: int, context: int, counts: list[int]
) -> None:
    batch = largest_step(
        model, num_tokens=num_tokens, context_tokens=context, num_pages=STAND_IN_PAGES
    )
    assert batch.token_ids_T.shape == batch.positions_T.shape == (num_tokens,)
    assert batch.rows.query_start_S1.diff().tolist() == counts
    assert batch.rows.seq_lens_S.tolist() == counts
    assert batch.positions_T.tolist() == [place for count in counts for place in range(count)]
    with torch.inference_mode():
        logits = model(batch, make_cache(model, STAND_IN_PAGES, fill=0.0))
    assert logits.shape[0] == len(counts)
    assert logits.isfinite().all()


def test_as_many_tokens_are_measured_as_a_step_may_hold() -> None:
    limits = SchedulerLimits(8192, 64, 1)
    # a long prompt, many short ones, and so short ones that all together are no whole step
    assert limits.largest_step_tokens(1 << 20) == 8192
    assert limits.largest_step_tokens(2048) == 8192
    assert limits.largest_step_tokens(100) == 6400
    prompts = [
        Sequence(
            handle,
            Request(f"r{handle}", tuple(range(2000)), sampling(max_tokens=1)),
            page_tokens=128,
            stop_ids=frozenset(),
            max_context_tokens=2048,
        )
        for handle in range(8)
    ]
    # what the scheduler makes of eight short prompts, none of which is half of that
    assert sum(split_budget(prompts, limits).values()) == 8192


def test_a_worker_measures_the_step_of_many_short_prompts(
    model: M3Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = builtin_checkpoint("tiny")
    config = WorkerConfig(model_path=str(checkpoint), max_context_tokens=1024, max_sequences=32)
    measured: dict[str, int] = {}

    def run(model: object, shape: object, **sizes: int) -> int:
        measured.update(sizes)
        return 5

    monkeypatch.setattr(gpu_steps, "run_largest_step", run)
    monkeypatch.setattr(
        M3Model,
        "embedding",
        SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16),
        raising=False,
    )
    limits = scheduler_limits(config, "cuda")
    taken = gpu_steps.bytes_of_steps(config, model, limits)
    assert taken >= 5
    assert (measured["num_tokens"], measured["context_tokens"]) == (8192, 1024)


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
