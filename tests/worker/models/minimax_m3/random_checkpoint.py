"""Random checkpoints in the released layout, of random small shapes."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from m3stack.kernels.quantised import mxfp8, nvfp4
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.layout import checkpoint_layout
from m3stack.models.minimax_m3.tiny import config_object


def random_config(seed: int) -> dict[str, Any]:
    """A config.json with every size drawn anew; blocks are small so that selection acts early."""
    draw = random.Random(seed)
    config = config_object()
    text, vision = config["text_config"], config["vision_config"]
    sparse = text["sparse_attention_config"]
    groups = draw.choice([1, 2, 3, 4])
    head_dim = draw.choice([16, 24, 32])
    num_layers = draw.choice([2, 3, 4])
    is_sparse = [0] + [draw.choice([0, 1]) for _ in range(num_layers - 2)] + [1]
    is_moe = [draw.choice([0, 1]) for _ in range(num_layers - 1)] + [1]
    num_experts = draw.choice([4, 6, 9])
    text |= {
        "hidden_size": draw.choice([32, 48, 80]),
        "num_hidden_layers": num_layers,
        "num_key_value_heads": groups,
        "num_attention_heads": groups * draw.choice([1, 2, 3]),
        "head_dim": head_dim,
        "rotary_dim": head_dim // 2,
        "vocab_size": 300,
        "bos_token_id": 290,
        "eos_token_id": 291,
        "intermediate_size": draw.choice([16, 40]),
        "dense_intermediate_size": draw.choice([32, 56]),
        "shared_intermediate_size": draw.choice([16, 24]),
        "num_local_experts": num_experts,
        "num_experts_per_tok": draw.randint(1, 4),
        "moe_layer_freq": is_moe,
        "routed_scaling_factor": draw.choice([1.0, 2.0, 2.5]),
        "rope_theta": draw.choice([10000, 5000000]),
    }
    if seed % 3 == 1:
        text["rope_scaling"] = {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    if seed % 3 == 2:
        rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
        text["rope_parameters"] = rope | {"rope_theta": text.pop("rope_theta")}
    chosen = draw.randint(2, 5)
    sparse |= {
        "sparse_index_dim": head_dim,
        "sparse_num_index_heads": groups,
        "sparse_topk_blocks": chosen,
        "sparse_block_size": draw.choice([8, 16, 32]),
        "sparse_local_block": draw.randint(1, min(chosen, 2)),
        "sparse_attention_freq": is_sparse,
        "sparse_disable_index_value": is_sparse,
    }
    heads = draw.choice([2, 3])
    vision |= {
        "num_attention_heads": heads,
        "hidden_size": heads * draw.choice([16, 20, 26]),
        "num_hidden_layers": draw.choice([1, 2]),
        "intermediate_size": draw.choice([40, 64]),
        "projection_dim": text["hidden_size"],
        "vision_segment_max_frames": draw.choice([2, 4]),
    }
    return config | {
        "image_token_index": 298,
        "video_token_index": 299,
        "projector_hidden_size": draw.choice([24, 56]),
        "torch_dtype": "float32",
    }


def random_tensors(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Every tensor of a checkpoint with that config, fp32, large enough to tell mistakes apart."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, placement in checkpoint_layout(M3Config.from_object(config)).items():
        values = torch.randn(placement.shape, generator=generator)
        fan_in = math.prod(placement.shape[1:])
        if len(placement.shape) == 1:
            values *= 0.3
            if "layer_norm" in name or "layrnorm" in name:
                values += 1.0 if name.endswith("weight") else 0.0
        elif "embed_tokens" not in name:
            values /= math.sqrt(fan_in)
        tensors[name] = values
    return tensors


def write_checkpoint(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """config.json and model.safetensors in a directory, which is made."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def quantisable_config(seed: int) -> dict[str, Any]:
    """A random config whose linears have whole groups of 32, split over two ranks as well."""
    config, draw = random_config(seed), random.Random(seed)
    text = config["text_config"]
    text |= {
        "hidden_size": 64,
        "num_key_value_heads": 2,
        "num_attention_heads": 4,
        "head_dim": 32,
        "rotary_dim": 16,
        "intermediate_size": draw.choice([64, 128]),
        "dense_intermediate_size": 128,
        "shared_intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    text["sparse_attention_config"] |= {"sparse_index_dim": 32, "sparse_num_index_heads": 2}
    config["vision_config"] |= {"projection_dim": 64}
    return config


def quantised(
    config: dict[str, Any], tensors: dict[str, Tensor], experts: str = "mxfp8"
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """A checkpoint in MXFP8, or in MXFP8 with NVFP4 experts, made of random plain tensors.

    Returns:
        its config, its tensors, and the plain tensors that it means.
    """
    layout = checkpoint_layout(M3Config.from_object(config))
    stored, meant, layers = {}, {}, {}
    for name, plain in tensors.items():
        if not layout[name].is_quantisable:
            stored[name] = meant[name] = plain
        elif experts == "nvfp4" and ".experts." in name:
            parts = _nvfp4(plain)
            stored |= {name + suffix: part for suffix, part in parts.items()}
            stored[name.removesuffix("weight") + "input_scale"] = torch.tensor(1.0)
            meant[name] = nvfp4.decode(parts[""], parts["_scale"], parts["_scale_2"], torch.float32)
            layers[name.removesuffix(".weight")] = {"quant_algo": "NVFP4", "group_size": 16}
        else:
            coded = mxfp8.encode(plain)
            stored |= {name: coded.elements, name + "_scale_inv": coded.scales}
            meant[name] = mxfp8.decode(coded, torch.float32)
            layers[name.removesuffix(".weight")] = {"quant_algo": "MXFP8"}
    quantization: dict[str, Any] = {
        "quant_method": "mxfp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [1, 32],
        "ignored_layers": ["lm_head"],
    }
    if experts == "nvfp4":
        quantization = {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": None,
            "exclude_modules": ["lm_head"],
            "quantized_layers": layers,
        }
    return config | {"quantization_config": quantization}, stored, meant


def _nvfp4(plain: Tensor) -> dict[str, Tensor]:
    """Random NVFP4 parts of the shape and about the size of a plain matrix, by name suffix."""
    rows, columns = plain.shape
    generator = torch.Generator().manual_seed(rows * columns)
    packed = torch.randint(0, 256, (rows, columns // 2), generator=generator)
    scales = torch.rand(rows, columns // 16, generator=generator) * 400
    return {
        "": packed.to(torch.uint8),
        "_scale": scales.to(torch.float8_e4m3fn),
        "_scale_2": plain.std() / 700,
    }
