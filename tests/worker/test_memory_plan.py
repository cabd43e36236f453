"""The memory plan against published sizes, and against the tensors and pages that would be made."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from m3stack.cache.pool import PageShape
from m3stack.config import WorkerConfig
from m3stack.errors import StartupError
from m3stack.kernels.reference_table import reference_kernels
from m3stack.layers import Place
from m3stack.memory_plan import (
    GIB,
    KvFormat,
    MemoryPlan,
    kv_bytes_per_token,
    plan_memory,
    released_model_config,
    smallest_group,
    table,
    weights_of_rank,
)
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.model import M3Model
from m3stack.models.minimax_m3.quantization import WeightFormat
from m3stack.step_limits import GPU_GRAPH_BYTES
from tests.worker.models.minimax_m3.random_checkpoint import quantisable_config
from tests.worker.models.minimax_m3.released import MXFP8_GIB, NUM_PARAMETERS, released_config

RELEASED = released_model_config()
H200, H100 = int(139.8 * GIB), int(79.2 * GIB)
MILLION = 1 << 20


def plan(**changes: Any) -> MemoryPlan:
    request: dict[str, Any] = {
        "gpus": 8,
        "gpu_bytes": H200,
        "weight_format": "mxfp8",
        "context_tokens": 1 << 17,
        "concurrency": 8,
        "kv_format": "bf16",
    }
    return plan_memory(**request | changes)


def test_the_shipped_config_is_the_released_one() -> None:
    assert M3Config.from_object(released_config()) == RELEASED


def test_weights_have_the_published_sizes() -> None:
    bytes_of = {item: weights_of_rank(RELEASED, item, 1) for item in WeightFormat}
    assert round(bytes_of[WeightFormat.MXFP8] / GIB, 2) == MXFP8_GIB
    assert round(bytes_of[WeightFormat.PLAIN] / 1e9) == 854
    # two bytes a parameter, and two more for those in fp32
    in_fp32 = 57 * (128 * 6144 + 128) + 1280 * 1176
    router_biases = 57 * 128
    expected = 2 * (NUM_PARAMETERS + router_biases) + 2 * in_fp32
    assert bytes_of[WeightFormat.PLAIN] == expected
    assert round(bytes_of[WeightFormat.NVFP4] / 1e9) == 250


@pytest.mark.parametrize(
    ("weights", "bits", "published_gb"), [("bf16", 16, 1025), ("mxfp8", 8, 513), ("nvfp4", 4, 257)]
)
def test_published_minimums_hold_the_weights_and_but_for_nvfp4_a_cache(
    weights: str, bits: int, published_gb: int
) -> None:
    # they are a rule of thumb: the parameters' nominal bits, and a fifth more
    assert -(-NUM_PARAMETERS * bits // 8 * 12 // 10 // 10**9) == published_gb
    four = plan(gpus=4, gpu_bytes=published_gb * 10**9 // 4, weight_format=weights)
    assert four.weight_bytes < four.gpu_bytes
    # NVFP4 takes 4.5 bits, and attention and dense layers keep 8: 250 GB are not 214
    assert (four.cache_tokens > 4096) == (weights != "nvfp4")


@pytest.mark.parametrize(
    ("kv", "tp1", "tp4"),
    [("bf16", 137_472, 45_312), ("fp8", 79_104, 30_720), ("fp8-all", 68_736, 22_656)],
)
def test_a_token_takes_the_published_bytes(kv: str, tp1: int, tp4: int) -> None:
    sizes = {gpus: kv_bytes_per_token(RELEASED, KvFormat(kv), gpus) for gpus in (1, 2, 4, 8, 16)}
    assert sizes[1] == tp1
    # beyond four GPUs every KV head stands on several, and the index key on all from the start
    assert sizes[4] == sizes[8] == sizes[16] == tp4
    if kv == "bf16":
        assert sizes[1] * MILLION / GIB == 134.25


def test_a_published_pool_size_follows_from_its_free_memory() -> None:
    # 65 GB left a GPU on eight: about 1.43 and 2.87 million tokens; the published 2.17 counts keys
    # and values of the three dense layers in fp8 as well, which stay in bf16 here
    for kv, millions in (("bf16", 1.43), ("fp8", 2.12), ("fp8-all", 2.87)):
        got = dataclasses.replace(plan(kv_format=kv), cache_share=1.0)
        freed = dataclasses.replace(got, gpu_bytes=got.gpu_bytes - got.cache_bytes + 65 * 10**9)
        assert freed.cache_tokens / 1e6 == pytest.approx(millions, abs=0.01)


@pytest.mark.parametrize("weights", ["bf16", "mxfp8"])
def test_planned_weights_are_the_model_s_own_bytes(weights: str) -> None:
    config = M3Config.from_object(quantisable_config(2))
    place = Place(torch.device("meta"), torch.bfloat16, keeps_mxfp8=weights == "mxfp8")
    model = M3Model(config, kernels=reference_kernels(), place=place)
    held = sum(parameter.nbytes for parameter in model.parameters())
    assert weights_of_rank(config, WeightFormat(weights), 1) == held


@pytest.mark.parametrize(
    ("kv", "kv_dtype"), [(KvFormat.BF16, None), (KvFormat.FP8, torch.float8_e4m3fn)]
)
def test_planned_pages_are_the_pool_s_own(kv: KvFormat, kv_dtype: torch.dtype | None) -> None:
    shape = PageShape(
        sparse_layers=RELEASED.sparse_layers,
        num_kv_heads=RELEASED.num_kv_heads,
        head_dim=RELEASED.head_dim,
        index_dim=RELEASED.index_dim,
        page_tokens=RELEASED.block_tokens,
        dtype=torch.bfloat16,
        kv_dtype=kv_dtype,
    )
    assert shape.bytes_per_page == 128 * kv_bytes_per_token(RELEASED, kv, 1)


def test_what_is_kept_from_pages_is_what_a_worker_keeps() -> None:
    work = dict(plan().work_bytes)
    # a grown step: four streams of 6144, q, k and v in the width of 8 heads each, and for each of
    # four chosen experts an eighth of three inner widths and a result in fp32
    each_token = 4 * 6144 * 2 + 3 * 8 * 128 * 2 + 4 * (3 * 3072 // 8 * 2 + 6144 * 4)
    assert work["activations"] == 16_384 * each_token
    assert work["recorded steps"] == GPU_GRAPH_BYTES
    left = plan().gpu_bytes - plan().weight_bytes - sum(work.values())
    assert plan().cache_bytes == int(left * WorkerConfig().kv_memory_fraction)
    assert plan().cache_bytes + plan().spare_bytes == left


def test_a_million_tokens_fit_on_eight_h200_and_not_on_eight_h100() -> None:
    on_h200 = plan(context_tokens=MILLION, concurrency=1)
    assert on_h200.fits
    assert on_h200.largest_concurrency == 1
    assert on_h200.largest_context_tokens == MILLION
    on_h100 = plan(gpu_bytes=H100, context_tokens=MILLION, concurrency=1)
    assert not on_h100.fits
    assert 0 < on_h100.largest_context_tokens < MILLION
    assert not plan(gpus=4, weight_format="bf16").fits


def test_the_limits_it_names_are_the_limits() -> None:
    base = plan(gpu_bytes=H100, concurrency=3, context_tokens=100_001)
    most = base.largest_concurrency
    assert plan(gpu_bytes=H100, concurrency=most, context_tokens=100_001).fits
    assert not plan(gpu_bytes=H100, concurrency=most + 1, context_tokens=100_001).fits
    longest = base.largest_context_tokens
    assert plan(gpu_bytes=H100, concurrency=3, context_tokens=longest).fits
    assert not plan(gpu_bytes=H100, concurrency=3, context_tokens=longest + 1).fits


def test_shares_of_the_group_add_up_to_the_weights_and_what_is_replicated() -> None:
    whole = weights_of_rank(RELEASED, WeightFormat.MXFP8, 1)
    for gpus in (2, 4, 8):
        got = plan(gpus=gpus)
        assert abs(gpus * (got.weight_bytes - got.replicated_bytes) - whole) < gpus
        assert 0 < got.replicated_bytes < 2 * GIB


def test_the_table_says_what_does_not_fit_and_what_would() -> None:
    good = table(plan())
    assert "MiniMax-M3 on 8 GPUs of 139.8 GiB, per GPU:" in good
    assert "weights                 53.32 GiB  mxfp8, 1.67 GiB of them on every GPU" in good
    assert "45.3 kB a token" in good
    assert "fits: up to 12 requests of 131072 tokens, or 8 of " in good
    bad = plan(gpu_bytes=H100)
    shown = table(bad)
    assert "does not fit: 28.74 GiB short on every GPU" in shown
    assert f"with this context: {bad.largest_concurrency} requests at once" in shown
    assert f"with this concurrency: {bad.largest_context_tokens} tokens each" in shown
    hopeless = plan(gpus=1)
    assert hopeless.cache_tokens == 0
    assert "with this" not in table(hopeless)
    assert smallest_group(hopeless) == 8
    assert smallest_group(plan(gpus=16, gpu_bytes=8 * GIB)) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpus": 0}, "gpus is 0, expected at least 1"),
        ({"concurrency": -1}, "concurrency is -1"),
        ({"context_tokens": MILLION + 1}, "context is 1048577 tokens, the model supports 1048576"),
        ({"weight_format": "fp8"}, "'fp8' is none of bf16, mxfp8, nvfp4"),
        ({"kv_format": "int8"}, "'int8' is none of bf16, fp8, fp8-all"),
        ({"gpus": 3}, "cannot be split evenly over 3 ranks"),
    ],
)
def test_bad_requests_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        plan(**change)


def test_index_keys_that_are_shared_out_leave_room_for_a_third_more_tokens() -> None:
    per_token = {
        gpus: kv_bytes_per_token(RELEASED, KvFormat.BF16, gpus, shard_index_keys=True)
        for gpus in (2, 4, 8)
    }
    assert per_token == {2: 68_736, 4: 34_368, 8: 32_544}
    whole, shared = plan(), plan(shard_index_keys=True)
    assert 1.35 < shared.cache_tokens / whole.cache_tokens < 1.4
    # every GPU projects the index queries of all groups: three heads more of 57 layers
    more = shared.weight_bytes - whole.weight_bytes
    assert more == 57 * 3 * 128 * 6144 * 33 // 32
    assert "index keys shared out" in table(shared)
