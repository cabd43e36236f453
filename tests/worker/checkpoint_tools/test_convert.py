"""Conversion writes the released layout, loses what the format costs, and survives interruption."""

from __future__ import annotations

import fcntl
import json
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from m3stack.checkpoint_tools import convert as convert_module
from m3stack.checkpoint_tools.conversion_plan import Target, plan_conversion
from m3stack.checkpoint_tools.convert import Settings, convert
from m3stack.cli import convert as command
from m3stack.errors import StartupError
from m3stack.kernels.interface import Mxfp8Weight
from m3stack.kernels.quantised import mxfp8
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.layout import checkpoint_layout
from m3stack.models.minimax_m3.stored import stored_tensors
from tests.worker import support
from tests.worker.models.minimax_m3.random_checkpoint import (
    quantisable_config,
    quantised,
    random_tensors,
    write_checkpoint,
)
from tests.worker.models.minimax_m3.released import (
    bf16_listing,
    mxfp8_listing,
    released_config,
    released_mxfp8_config,
)
from tests.worker.models.minimax_m3.test_stored import write_sparse_shards

CONFIG = quantisable_config(3) | {"torch_dtype": "bfloat16"}
LAYOUT = checkpoint_layout(M3Config.from_object(CONFIG))
SMALL_SHARDS = Settings(shard_bytes=100_000)


def nothing(done: int, total: int) -> None:
    pass


def plain_tensors(seed: int = 3) -> dict[str, Tensor]:
    """A checkpoint stored as the released one: bf16, but for router and patch embedding."""
    return {
        name: tensor if LAYOUT[name].keeps_fp32 else tensor.bfloat16()
        for name, tensor in random_tensors(CONFIG, seed).items()
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_checkpoint(tmp_path_factory.mktemp("convert") / "m3", CONFIG, plain_tensors())
    (path / "tokenizer.json").write_text('{"of": "the source"}')
    (path / "chat_template.jinja").write_text("é")
    (path / ".hidden").write_text("x")
    return path


def tensors_of(path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def same_bytes(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    def raw(tensor: Tensor) -> Tensor:
        return tensor.reshape(-1).view(torch.uint8)

    return set(a) == set(b) and all(
        a[name].dtype == b[name].dtype
        and a[name].shape == b[name].shape
        and torch.equal(raw(a[name]), raw(b[name]))
        for name in a
    )


def test_bf16_becomes_the_released_mxfp8_layout(source: Path, tmp_path: Path) -> None:
    result = convert(source, tmp_path / "q", Target.MXFP8, settings=SMALL_SHARDS, progress=nothing)
    config = M3Config.from_dir(tmp_path / "q")
    stored, written = stored_tensors(config), tensors_of(tmp_path / "q")
    assert set(written) == set(stored)
    assert result.num_tensors == len(stored)
    for name, tensor in plain_tensors().items():
        if LAYOUT[name].is_quantisable:
            coded = mxfp8.encode(tensor)
            assert written[name].dtype == torch.float8_e4m3fn
            assert torch.equal(written[name].view(torch.uint8), coded.elements.view(torch.uint8))
            assert torch.equal(written[name + "_scale_inv"], coded.scales)
        else:
            assert same_bytes({name: tensor}, {name: written[name]})
    # shards, index and config as released
    index = json.loads((tmp_path / "q" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == result.num_bytes
    assert set(index["weight_map"]) == set(stored)
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    data = json.loads((tmp_path / "q" / "config.json").read_text())
    quantization = data.pop("quantization_config")
    assert data == CONFIG
    assert quantization["quant_method"] == "mxfp8"
    assert quantization["weight_block_size"] == [1, 32]
    gates = [name for name in quantization["ignored_layers"] if name.endswith(".gate")]
    assert len(gates) == sum(config.moe_layers)
    # everything else came along, and nothing of the work is left
    names = {file.name for file in (tmp_path / "q").iterdir()}
    extra = {"config.json", "model.safetensors.index.json", "tokenizer.json", "chat_template.jinja"}
    assert names == {*files, *extra}
    assert (tmp_path / "q" / "chat_template.jinja").read_text() == "é"
    assert list(tmp_path.iterdir()) == [tmp_path / "q"]


def test_a_converted_model_computes_with_its_rounded_weights(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "q", Target.MXFP8, progress=nothing)
    assert (tmp_path / "q" / "model.safetensors").exists()
    rounded = {
        name: mxfp8.round_trip(tensor) if LAYOUT[name].is_quantisable else tensor
        for name, tensor in plain_tensors().items()
    }
    ids = list(range(60))
    results = []
    for path in (tmp_path / "q", write_checkpoint(tmp_path / "r", CONFIG, rounded)):
        results.append(support.PagedRunner(support.load(path)).feed(support.Track(), ids))
    assert torch.equal(*results)


def test_there_and_back_costs_what_the_format_costs(source: Path, tmp_path: Path) -> None:
    there = convert(source, tmp_path / "q", Target.MXFP8, progress=nothing)
    convert(tmp_path / "q", tmp_path / "b", Target.BF16, settings=SMALL_SHARDS, progress=nothing)
    back, coded = tensors_of(tmp_path / "b"), tensors_of(tmp_path / "q")
    squares = errors = 0.0
    for name, tensor in plain_tensors().items():
        assert back[name].dtype == tensor.dtype
        if not LAYOUT[name].is_quantisable:
            assert same_bytes({name: tensor}, {name: back[name]})
            continue
        # half a unit of a 4-bit significand, or of the subnormal step of the group's scale
        exact, error = tensor.double(), (back[name].double() - tensor.double()).abs()
        step = mxfp8.scale_values(coded[name + "_scale_inv"]).double().repeat_interleave(32, -1)
        assert (error <= torch.maximum(exact.abs() / 17, step * 2**-10)).all()
        squares, errors = squares + exact.square().sum(), errors + error.square().sum()
    assert there.losses.relative == pytest.approx((errors / squares).sqrt().item(), rel=1e-6)
    assert 0.02 < there.losses.relative < 0.03
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == CONFIG


def test_mxfp8_to_bf16_and_back_changes_no_byte(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "q", Target.MXFP8, settings=SMALL_SHARDS, progress=nothing)
    convert(tmp_path / "q", tmp_path / "b", Target.BF16, progress=nothing)
    convert(tmp_path / "b", tmp_path / "q2", Target.MXFP8, settings=SMALL_SHARDS, progress=nothing)
    assert same_bytes(tensors_of(tmp_path / "q"), tensors_of(tmp_path / "q2"))
    for name in ("config.json", "model.safetensors.index.json"):
        assert (tmp_path / "q" / name).read_text() == (tmp_path / "q2" / name).read_text()


def test_scales_of_another_encoder_change_and_their_values_do_not(tmp_path: Path) -> None:
    config, stored, _ = quantised(CONFIG, random_tensors(CONFIG, 5))
    for name in [name for name in stored if name.endswith("_scale_inv")]:
        # twice the scale: half of what the elements can say is left unused
        stored[name] += 1
        elements = stored[name.removesuffix("_scale_inv")]
        halved = (elements.float() / 2).to(torch.float8_e4m3fn)
        stored[name.removesuffix("_scale_inv")] = halved
    path = write_checkpoint(tmp_path / "q", config, stored)
    convert(path, tmp_path / "b", Target.BF16, progress=nothing)
    convert(tmp_path / "b", tmp_path / "q2", Target.MXFP8, progress=nothing)
    again = tensors_of(tmp_path / "q2")
    assert not same_bytes(stored, again)
    for name in stored:
        if name + "_scale_inv" in stored:
            before, after = (
                mxfp8.decode(Mxfp8Weight(t[name], t[name + "_scale_inv"]), torch.float32)
                for t in (stored, again)
            )
            assert torch.equal(before, after)


def test_nvfp4_experts_become_bf16(tmp_path: Path) -> None:
    config, stored, meant = quantised(CONFIG, random_tensors(CONFIG, 6), "nvfp4")
    path = write_checkpoint(tmp_path / "n", config, stored)
    (path / "hf_quant_config.json").write_text("{}")
    convert(path, tmp_path / "b", Target.BF16, progress=nothing)
    written = tensors_of(tmp_path / "b")
    for name, tensor in meant.items():
        assert torch.equal(written[name].float(), tensor.bfloat16().float()) or (
            not LAYOUT[name].is_quantisable and torch.equal(written[name], tensor)
        )
    assert not (tmp_path / "b" / "hf_quant_config.json").exists()


@pytest.mark.parametrize(
    ("target", "config", "before", "after"),
    [
        (Target.MXFP8, released_config, bf16_listing, mxfp8_listing),
        (Target.BF16, released_mxfp8_config, mxfp8_listing, bf16_listing),
    ],
)
def test_the_released_repositories_become_each_other(
    target: Target, config: Any, before: Any, after: Any, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config()))
    write_sparse_shards(tmp_path, before(), 31)
    plan = plan_conversion(tmp_path, target)
    items = [item for items in plan.shards.values() for item in items]
    assert {name: entry for item in items for name, entry in item.outputs.items()} == after()
    if target is Target.MXFP8:
        released = released_mxfp8_config()["quantization_config"]
        assert plan.config["quantization_config"] == released
        assert len(plan.shards) == 31
    else:
        assert "quantization_config" not in plan.config
    largest = max(sum(item.num_bytes for item in items) for items in plan.shards.values())
    assert largest <= 14_500_000_000


class StopError(Exception):
    """An interruption at a chosen point."""


def stop_after(share: float) -> Any:
    def progress(done: int, total: int) -> None:
        if done > share * total:
            raise StopError

    return progress


@pytest.mark.parametrize("share", [0.0, 0.4, 0.99])
def test_an_interrupted_conversion_goes_on_where_it_stood(
    source: Path, tmp_path: Path, share: float
) -> None:
    convert(source, tmp_path / "q", Target.MXFP8, settings=SMALL_SHARDS, progress=nothing)
    with pytest.raises(StopError):
        convert(
            source,
            tmp_path / "again",
            Target.MXFP8,
            settings=SMALL_SHARDS,
            progress=stop_after(share),
        )
    partial = tmp_path / "again.partial"
    assert not (tmp_path / "again").exists()
    finished = {file: file.stat().st_ino for file in partial.glob("*.safetensors")}
    unfinished = list(partial.glob("*.safetensors.tmp"))
    assert len(unfinished) == 1
    seen: list[tuple[int, int]] = []
    result = convert(
        source,
        tmp_path / "again",
        Target.MXFP8,
        settings=SMALL_SHARDS,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert result.shards_kept == len(finished)
    assert (seen[0][0] > 0) == bool(finished)
    assert seen[-1] == (result.num_bytes, result.num_bytes)
    for file, inode in finished.items():
        assert (tmp_path / "again" / file.name).stat().st_ino == inode
    assert not partial.exists()
    assert same_bytes(tensors_of(tmp_path / "q"), tensors_of(tmp_path / "again"))
    names = [{file.name for file in (tmp_path / name).iterdir()} for name in ("q", "again")]
    assert names[0] == names[1]


def interrupt(source: Path, destination: Path) -> None:
    with pytest.raises(StopError):
        convert(source, destination, Target.MXFP8, settings=SMALL_SHARDS, progress=stop_after(0.5))


def test_what_another_conversion_left_is_not_built_upon(source: Path, tmp_path: Path) -> None:
    interrupt(source, tmp_path / "q")
    with pytest.raises(StartupError, match=r"q\.partial is left .* differs in shard_bytes;"):
        convert(source, tmp_path / "q", Target.MXFP8, progress=nothing)
    other = shutil.copytree(source, tmp_path / "other")
    tensors = plain_tensors(seed=9)
    write_checkpoint(other, CONFIG, tensors)
    with pytest.raises(StartupError, match=r"differs in files, source;"):
        convert(other, tmp_path / "q", Target.MXFP8, settings=SMALL_SHARDS, progress=nothing)
    (tmp_path / "q.partial" / "conversion.json").unlink()
    with pytest.raises(StartupError, match="weights of unknown origin; remove it"):
        convert(source, tmp_path / "q", Target.MXFP8, settings=SMALL_SHARDS, progress=nothing)


def test_two_conversions_do_not_write_to_one_place(source: Path, tmp_path: Path) -> None:
    partial = tmp_path / "q.partial"
    partial.mkdir()
    with (partial / "conversion.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StartupError, match="another conversion is writing to"):
            convert(source, tmp_path / "q", Target.MXFP8, progress=nothing)
    convert(source, tmp_path / "q", Target.MXFP8, progress=nothing)


def test_a_disk_that_is_too_small_is_known_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    small = usage._replace(free=1000)
    monkeypatch.setattr(convert_module.shutil, "disk_usage", lambda path: small)
    with pytest.raises(StartupError, match=r"0\.00 GB are to be written .* only 0\.00 GB are free"):
        convert(source, tmp_path / "q", Target.MXFP8, progress=nothing)
    assert not list((tmp_path / "q.partial").glob("*.safetensors*"))


@pytest.fixture
def _small_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("_small_files")
def test_a_disk_that_fails_is_named_and_the_work_is_kept(source: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"\.safetensors\.tmp cannot be written: File too large"):
        convert(source, tmp_path / "q", Target.MXFP8, settings=SMALL_SHARDS, progress=nothing)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    convert(source, tmp_path / "q", Target.MXFP8, settings=SMALL_SHARDS, progress=nothing)


def refusal(path: Path, destination: Path, target: Target) -> str:
    with pytest.raises(StartupError) as caught:
        convert(path, destination, target, progress=nothing)
    shutil.rmtree(destination.with_name(destination.name + ".partial"), ignore_errors=True)
    return str(caught.value)


def test_what_cannot_be_converted_is_refused_by_name(source: Path, tmp_path: Path) -> None:
    assert "is not quantised" in refusal(source, tmp_path / "x", Target.BF16)
    config, stored, _ = quantised(CONFIG, random_tensors(CONFIG, 6))
    path = write_checkpoint(tmp_path / "q", config, stored)
    assert "is in MXFP8 already" in refusal(path, tmp_path / "x", Target.MXFP8)
    assert "exists; name another" in refusal(source, tmp_path / "q", Target.MXFP8)
    mixed, parts, _ = quantised(CONFIG, random_tensors(CONFIG, 6), "nvfp4")
    path = write_checkpoint(tmp_path / "n", mixed, parts)
    assert "has NVFP4 experts" in refusal(path, tmp_path / "x", Target.MXFP8)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_damaged_weight_is_refused_by_name(tmp_path: Path, bad: float) -> None:
    tensors = plain_tensors()
    name = next(name for name in tensors if name.endswith("o_proj.weight"))
    tensors[name][3, 5] = bad
    path = write_checkpoint(tmp_path / "m", CONFIG, tensors)
    assert f"tensor {name} holds a NaN or an inf" in refusal(path, tmp_path / "x", Target.MXFP8)
    config, stored, _ = quantised(CONFIG, random_tensors(CONFIG, 6))
    stored[name + "_scale_inv"][2, 1] = 255
    path = write_checkpoint(tmp_path / "q", config, stored)
    assert f"tensor {name} holds a NaN" in refusal(path, tmp_path / "x", Target.BF16)
    # 2^-9 * 2^-127, below the least that bf16 has
    stored[name + "_scale_inv"][2, 1] = 0
    stored[name].view(torch.uint8)[2, 32] = 1
    path = write_checkpoint(tmp_path / "q2", config, stored)
    assert f"tensor {name} has scales so small" in refusal(path, tmp_path / "x", Target.BF16)


def test_the_command_converts_and_says_what_it_cost(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(source), str(tmp_path / "q"), "--to", "mxfp8", "--shard-gb", "0.0001"]
    assert command.main(arguments) == 0
    shown = capsys.readouterr()
    assert f"{tmp_path / 'q'}: " in shown.out
    assert "rounding to MXFP8 moved the weights by 2." in shown.out
    assert "converting to mxfp8: " in shown.err
    assert "(100%)" in shown.err
    assert command.main(arguments) == 1
    assert "m3stack convert: " in capsys.readouterr().err
    arguments = [str(source), str(tmp_path / "x"), "--to", "mxfp8", "--device", "cuda:9"]
    if not torch.cuda.is_available():
        assert command.main(arguments) == 1
        assert "torch sees no CUDA GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main([str(source), str(tmp_path / "x"), "--to", "mxfp8", "--shard-gb", "0"])
