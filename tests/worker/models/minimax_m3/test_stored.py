"""The tensors of every kind of repository, to the last name, dtype and shape."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest

from m3stack.errors import StartupError
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.stored import Part, stored_tensors
from m3stack.models.minimax_m3.weights import open_checkpoint
from m3stack.weight_files.header import header_bytes, num_bytes
from tests.worker.models.minimax_m3.random_checkpoint import random_config
from tests.worker.models.minimax_m3.released import (
    LAYERS,
    MXFP8_GIB,
    NUM_MXFP8_TENSORS,
    NUM_MXFP8_VALUES,
    NUM_TENSORS,
    Listing,
    bf16_listing,
    mxfp8_listing,
    released_config,
    released_mxfp8_config,
)

REPOSITORIES = {
    "bf16": (released_config, bf16_listing, NUM_TENSORS),
    "mxfp8": (released_mxfp8_config, mxfp8_listing, NUM_MXFP8_TENSORS),
}
NAMES = sorted(REPOSITORIES)


def mixed_config(config: dict[str, Any]) -> dict[str, Any]:
    """The same model with MXFP8 linears and NVFP4 routed experts, as ModelOpt would write it."""
    plain = M3Config.from_object({k: v for k, v in config.items() if k != "quantization_config"})
    layers: dict[str, dict[str, Any]] = {}
    for item in stored_tensors(plain).values():
        module = item.weight.removesuffix(".weight")
        if ".experts." in module:
            layers[module] = {"quant_algo": "NVFP4", "group_size": 16}
        elif module.startswith("language_model.model.layers.") and module.endswith("_proj"):
            layers[module] = {"quant_algo": "MXFP8"}
    return config | {
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": None,
            "exclude_modules": ["lm_head"],
            "quantized_layers": layers,
        }
    }


def write_sparse_shards(directory: Path, listing: Listing, num_shards: int) -> None:
    """Files with true headers and holes for data: full length, next to no space on disk."""
    names = sorted(listing)
    width = -(-len(names) // num_shards)
    weight_map = {}
    for shard in range(num_shards):
        own = {name: listing[name] for name in names[shard * width : (shard + 1) * width]}
        file = directory / f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        head = header_bytes(own)
        file.write_bytes(head)
        os.truncate(file, len(head) + sum(num_bytes(*entry) for entry in own.values()))
        weight_map |= dict.fromkeys(own, file.name)
    lines = ",\n".join(f'"{name}": "{file}"' for name, file in weight_map.items())
    (directory / "model.safetensors.index.json").write_text(
        f'{{"metadata": {{"total_size": 1}}, "weight_map": {{{lines}}}}}'
    )


def first_four_layers(listing: Listing) -> Listing:
    later = tuple(f"{LAYERS}{layer}." for layer in range(4, 60))
    return {name: entry for name, entry in listing.items() if not name.startswith(later)}


@pytest.mark.parametrize("name", NAMES)
def test_the_released_tensors_are_exactly_the_published_ones(name: str) -> None:
    config, listing, count = REPOSITORIES[name]
    stored = stored_tensors(M3Config.from_object(config()))
    assert len(stored) == count
    assert {key: (item.dtypes[0], item.shape) for key, item in stored.items()} == listing()


def test_the_mxfp8_repository_has_the_published_size() -> None:
    stored = stored_tensors(M3Config.from_object(released_mxfp8_config()))
    assert sum(item.numel for item in stored.values()) == NUM_MXFP8_VALUES
    size = sum(num_bytes(item.dtypes[0], item.shape) for item in stored.values())
    assert round(size / 2**30, 2) == MXFP8_GIB
    scales = [item for item in stored.values() if item.part is Part.SCALES]
    assert len(scales) == 22_422


@pytest.mark.parametrize("name", NAMES)
def test_full_size_headers_are_accepted(name: str, tmp_path: Path) -> None:
    config, listing, count = REPOSITORIES[name]
    write_sparse_shards(tmp_path, listing(), 31)
    apparent = sum(file.stat().st_size for file in tmp_path.iterdir())
    on_disk = sum(file.stat().st_blocks * 512 for file in tmp_path.iterdir())
    assert apparent > 400 * 2**30
    assert on_disk < 40 * 2**20
    checkpoint = open_checkpoint(tmp_path, M3Config.from_object(config()))
    assert sum(len(entries) for entries in checkpoint.shards.values()) == count


@pytest.mark.parametrize(
    ("tensor", "change", "message"),
    [
        ("self_attn.q_proj.weight", ("BF16", (8192, 6144)), "dtype BF16, expected one of F8_E4M3"),
        ("self_attn.q_proj.weight_scale_inv", ("F32", (8192, 192)), "dtype F32, expected .* U8"),
        ("self_attn.q_proj.weight_scale_inv", ("U8", (64, 48)), r"shape \[64, 48\], config"),
        ("self_attn.q_proj.weight_scale_inv", None, "lacks .*q_proj.weight_scale_inv, which"),
        ("block_sparse_moe.gate.weight", ("F8_E4M3", (128, 6144)), "expected one of F32"),
        ("block_sparse_moe.gate.weight_scale_inv", ("U8", (128, 192)), "gate.weight_scale_inv, w"),
    ],
)
def test_a_header_with_one_fault_is_refused_by_name(
    tmp_path: Path, tensor: str, change: tuple[str, tuple[int, ...]] | None, message: str
) -> None:
    listing, name = first_four_layers(mxfp8_listing()), f"{LAYERS}3.{tensor}"
    listing.pop(name, None)
    if change is not None:
        listing[name] = change
    write_sparse_shards(tmp_path, listing, 2)
    config = released_mxfp8_config()
    text = config["text_config"]
    text |= {"num_hidden_layers": 4, "moe_layer_freq": [0, 0, 0, 1]}
    text["sparse_attention_config"] |= {
        "sparse_attention_freq": [0, 0, 0, 1],
        "sparse_disable_index_value": [0, 0, 0, 1],
    }
    with pytest.raises(StartupError, match=message):
        open_checkpoint(tmp_path, M3Config.from_object(config))


def test_nvfp4_experts_have_four_tensors_each_and_the_rest_stays_mxfp8() -> None:
    stored = stored_tensors(M3Config.from_object(mixed_config(released_config())))
    assert len(stored) == NUM_TENSORS + 3 * 21_888 + (22_422 - 21_888)
    expert = f"{LAYERS}9.block_sparse_moe.experts.77.w2"
    parts = {
        name.removeprefix(expert): (item.part, item.dtypes[0], item.shape, item.is_optional)
        for name, item in stored.items()
        if name.startswith(expert)
    }
    assert parts == {
        ".weight": (Part.ELEMENTS, "U8", (6144, 1536), False),
        ".weight_scale": (Part.SCALES, "F8_E4M3", (6144, 192), False),
        ".weight_scale_2": (Part.GLOBAL_SCALE, "F32", (), False),
        ".input_scale": (Part.INPUT_SCALE, "F32", (), True),
    }
    assert stored[f"{LAYERS}9.self_attn.o_proj.weight_scale_inv"].shape == (6144, 256)
    # what engines call it: about 250 GB
    size = sum(num_bytes(item.dtypes[0], item.shape) for item in stored.values())
    assert 248e9 < size < 252e9


def test_widths_without_whole_groups_and_unknown_modules_are_named() -> None:
    config = random_config(4)
    config["quantization_config"] = {"quant_method": "mxfp8", "weight_block_size": [1, 32]}
    config["text_config"]["hidden_size"] = config["vision_config"]["projection_dim"] = 48
    with pytest.raises(StartupError, match=r"48 columns are no multiple of 32, the mxfp8 group"):
        stored_tensors(M3Config.from_object(config))
    mixed = copy.deepcopy(mixed_config(released_config()))
    layers = mixed["quantization_config"]["quantized_layers"]
    layers["language_model.lm_head"] = {"quant_algo": "MXFP8"}
    with pytest.raises(StartupError, match=r"names language_model\.lm_head, which is no linear"):
        stored_tensors(M3Config.from_object(mixed))
