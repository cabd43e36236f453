"""Makes the tiny checkpoint as it is before training: a complete directory, released layout.

`python -m m3stack.models.minimax_m3.tiny DIR` writes it. Every weight comes from SHAKE-256 of its
name, so the files are the same on every machine, to the byte. `m3stack.train` starts from them;
the built-in checkpoint is what it ended with.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from m3stack.models.minimax_m3 import tiny_tokenizer as tokens
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.layout import checkpoint_layout

# as in the released model, three rows of the embedding table belong to no token
UNUSED_ROWS = 3
VOCAB_SIZE = tokens.BASE_TOKENS + len(tokens.ADDED_TOKENS) + UNUSED_ROWS

_ADDS_TO_STREAM = (
    "o_proj.weight",
    "down_proj.weight",
    ".w2.weight",
    "patch_merge_mlp.linear_2.weight",
)

_NUM_LAYERS = 5
_SPARSE = [0] + [1] * (_NUM_LAYERS - 1)
_MERGE = {
    "image_token_compression_method": "patch_merge",
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_PICTURE = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "merge_size": 2,
    "patch_size": 14,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "temporal_patch_size": 2,
}

IMAGE_PREPROCESSOR: dict[str, Any] = _PICTURE | {
    "image_processor_type": "MiniMaxM3VLImageProcessor",
    "size": {"longest_edge": 451584, "shortest_edge": 3136},
}
VIDEO_PREPROCESSOR: dict[str, Any] = _PICTURE | {
    "do_sample_frames": False,
    "fps": 1.0,
    "max_frames": 768,
    "max_pixels": 602112,
    "min_frames": 4,
    "min_pixels": 3136,
    "return_metadata": False,
    "size": {"height": 672, "width": 672},
    "total_pixels": 45158400,
    "video_processor_type": "MiniMaxM3VLVideoProcessor",
    "vision_segment_max_frames": 4,
}


def write_tiny_checkpoint(path: Path | str) -> None:
    """Writes the eight files of the tiny checkpoint into a directory, which is made if absent."""
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    merges = tokens.train_merges(_resource("tiny_corpus.txt"), tokens.BASE_TOKENS - 256)
    config = config_object()
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", _generation(config["text_config"]))
    _write_json(directory / "preprocessor_config.json", IMAGE_PREPROCESSOR)
    _write_json(directory / "video_preprocessor_config.json", VIDEO_PREPROCESSOR)
    _write_json(directory / "tokenizer.json", tokens.tokenizer_object(merges))
    _write_json(
        directory / "tokenizer_config.json",
        tokens.tokenizer_settings(config["text_config"]["max_position_embeddings"]),
    )
    (directory / "chat_template.jinja").write_text(
        _resource("tiny_chat_template.jinja"), encoding="utf-8"
    )
    save_weights(dict(initial_weights(M3Config.from_object(config))), config, directory)


def save_weights(weights: Mapping[str, Tensor], config: Mapping[str, Any], directory: Path) -> None:
    """Writes model.safetensors in the dtypes of the released repository: bf16, some in fp32."""
    layout = checkpoint_layout(M3Config.from_object(config))
    stored = {
        name: weights[name].to(torch.float32 if placement.keeps_fp32 else torch.bfloat16)
        for name, placement in layout.items()
    }
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})


def config_object() -> dict[str, Any]:
    """The content of config.json."""
    return {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "text_config": _text_config(),
        "vision_config": {
            "hidden_size": 128,
            "num_attention_heads": 4,
            "num_hidden_layers": 4,
            "intermediate_size": 384,
            "patch_size": 14,
            "image_size": 2016,
            "projection_dim": 192,
            "position_embedding_type": "rope",
            "rope_mode": "3d",
            "rope_theta": 10000.0,
            "attention_dropout": 0.0,
            "hidden_act": "gelu",
            "initializer_range": 0.02,
            "layer_norm_eps": 1e-05,
            "model_type": "clip_vision_model",
            "num_channels": 3,
            "img_token_compression_config": _MERGE,
            "vision_segment_max_frames": 4,
        },
        "img_token_compression_config": _MERGE,
        "image_seq_length": 576,
        "image_token_index": tokens.token_id(tokens.IMAGE),
        "video_token_index": tokens.token_id(tokens.VIDEO),
        "multimodal_projector_bias": True,
        "process_image_mode": "dynamic_res",
        "projector_hidden_act": "gelu",
        "projector_hidden_size": 192,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _text_config() -> dict[str, Any]:
    return {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "dtype": "bfloat16",
        "hidden_size": 192,
        "intermediate_size": 64,
        "num_hidden_layers": _NUM_LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-06,
        "use_gemma_norm": True,
        "attention_output_gate": False,
        # the released 5,000,000 leaves two of eight frequencies for telling neighbours apart
        "rope_theta": 10000,
        "rotary_dim": 16,
        "partial_rotary_factor": 0.5,
        "hidden_act": "swigluoai",
        "use_qk_norm": True,
        "tie_word_embeddings": False,
        "dense_intermediate_size": 512,
        "shared_intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "moe_layer_freq": _SPARSE,
        "qk_norm_type": "per_head",
        "num_mtp_modules": 0,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "routed_scaling_factor": 2.0,
        "bos_token_id": tokens.token_id(tokens.BEGIN_DOCUMENT),
        "eos_token_id": tokens.token_id(tokens.END_MESSAGE),
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_index_dim": 32,
            "sparse_num_index_heads": 4,
            "sparse_topk_blocks": 4,
            "sparse_block_size": 128,
            "sparse_disable_index_value": _SPARSE,
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_attention_freq": _SPARSE,
        },
    }


def _generation(text: dict[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": text["bos_token_id"],
        "do_sample": True,
        "eos_token_id": text["eos_token_id"],
        "temperature": 1.0,
        "top_k": 40,
        "top_p": 0.95,
    }


def initial_weights(config: M3Config) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint before training, by its released name, in fp32."""
    for name, placement in checkpoint_layout(config).items():
        if len(placement.shape) == 1:
            # a Gemma norm scales by one plus its weight, a layer norm by its weight
            is_scale = name.endswith(
                ("layer_norm1.weight", "layer_norm2.weight", "pre_layrnorm.weight")
            )
            yield name, torch.full(placement.shape, float(is_scale))
        else:
            yield name, _noise(name, placement.shape) * _spread(name, placement.shape, config)


def _spread(name: str, shape: tuple[int, ...], config: M3Config) -> float:
    """Standard deviation of a matrix."""
    if "embed_tokens" in name:
        return 0.3
    inputs = math.prod(shape[1:])
    if name.endswith(_ADDS_TO_STREAM):
        # so that the stream keeps its size through all layers
        return 1 / math.sqrt(inputs * 2 * config.num_layers)
    return (0.3 if "lm_head" in name else 0.8) / math.sqrt(inputs)


def _noise(name: str, shape: tuple[int, ...]) -> Tensor:
    """fp32 values of mean 0 and variance 1, uniform, that depend on the name alone."""
    count = math.prod(shape)
    stream = bytearray(hashlib.shake_256(name.encode()).digest(2 * count))
    if sys.byteorder == "big":
        stream[0::2], stream[1::2] = stream[1::2], stream[0::2]
    steps = torch.frombuffer(stream, dtype=torch.int16).to(torch.float32)
    return ((steps + 0.5) * (math.sqrt(3) / 32768)).view(shape)


def _resource(name: str) -> str:
    return (resources.files("m3stack.models.minimax_m3") / name).read_text(encoding="utf-8")


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Command `python -m m3stack.models.minimax_m3.tiny DIR`."""
    if len(arguments) != 1:
        print("usage: python -m m3stack.models.minimax_m3.tiny DIR", file=sys.stderr)
        return 2
    write_tiny_checkpoint(arguments[0])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
