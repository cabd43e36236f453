"""Scales of a cache in e4m3 stand in the weights: exact, wide enough for any row, worth it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from m3stack.errors import StartupError
from m3stack.kernels.reference_table import reference_kernels
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.e4m3_values import fold_value_scales
from m3stack.models.minimax_m3.model import DecoderLayer, M3Model
from m3stack.models.minimax_m3.weights import load_model
from tests.worker import support
from tests.worker.models.minimax_m3.random_checkpoint import (
    quantisable_config,
    quantised,
    random_tensors,
    write_checkpoint,
)

CONFIG = quantisable_config(1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, stored, _ = quantised(CONFIG, random_tensors(CONFIG, 1))
    return write_checkpoint(tmp_path_factory.mktemp("e4m3"), config, stored)


def load(path: Path, *, keep: bool = False) -> M3Model:
    return load_model(
        path,
        config=M3Config.from_dir(path),
        kernels=reference_kernels(),
        device=torch.device("cpu"),
        dtype=torch.float32,
        progress=lambda done, total: None,
        keep_quantised=keep,
    )


def sparse_layers(model: M3Model) -> list[DecoderLayer]:
    layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
    return [layer for layer in layers if layer.attention.is_sparse]


def logits(model: M3Model, *, kv_dtype: torch.dtype = torch.float32) -> Tensor:
    ids = torch.randint(0, 290, (140,), generator=torch.Generator().manual_seed(3))
    runner = support.PagedRunner(model)
    runner.cache = tuple(
        replace(
            pages,
            k_PGBD=pages.k_PGBD.to(kv_dtype if is_sparse else torch.float32),
            v_PGBD=pages.v_PGBD.to(kv_dtype if is_sparse else torch.float32),
        )
        for pages, is_sparse in zip(runner.cache, model.config.sparse_layers, strict=True)
    )
    return runner.feed(support.Track(), ids.tolist(), 70)


def shrink_values(model: M3Model, exponents: list[int]) -> None:
    """Values of each KV head 2^exponent as large, and read as much more strongly."""
    for layer in sparse_layers(model):
        attention = layer.attention
        rows = attention.in_proj.weight[attention.value_rows].unflatten(0, (len(exponents), -1))
        columns = attention.out_proj.weight.unflatten(1, (len(exponents), -1))
        for group, exponent in enumerate(exponents):
            rows[group].mul_(2.0**exponent)
            columns[:, group].mul_(2.0**-exponent)


@pytest.mark.parametrize("keep", [False, True])
def test_folded_scales_change_no_bit(path: Path, keep: bool) -> None:
    plain, folded = load(path, keep=keep), load(path, keep=keep)
    exponents = fold_value_scales(folded)
    assert len(exponents) == len(sparse_layers(folded))
    assert any(exponent for layer in exponents for exponent in layer)
    assert torch.equal(logits(folded), logits(plain))


def test_kept_weights_get_the_scales_of_decoded_ones(path: Path) -> None:
    assert fold_value_scales(load(path, keep=True)) == fold_value_scales(load(path))


def test_the_worst_row_there_is_stays_within_e4m3_and_fills_it(path: Path) -> None:
    model = load(path)
    shrink_values(model, [-9, 5])
    fold_value_scales(model)
    kernels = reference_kernels()
    for layer in sparse_layers(model):
        value_weight = layer.attention.in_proj.weight[layer.attention.value_rows]
        # a row along a weight makes the value of that weight the largest that a row can make it
        rows = value_weight * (1.0 + layer.input_norm)
        normed = kernels.gemma_norm(1000.0 * rows, layer.input_norm, 1e-6)
        values = functional.linear(normed, value_weight)
        by_group = values.abs().unflatten(1, (layer.attention.num_groups, -1)).amax((0, 2))
        assert bool((by_group <= 448.0).all())
        assert bool((by_group > 448.0 / 2.05).all())


def test_values_too_small_for_e4m3_are_kept_by_their_scales(path: Path) -> None:
    exact = logits(load(path))
    errors = []
    for is_folded in (False, True):
        model = load(path)
        shrink_values(model, [-12, 11])
        if is_folded:
            fold_value_scales(model)
        actual = logits(model, kv_dtype=torch.float8_e4m3fn)
        errors.append(float((actual - exact).norm() / exact.norm()))
    # what e4m3 itself costs: 2^-4 of a value at most
    assert errors[1] < 0.1
    assert errors[0] > 3 * errors[1]


def test_keys_that_could_pass_the_largest_number_are_refused(path: Path) -> None:
    model = load(path)
    layer = sparse_layers(model)[0]
    layer.attention.k_norm[3] = 448.0 / math.sqrt(32) + 1.0
    with pytest.raises(StartupError, match=r"keys of layer .* may reach 459, past 448"):
        fold_value_scales(model)
