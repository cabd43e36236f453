"""Verification agrees on right models, notices wrong ones, and says what it lacks."""

from __future__ import annotations

import builtins
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from m3stack.checkpoint_tools.conversion_plan import Target
from m3stack.checkpoint_tools.convert import convert
from m3stack.checkpoint_tools.prompts import Prompt
from m3stack.checkpoint_tools.verify import Comparison, compare
from m3stack.checkpoints import builtin_checkpoint
from m3stack.cli import verify as command
from m3stack.kernels.quantised import mxfp8
from m3stack.kernels.reference_table import reference_kernels

# beyond what the tiny model's block choice can take in at once
LONG = ["--long-tokens", "450"]


@pytest.fixture(scope="module")
def tiny() -> Path:
    return Path(builtin_checkpoint("tiny"))


@pytest.fixture(scope="module")
def tiny_mxfp8(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verify") / "tiny-mxfp8"
    convert(tiny, path, Target.MXFP8, progress=lambda done, total: None)
    return path


def figures(shown: str) -> dict[str, list[float]]:
    """Prompt -> its figures, of a printed table."""
    rows = {}
    for line in shown.splitlines()[1:-1]:
        numbers = line.removesuffix("differs").replace("%", "").split()[-5:]
        rows[line[:14].strip()] = [float(number) for number in numbers]
    return rows


def test_the_tiny_model_agrees(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(tiny), *LONG]) == 0
    shown = capsys.readouterr().out
    assert shown.endswith("m3stack and transformers agree\n")
    rows = figures(shown)
    assert list(rows) == ["English", "code", "Chinese", "450 tokens", "picture"]
    assert rows["450 tokens"][0] == 450
    for _, largest, mean, _, same in rows.values():
        assert largest < 1e-4
        assert 0 < mean <= largest
        assert same == 100.0


@pytest.mark.parametrize("keep", [[], ["--keep-quantised"]])
def test_a_quantised_model_agrees_with_its_decoded_weights(
    tiny_mxfp8: Path, keep: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([str(tiny_mxfp8), "--long-tokens", "20", *keep]) == 0
    assert "decoding for transformers" in capsys.readouterr().err


def test_bf16_agrees_within_what_bf16_does(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(tiny), "--dtype", "bfloat16", *LONG]) == 0
    rows = figures(capsys.readouterr().out)
    # it is no fp32 in disguise
    assert max(row[1] for row in rows.values()) > 0.1


@pytest.fixture(scope="module")
def loud(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with gates and ups so large that the clamp acts; in its own they never are."""
    path = Path(shutil.copytree(tiny, tmp_path_factory.mktemp("loud") / "m"))
    tensors = load_file(path / "model.safetensors")
    for name in tensors:
        if name.endswith((".w1.weight", ".w3.weight")):
            tensors[name] *= 16
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("limit_times", [1, 100])
def test_a_lost_clamp_is_noticed(
    loud: Path,
    limit_times: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = reference_kernels()

    def run_experts(x, gate_up, down, ids, weights, alpha, limit, **more):
        return right.run_experts(x, gate_up, down, ids, weights, alpha, limit * limit_times, **more)

    kernels = replace(right, run_experts=run_experts)
    monkeypatch.setattr(command, "reference_kernels", lambda: kernels)
    lost = limit_times > 1
    assert command.main([str(loud), "--long-tokens", "20"]) == lost
    shown = capsys.readouterr().out
    assert shown.count("  differs") == 5 * lost
    assert shown.endswith("DIFFER\n" if lost else "agree\n")


def test_a_nan_never_agrees() -> None:
    prompt = Prompt("x", torch.arange(2))
    theirs = torch.randn(2, 5)
    ours = theirs.clone()
    assert compare(prompt, ours, theirs).agrees(torch.float32)
    ours[1, 3] = float("nan")
    assert not compare(prompt, ours, theirs).agrees(torch.bfloat16)
    assert not Comparison("x", 2, 1.0, 0.5, 1.0, 1.0).agrees(torch.float32)


def test_a_checkpoint_without_tokenizer_or_with_a_foreign_one_is_refused(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(tiny, tmp_path / "m"))
    config = json.loads((path / "config.json").read_text())
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    size = config["text_config"]["vocab_size"]
    vocabulary = tokenizer["model"]["vocab"]
    shifted = {piece: index + size for piece, index in vocabulary.items()}
    tokenizer["model"]["vocab"] = shifted
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert command.main([str(path)]) == 2
    assert "tokenizer.json does not fit the model" in capsys.readouterr().err
    (path / "tokenizer.json").unlink()
    assert command.main([str(path)]) == 2
    assert "tokenizer.json does not exist; prompts cannot be made" in capsys.readouterr().err
    assert command.main([str(tmp_path / "none" / "such")]) == 2
    assert "is neither a directory nor a hub id" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main([str(tiny), "--long-tokens", "0"])


def test_without_transformers_it_says_what_to_install(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import = builtins.__import__

    def no_transformers(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "transformers":
            raise ModuleNotFoundError(f"No module named {name!r}", name="transformers")
        return real_import(name, *rest)

    monkeypatch.delitem(sys.modules, "m3stack.checkpoint_tools.verify")
    monkeypatch.setattr(builtins, "__import__", no_transformers)
    assert command.main([str(tiny)]) == 2
    assert "pip install 'transformers>=5.24'" in capsys.readouterr().err


def test_transformers_decodes_mxfp8_to_the_same_values() -> None:
    """Its reader of such checkpoints, called on its own: loading one through it takes a GPU."""
    torch.manual_seed(0)
    coded = mxfp8.encode(torch.randn(48, 128) * torch.logspace(-6, 3, 48)[:, None])
    settings = SimpleNamespace(weight_block_size=(1, 32), scale_fmt="float", dequantize=True)
    reader = Fp8Dequantize(SimpleNamespace(quantization_config=settings))
    theirs = reader._dequantize_one(coded.elements, coded.scales)
    assert torch.equal(theirs.float(), mxfp8.decode(coded, theirs.dtype).float())
