"""Loading uses every tensor exactly once, or says by name what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from m3stack.errors import StartupError
from m3stack.kernels.reference_table import reference_kernels
from m3stack.layers import Place
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.layout import checkpoint_layout
from m3stack.models.minimax_m3.model import M3Model
from m3stack.models.minimax_m3.weights import load_model
from tests.worker.models.minimax_m3.random_checkpoint import (
    random_config,
    random_tensors,
    write_checkpoint,
)
from tests.worker.models.minimax_m3.released import (
    NUM_PARAMETERS,
    NUM_TENSORS,
    released_config,
)

CONFIG = random_config(4)
HEAD = "language_model.lm_head.weight"
EMBEDDING = "language_model.model.embed_tokens.weight"


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return random_tensors(CONFIG, 4)


def load(
    path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    progress=lambda a, b: None,
    keep_quantised: bool = False,
) -> M3Model:
    return load_model(
        path,
        config=M3Config.from_dir(path),
        kernels=reference_kernels(),
        device=torch.device("cpu"),
        dtype=dtype,
        progress=progress,
        keep_quantised=keep_quantised,
    )


def write_shards(path: Path, shards: list[dict[str, Tensor]]) -> None:
    """Replaces model.safetensors by shards and their index."""
    (path / "model.safetensors").unlink(missing_ok=True)
    weight_map = {}
    for number, shard in enumerate(shards):
        name = f"model-{number:05}.safetensors"
        save_file(shard, path / name)
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def split(tensors: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    names = sorted(tensors)
    return [{name: tensors[name] for name in names[start::count]} for start in range(count)]


def test_the_released_layout_has_the_published_size() -> None:
    config = M3Config.from_object(released_config())
    layout = checkpoint_layout(config)
    assert len(layout) == NUM_TENSORS
    router_biases = 57 * 128
    assert sum(item.numel for item in layout.values()) == NUM_PARAMETERS + router_biases
    model = M3Model(
        config,
        kernels=reference_kernels(),
        place=Place(torch.device("meta"), torch.bfloat16),
    )
    parameters = dict(model.named_parameters())
    assert sum(item.numel() for item in parameters.values()) == NUM_PARAMETERS + router_biases
    assert {item.parameter for item in layout.values()} == set(parameters)


@pytest.mark.parametrize("seed", range(4))
def test_placements_fill_every_parameter_once(seed: int) -> None:
    config = M3Config.from_object(random_config(seed))
    place = Place(torch.device("cpu"), torch.bfloat16)
    model = M3Model(config, kernels=reference_kernels(), place=place)
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.zero_()
    for item in checkpoint_layout(config).values():
        target = parameters[item.parameter]
        target = target if item.expert is None else target[item.expert]
        target.narrow(0, item.first_row, item.shape[0]).add_(1)
        assert item.keeps_fp32 == (parameters[item.parameter].dtype == torch.float32)
    assert all(bool((parameter == 1).all()) for parameter in parameters.values())


def test_one_file_and_shards_give_the_same_model(
    tmp_path: Path, tensors: dict[str, Tensor]
) -> None:
    single = load(write_checkpoint(tmp_path / "single", CONFIG, tensors))
    write_shards(write_checkpoint(tmp_path / "sharded", CONFIG, tensors), split(tensors, 3))
    sharded = load(tmp_path / "sharded")
    others = dict(sharded.named_parameters())
    for name, parameter in single.named_parameters():
        assert torch.equal(parameter, others[name])
    assert torch.equal(single.embedding, tensors[EMBEDDING])


def test_half_precision_spares_router_and_patch_embedding(
    tmp_path: Path, tensors: dict[str, Tensor]
) -> None:
    path = write_checkpoint(tmp_path / "m", CONFIG, tensors)
    model = load(path, dtype=torch.bfloat16)
    in_fp32 = {name for name, value in model.named_parameters() if value.dtype == torch.float32}
    assert {name.rsplit(".", 1)[1] for name in in_fp32} == {
        "router",
        "router_bias",
        "patch_embedding",
    }
    exact = tensors["vision_tower.vision_model.embeddings.patch_embedding.weight"]
    assert torch.equal(model.vision.patch_embedding, exact.flatten(1))
    assert torch.equal(model.embedding, tensors[EMBEDDING].bfloat16())


def test_progress_counts_every_byte_in_order(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    path = write_checkpoint(tmp_path / "m", CONFIG, tensors)
    seen: list[tuple[int, int]] = []
    load(path, progress=lambda done, total: seen.append((done, total)))
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert len(seen) >= len(tensors) + 1
    assert seen == sorted(seen)


def test_a_missing_and_an_unknown_tensor_are_named(
    tmp_path: Path, tensors: dict[str, Tensor]
) -> None:
    path = write_checkpoint(tmp_path / "m", CONFIG, tensors)
    save_file({k: v for k, v in tensors.items() if k != HEAD}, path / "model.safetensors")
    with pytest.raises(StartupError, match=rf"lacks {HEAD}, which config\.json calls for"):
        load(path)
    extra = {f"language_model.mtp.layers.{i}.enorm.weight": torch.ones(2) for i in range(9)}
    save_file(tensors | extra, path / "model.safetensors")
    with pytest.raises(StartupError, match=r"holds .*mtp\.layers\.0.* and 4 more, .*no place"):
        load(path)


def test_a_tensor_of_another_shape_or_dtype_is_named(
    tmp_path: Path, tensors: dict[str, Tensor]
) -> None:
    path = write_checkpoint(tmp_path / "m", CONFIG, tensors)
    save_file(tensors | {HEAD: torch.ones(300, 2)}, path / "model.safetensors")
    with pytest.raises(StartupError, match=rf"{HEAD} has shape \[300, 2\], config\.json calls for"):
        load(path)
    # fp8 bytes must not be read as if they were plain weights
    wrong = tensors[HEAD].to(torch.float8_e4m3fn)
    save_file(tensors | {HEAD: wrong}, path / "model.safetensors")
    with pytest.raises(StartupError, match=rf"{HEAD} has dtype F8_E4M3, expected one of BF16, F16"):
        load(path)


def test_doubled_and_misplaced_tensors_are_named(
    tmp_path: Path, tensors: dict[str, Tensor]
) -> None:
    path = write_checkpoint(tmp_path / "m", CONFIG, tensors)
    shards = split(tensors, 2)
    # the index maps the head to one shard, and the other holds it as well
    holder = 0 if HEAD in shards[0] else 1
    write_shards(path, shards)
    other = f"model-{1 - holder:05}.safetensors"
    save_file(shards[1 - holder] | {HEAD: tensors[HEAD]}, path / other)
    with pytest.raises(StartupError, match=rf"{other} holds {HEAD}, against what .*index\.json"):
        load(path)
    index = path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(f'"{HEAD}":', f'"{HEAD}": "x", "{HEAD}":'))
    with pytest.raises(StartupError, match=f"key '{HEAD}' stands twice"):
        load(path)


def test_a_shard_without_a_mapped_tensor_is_named(
    tmp_path: Path, tensors: dict[str, Tensor]
) -> None:
    path = write_checkpoint(tmp_path / "m", CONFIG, tensors)
    shards = split(tensors, 2)
    write_shards(path, shards)
    holder = 0 if HEAD in shards[0] else 1
    save_file(
        {name: value for name, value in shards[holder].items() if name != HEAD},
        path / f"model-{holder:05}.safetensors",
    )
    with pytest.raises(StartupError, match=rf"model-{holder:05}\.safetensors lacks {HEAD}"):
        load(path)


def test_files_that_are_absent_ambiguous_or_broken_are_named(
    tmp_path: Path, tensors: dict[str, Tensor]
) -> None:
    path = write_checkpoint(tmp_path / "m", CONFIG, tensors)
    weights = path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StartupError, match="is not a readable safetensors file"):
        load(path)
    weights.unlink()
    with pytest.raises(StartupError, match=r"holds neither model\.safetensors nor"):
        load(path)
    write_shards(path, split(tensors, 2))
    weights.write_bytes(whole)
    with pytest.raises(StartupError, match="holds both"):
        load(path)
    weights.unlink()
    (path / "model-00001.safetensors").unlink()
    with pytest.raises(StartupError, match=r"model-00001\.safetensors does not exist"):
        load(path)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {HEAD: "../elsewhere.safetensors"}}))
    with pytest.raises(StartupError, match="no plain file name"):
        load(path)
