"""Quantised checkpoints mean their decoded weights, decoded at load or kept as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from m3stack.errors import StartupError
from m3stack.kernels.quantised import mxfp8
from m3stack.kernels.reference_table import reference_kernels
from m3stack.layers import Place
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.layout import checkpoint_layout
from m3stack.models.minimax_m3.model import M3Model
from m3stack.models.minimax_m3.ranks import Rank
from m3stack.models.minimax_m3.slices import rank_slices
from m3stack.models.minimax_m3.weights import load_model, load_rank
from tests.worker import support
from tests.worker.models.minimax_m3.random_checkpoint import (
    quantisable_config,
    quantised,
    random_tensors,
    write_checkpoint,
)

CONFIG = quantisable_config(1)
WORLDS = {
    "whole": [Rank()],
    "tp2": [Rank(0, 2), Rank(1, 2)],
    "tp2 ep2": [Rank(0, 2, 0, 2), Rank(1, 2, 1, 2)],
    "dp4 ep4": [Rank(0, 1, r, 4) for r in range(4)],
}


def load(path: Path, *, dtype: torch.dtype = torch.float32, keep: bool = False) -> M3Model:
    return load_model(
        path,
        config=M3Config.from_dir(path),
        kernels=reference_kernels(),
        device=torch.device("cpu"),
        dtype=dtype,
        progress=lambda done, total: None,
        keep_quantised=keep,
    )


def checkpoint(path: Path, experts: str, **text: Any) -> tuple[Path, dict[str, Tensor]]:
    """A quantised checkpoint, and the plain tensors that it means."""
    plain_config = CONFIG | {"text_config": CONFIG["text_config"] | text}
    config, stored, meant = quantised(plain_config, random_tensors(plain_config, 1), experts)
    return write_checkpoint(path, config, stored), meant


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("experts", ["mxfp8", "nvfp4"])
def test_decoding_gives_the_model_of_the_decoded_tensors(
    tmp_path: Path, experts: str, dtype: torch.dtype
) -> None:
    path, meant = checkpoint(tmp_path / "quantised", experts)
    model = load(path, dtype=dtype)
    plain = load(write_checkpoint(tmp_path / "plain", CONFIG, meant), dtype=dtype)
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.dtype == expected[name].dtype, name
        assert torch.equal(parameter, expected[name]), name


def test_an_absent_input_scale_is_no_loss(tmp_path: Path) -> None:
    config, stored, _ = quantised(CONFIG, random_tensors(CONFIG, 1), "nvfp4")
    with_scales = load(write_checkpoint(tmp_path / "a", config, stored))
    without = {name: t for name, t in stored.items() if not name.endswith("input_scale")}
    assert len(without) < len(stored)
    other = dict(load(write_checkpoint(tmp_path / "b", config, without)).named_parameters())
    for name, parameter in with_scales.named_parameters():
        assert torch.equal(parameter, other[name])


def logits(model: M3Model) -> Tensor:
    ids = torch.randint(0, 290, (70,), generator=torch.Generator().manual_seed(3))
    return support.PagedRunner(model).feed(support.Track(), ids.tolist(), 33)


def test_a_kept_model_computes_what_the_decoded_one_does(tmp_path: Path) -> None:
    path, _ = checkpoint(tmp_path / "m", "mxfp8")
    kept, decoded = load(path, keep=True), load(path)
    assert torch.equal(logits(kept), logits(decoded))
    bytes_kept = sum(p.nbytes for name, p in kept.named_parameters() if "layers" in name)
    bytes_decoded = sum(p.nbytes for name, p in decoded.named_parameters() if "layers" in name)
    assert bytes_kept < bytes_decoded
    by_name = dict(kept.named_parameters())
    assert by_name["layers.0.attention.in_proj.weight"].dtype == torch.float8_e4m3fn
    assert by_name["layers.0.attention.in_proj.weight_scale"].dtype == torch.uint8
    # in bf16 the decoded weights are exact, and only the sums differ
    in_bf16 = logits(load(path, keep=True, dtype=torch.bfloat16))
    assert in_bf16.isfinite().all()


@pytest.mark.parametrize(("experts", "keep"), [("mxfp8", 0), ("mxfp8", 1), ("nvfp4", 0)])
def test_the_clamp_reaches_the_logits_of_every_kind_of_checkpoint(
    tmp_path: Path, experts: str, keep: int
) -> None:
    """A path that lost the limit would give the same logits for both."""
    results = []
    for limit in (0.5, 1e9):
        path, _ = checkpoint(tmp_path / f"{limit}", experts, swiglu_limit=limit)
        results.append(logits(load(path, keep=bool(keep))))
    assert (results[0] - results[1]).abs().max() > 0.1


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())
@pytest.mark.parametrize("form", ["plain", "mxfp8 decoded", "mxfp8 kept", "nvfp4 decoded"])
def test_ranks_load_their_own_slices_and_nothing_else(
    tmp_path: Path, world: list[Rank], form: str
) -> None:
    experts, keeps = form.split()[0], form.endswith("kept")
    if form == "plain":
        meant = random_tensors(CONFIG, 1)
        path = write_checkpoint(tmp_path / "m", CONFIG, meant)
    else:
        path, meant = checkpoint(tmp_path / "m", experts)
    config = M3Config.from_dir(path)
    layout = checkpoint_layout(config)
    place = Place(torch.device("cpu"), torch.float32, keeps_mxfp8=keeps)
    read = []
    for rank in world:
        totals: list[int] = []
        loaded = load_rank(
            path,
            config=config,
            rank=rank,
            place=place,
            progress=lambda done, total, totals=totals: totals.append(total),
        )
        read.append(totals[-1])
        for name, item in rank_slices(config, rank).items():
            target = loaded[item.parameter]
            scales = loaded.get(item.parameter + "_scale")
            if scales is not None:
                coded = mxfp8.Mxfp8Weight(target, scales)
                target = mxfp8.decode(coded, torch.float32)
            target = target if item.expert is None else target[item.expert]
            rows = target.narrow(0, item.first_row, item.rows.count)
            source = meant[name].reshape(layout[name].shape[0], -1)
            source = source.narrow(0, item.rows.first, item.rows.count)
            source = source.narrow(1, item.columns.first, item.columns.count)
            assert torch.equal(rows.reshape(source.shape), source), name
            assert (target.dtype == torch.float32) or not item.keeps_fp32
    if len(world) > 1:
        whole = sum(tensor.nbytes for tensor in meant.values())
        assert all(count < whole for count in read) or form != "plain"


def test_only_a_whole_mxfp8_text_model_can_be_kept(tmp_path: Path) -> None:
    path, _ = checkpoint(tmp_path / "a", "nvfp4")
    with pytest.raises(StartupError, match=r"experts\.0\.w1\.weight is in nvfp4; decode them"):
        load(path, keep=True)
    config, stored, meant = quantised(CONFIG, random_tensors(CONFIG, 1))
    config["quantization_config"]["ignored_layers"] = ["layers.0.self_attn"]
    name = "language_model.model.layers.0.self_attn."
    for part in ("q", "k", "v", "o"):
        stored[f"{name}{part}_proj.weight"] = meant[f"{name}{part}_proj.weight"]
        del stored[f"{name}{part}_proj.weight_scale_inv"]
    path = write_checkpoint(tmp_path / "b", config, stored)
    with pytest.raises(StartupError, match=r"k_proj\.weight is in bf16; decode them instead"):
        load(path, keep=True)
    # decoded, such a mixture is nothing special
    plain = load(write_checkpoint(tmp_path / "c", CONFIG, meant))
    assert torch.equal(logits(load(path)), logits(plain))


MEASURE = """
import re, sys
from pathlib import Path
import torch
from m3stack.layers import Place
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.ranks import Rank
from m3stack.models.minimax_m3.weights import load_rank
path, small = sys.argv[1:]
def load(path):
    return load_rank(
        path, config=M3Config.from_dir(path), rank=Rank(0, 2),
        place=Place(torch.device("cpu"), torch.bfloat16), progress=lambda done, total: None,
    )
def resident(kind):
    found = re.search(kind + r":\\s*(\\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024
load(small)
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before = resident("VmRSS")
held = sum(t.nbytes for t in load(path).values())
print(resident("VmHWM") - before - held)
"""


def test_host_memory_beside_the_model_is_bounded_by_the_buffer(tmp_path: Path) -> None:
    config = quantisable_config(1)
    text = config["text_config"]
    layers = text["num_hidden_layers"]
    text |= {"vocab_size": 600_000, "dense_intermediate_size": 1 << 18}
    text["moe_layer_freq"] = [0] + [1] * (layers - 1)
    coded, stored, _ = quantised(config, random_tensors(config, 0))
    largest = max(tensor.nbytes for tensor in stored.values())
    assert largest > 128 << 20, "the buffer must matter"
    elements = [t.numel() for t in stored.values() if t.dtype == torch.float8_e4m3fn]
    assert max(elements) >= 16 << 20, "so must the size of pieces that are decoded"
    path = write_checkpoint(tmp_path / "large", coded, stored)
    del stored
    small, _ = checkpoint(tmp_path / "small", "mxfp8")
    script = [sys.executable, "-c", MEASURE, str(path), str(small)]
    # a fixed threshold keeps the allocator from holding on to freed pieces
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}
    result = subprocess.run(script, check=True, capture_output=True, text=True, env=environment)
    # the buffer, pieces of 1 MiB in e4m3, fp32 (twice) and bf16, and some slack; one tensor read
    # whole would be 77 MB more
    assert int(result.stdout) < (64 + 1 * 11 + 20) << 20
