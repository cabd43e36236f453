"""Where weights come from and in what form they stay: kept in MXFP8, decoded, or drawn."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from m3stack.client import default_sampling
from m3stack.errors import StartupError
from m3stack.hardware import Hardware
from m3stack.kernels.reference_table import reference_kernels
from m3stack.layers import Place
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.random_weights import random_model
from m3stack.models.minimax_m3.weights import load_model
from m3stack.rank_model import keeps_mxfp8
from m3stack.serve import EXIT_DRAINED
from m3stack.types import Request, WorkerState
from tests.worker import support
from tests.worker.models.minimax_m3.random_checkpoint import (
    quantisable_config,
    quantised,
    random_tensors,
    write_checkpoint,
)
from tests.worker.served import Served, config, serve_around

CONFIG = quantisable_config(1)
CPU = torch.device("cpu")
GPU_BF16 = Hardware(torch.device("cuda"), torch.bfloat16)
GPU_FP32 = Hardware(torch.device("cuda"), torch.float32)


def answer(path: Path, **flags: Any) -> list[int]:
    """Greedy tokens of a served model."""
    tokens: list[int] = []

    def scenario(served: Served) -> None:
        served.wait_until(WorkerState.READY)
        prompt = tuple(3 + 7 * place % 250 for place in range(60))
        sampling = default_sampling(12, ignore_eos=True)
        tokens.extend(served.tokens(Request("one", prompt, sampling)))

    assert serve_around(config(path, **flags), scenario) == EXIT_DRAINED
    assert len(tokens) == 12
    return tokens


def mxfp8_checkpoint(path: Path) -> Path:
    stored_config, stored, _ = quantised(CONFIG, random_tensors(CONFIG, 1))
    return write_checkpoint(path, stored_config, stored)


def test_weights_kept_in_mxfp8_answer_as_decoded_ones_do(tmp_path: Path) -> None:
    path = mxfp8_checkpoint(tmp_path / "m")
    assert answer(path, mxfp8_weights="keep") == answer(path, mxfp8_weights="decode")


def test_weights_that_are_not_mxfp8_cannot_be_kept(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "m", CONFIG, random_tensors(CONFIG, 1))
    with pytest.raises(StartupError, match="is in bf16; decode them instead"):
        answer(path, mxfp8_weights="keep")


def test_auto_keeps_where_kernels_gain_by_it(tmp_path: Path) -> None:
    coded = M3Config.from_dir(mxfp8_checkpoint(tmp_path / "m"))
    plain = M3Config.from_object(CONFIG)
    auto, keep = config(tmp_path), config(tmp_path, mxfp8_weights="keep")
    assert keeps_mxfp8(auto, coded, GPU_BF16)
    assert not keeps_mxfp8(auto, coded, GPU_FP32)
    assert not keeps_mxfp8(auto, coded, Hardware(CPU, torch.bfloat16))
    assert not keeps_mxfp8(auto, plain, GPU_BF16)
    assert not keeps_mxfp8(config(tmp_path, mxfp8_weights="decode"), coded, GPU_BF16)
    assert keeps_mxfp8(keep, coded, Hardware(CPU, torch.float32))
    with pytest.raises(StartupError, match="beside bfloat16 only; choose dtype bfloat16"):
        keeps_mxfp8(keep, coded, GPU_FP32)


@pytest.mark.parametrize(("part", "value"), [("weight", 0x7F), ("weight_scale_inv", 135)])
def test_weights_that_kernels_cannot_decode_are_named_at_load(
    tmp_path: Path, part: str, value: int
) -> None:
    stored_config, stored, _ = quantised(CONFIG, random_tensors(CONFIG, 1))
    name = "language_model.model.layers.0.self_attn.o_proj."
    stored[name + part].view(torch.uint8)[3, 0] = value
    path = write_checkpoint(tmp_path / "m", stored_config, stored)

    def load(*, keep: bool) -> None:
        load_model(
            path,
            config=M3Config.from_dir(path),
            kernels=reference_kernels(),
            device=CPU,
            dtype=torch.float32,
            progress=lambda done, total: None,
            keep_quantised=keep,
        )

    load(keep=False)
    with pytest.raises(StartupError, match=f"{name}weight holds a NaN or a scale above 134"):
        load(keep=True)


@pytest.mark.parametrize("kept", [False, True])
def test_random_weights_keep_activations_near_one(kept: bool) -> None:
    place = Place(CPU, torch.float32, keeps_mxfp8=kept)
    model = random_model(M3Config.from_object(CONFIG), kernels=reference_kernels(), place=place)
    logits = support.PagedRunner(model).feed(support.Track(), list(range(40)), 17)
    assert logits.isfinite().all()
    assert 0.1 < logits.std() < 10
    again = random_model(M3Config.from_object(CONFIG), kernels=reference_kernels(), place=place)
    for name, parameter in again.named_parameters():
        same = dict(model.named_parameters())[name]
        assert torch.equal(parameter.view(torch.uint8), same.view(torch.uint8)), name


def test_a_worker_with_random_weights_needs_no_files_of_them(tmp_path: Path) -> None:
    full = write_checkpoint(tmp_path / "full", CONFIG, random_tensors(CONFIG, 1))
    path = tmp_path / "bare"
    path.mkdir()
    shutil.copy(full / "config.json", path)
    first = answer(path, random_weights=True)
    assert first == answer(path, random_weights=True)
    with pytest.raises(StartupError):
        answer(path)
