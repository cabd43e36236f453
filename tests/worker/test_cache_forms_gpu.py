"""On a GPU, with heads as the released model has them: a cache with a copy, and one in e4m3."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from m3stack.cache.pool import KvPool, PageShape
from m3stack.kernels.msa.decode import two_stage
from m3stack.kernels.select import build_kernels
from m3stack.layers import Place
from m3stack.memory_plan import released_model_config
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.e4m3_values import fold_value_scales
from m3stack.models.minimax_m3.model import M3Model
from m3stack.models.minimax_m3.random_weights import random_model
from m3stack.rank_model import kernel_shape
from tests.worker.support import PagedRunner, Track

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

LAYERS = 2


@pytest.fixture(scope="module")
def model_config() -> M3Config:
    released = released_model_config()
    return replace(
        released,
        hidden_size=512,
        num_layers=LAYERS,
        sparse_layers=(True,) * LAYERS,
        moe_layers=(False,) * LAYERS,
        dense_size=512,
        vocab_size=4096,
        quantization=None,
        vision=replace(released.vision, num_layers=1),
    )


def fresh_model(config: M3Config) -> M3Model:
    device = torch.device("cuda")
    shape = kernel_shape(config, torch.bfloat16)
    kernels = build_kernels("cuda", shape=shape, device=device)
    return random_model(config, kernels=kernels, place=Place(device, torch.bfloat16))


def runner_of(model: M3Model, num_pages: int, **cache: object) -> PagedRunner:
    """A runner whose pages are those of a worker with these settings."""
    config = model.config
    shape = PageShape(
        sparse_layers=config.sparse_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        index_dim=config.index_dim,
        page_tokens=config.block_tokens,
        dtype=torch.bfloat16,
        **cache,  # type: ignore[arg-type]
    )
    runner = PagedRunner(model, num_pages=num_pages)
    runner.cache = KvPool(shape, num_pages, torch.device("cuda")).layers
    return runner


def answer(runner: PagedRunner, prompt: list[int], *, num_tokens: int, chunk: int) -> Tensor:
    """Logits of greedy tokens after a prompt."""
    track, rows = Track(), []
    for first in range(0, len(prompt), chunk):
        last = runner.step([(track, prompt[first : first + chunk])])[0][-1]
    for _ in range(num_tokens):
        rows.append(last.float())
        last = runner.step([(track, [int(last.argmax())])])[0][-1]
    return torch.stack(rows)


def prompt_of(length: int) -> list[int]:
    return torch.randint(0, 4000, (length,), generator=torch.Generator().manual_seed(1)).tolist()


def test_a_copy_of_the_index_keys_changes_no_logit_of_a_long_context(model_config, monkeypatch):
    calls = []
    launch = two_stage.launch_bounds

    def counted(*arguments):
        calls.append(arguments)
        return launch(*arguments)

    monkeypatch.setattr(two_stage, "launch_bounds", counted)
    model = fresh_model(model_config)
    prompt = prompt_of(270_000)
    results = []
    for is_copied in (False, True):
        runner = runner_of(model, 2200, index_copy=is_copied)
        results.append(answer(runner, prompt, num_tokens=3, chunk=8192))
        del runner
        assert len(calls) == (3 * LAYERS if is_copied else 0)
    assert torch.equal(results[1], results[0])


@pytest.mark.parametrize(("exponent", "limit"), [(0, 0.1), (-12, 0.1)])
def test_a_cache_in_e4m3_stays_near_the_wide_one_however_large_its_values_are(
    model_config, exponent, limit
):
    prompt = prompt_of(2000)  # every block is chosen, so that only rounding differs
    wide = answer(runner_of(fresh_model(model_config), 32), prompt, num_tokens=1, chunk=700)
    model = fresh_model(model_config)
    for layer in model.layers:
        attention = layer.attention
        attention.in_proj.weight[attention.value_rows].mul_(2.0**exponent)
        attention.out_proj.weight.mul_(2.0**-exponent)
    fold_value_scales(model)
    narrow = answer(
        runner_of(model, 32, kv_dtype=torch.float8_e4m3fn), prompt, num_tokens=1, chunk=700
    )
    assert float((narrow - wide).norm() / wide.norm()) < limit
