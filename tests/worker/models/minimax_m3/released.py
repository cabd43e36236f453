"""config.json of the released repositories, as their public dumps show it."""

from __future__ import annotations

import re
from typing import Any

NUM_PARAMETERS = 427_040_132_864
NUM_TENSORS = 23_416
NUM_MXFP8_TENSORS = 45_838
NUM_MXFP8_VALUES = 440_279_845_760
MXFP8_GIB = 413.27

LAYERS = "language_model.model.layers."


def released_config(*, max_position_embeddings: int = 1048576) -> dict[str, Any]:
    """The BF16 config; day 0 had 524288 positions."""
    later = [0, 0, 0] + [1] * 57
    merge = {
        "image_token_compression_method": "patch_merge",
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    return {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "auto_map": {"AutoConfig": "configuration_minimax_m3_vl.MiniMaxM3VLConfig"},
        "model_type": "minimax_m3_vl",
        "image_token_index": 200025,
        "video_token_index": 200026,
        "image_seq_length": 576,
        "image_grid_pinpoints": "[[336, 336], [336, 672]]",
        "process_image_mode": "dynamic_res",
        "img_token_compression_config": merge,
        "multimodal_projector_bias": True,
        "projector_hidden_act": "gelu",
        "projector_hidden_size": 6144,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "num_reward_heads": 0,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.52.4",
        "text_config": {
            "architectures": ["MiniMaxM3SparseForCausalLM"],
            "dtype": "bfloat16",
            "hidden_size": 6144,
            "num_hidden_layers": 60,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 200064,
            "intermediate_size": 3072,
            "dense_intermediate_size": 12288,
            "shared_intermediate_size": 3072,
            "n_shared_experts": 1,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "routed_scaling_factor": 2.0,
            "moe_layer_freq": later,
            "hidden_act": "swigluoai",
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "rms_norm_eps": 1e-6,
            "use_gemma_norm": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_head",
            "attention_output_gate": False,
            "rope_theta": 5000000,
            "rotary_dim": 64,
            "partial_rotary_factor": 0.5,
            "tie_word_embeddings": False,
            "max_position_embeddings": max_position_embeddings,
            "num_mtp_modules": 7,
            "num_nextn_predict_layers": 1,
            "sparse_attention_config": {
                "use_sparse_attention": True,
                "sparse_attention_freq": later,
                "sparse_index_dim": 128,
                "sparse_num_index_heads": 4,
                "sparse_block_size": 128,
                "sparse_topk_blocks": 16,
                "sparse_local_block": 1,
                "sparse_init_block": 0,
                "sparse_score_type": "max",
                "sparse_disable_index_value": later,
            },
        },
        "vision_config": {
            "hidden_size": 1280,
            "num_attention_heads": 16,
            "num_hidden_layers": 32,
            "intermediate_size": 5120,
            "patch_size": 14,
            "image_size": 2016,
            "num_channels": 3,
            "projection_dim": 6144,
            "position_embedding_type": "rope",
            "rope_mode": "3d",
            "rope_theta": 10000.0,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "vision_segment_max_frames": 4,
            "img_token_compression_config": merge,
            "model_type": "clip_vision_model",
            "vocab_size": 32000,
        },
    }


def released_mxfp8_config() -> dict[str, Any]:
    """The MXFP8 config, with the keys in which it differs from the BF16 one."""
    config = released_config()
    config["text_config"] |= {"num_mtp_modules": 1}
    del config["text_config"]["num_nextn_predict_layers"]
    config["vision_config"] |= {"initializer_factor": 1.0}
    # in the order of the file: sorted as text
    layers = sorted(str(layer) for layer in range(3, 60))
    return config | {
        "quantization_config": {
            "quant_method": "mxfp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [1, 32],
            "ignored_layers": [
                "lm_head",
                "model.embed_tokens",
                "vision_tower",
                "multi_modal_projector",
                "patch_merge_mlp",
                *(f"{LAYERS}{layer}.block_sparse_moe.gate" for layer in layers),
            ],
        }
    }


# tensors of the MXFP8 repository as public listings of it show them: name with ranges, dtype, shape
_QUANTISED_LINEARS = """
L0-2.mlp.down_proj 6144 12288
L0-2.mlp.gate_proj 12288 6144
L0-2.mlp.up_proj 12288 6144
L0-59.self_attn.k_proj 512 6144
L0-59.self_attn.o_proj 6144 8192
L0-59.self_attn.q_proj 8192 6144
L0-59.self_attn.v_proj 512 6144
L3-59.block_sparse_moe.experts.0-127.w1 3072 6144
L3-59.block_sparse_moe.experts.0-127.w2 6144 3072
L3-59.block_sparse_moe.experts.0-127.w3 3072 6144
L3-59.block_sparse_moe.shared_experts.down_proj 6144 3072
L3-59.block_sparse_moe.shared_experts.gate_proj 3072 6144
L3-59.block_sparse_moe.shared_experts.up_proj 3072 6144
L3-59.self_attn.index_k_proj 128 6144
L3-59.self_attn.index_q_proj 512 6144
"""
_PLAIN = """
language_model.lm_head.weight BF16 200064 6144
language_model.model.embed_tokens.weight BF16 200064 6144
language_model.model.norm.weight BF16 6144
L0-59.input_layernorm.weight BF16 6144
L0-59.post_attention_layernorm.weight BF16 6144
L0-59.self_attn.k_norm.weight BF16 128
L0-59.self_attn.q_norm.weight BF16 128
L3-59.block_sparse_moe.e_score_correction_bias F32 128
L3-59.block_sparse_moe.gate.weight F32 128 6144
L3-59.self_attn.index_k_norm.weight BF16 128
L3-59.self_attn.index_q_norm.weight BF16 128
multi_modal_projector.linear_1.bias BF16 6144
multi_modal_projector.linear_1.weight BF16 6144 1280
multi_modal_projector.linear_2.bias BF16 6144
multi_modal_projector.linear_2.weight BF16 6144 6144
patch_merge_mlp.linear_1.bias BF16 6144
patch_merge_mlp.linear_1.weight BF16 6144 24576
patch_merge_mlp.linear_2.bias BF16 6144
patch_merge_mlp.linear_2.weight BF16 6144 6144
vision_tower.vision_model.embeddings.patch_embedding.weight F32 1280 3 2 14 14
V0-31.layer_norm1.bias BF16 1280
V0-31.layer_norm1.weight BF16 1280
V0-31.layer_norm2.bias BF16 1280
V0-31.layer_norm2.weight BF16 1280
V0-31.mlp.fc1.bias BF16 5120
V0-31.mlp.fc1.weight BF16 5120 1280
V0-31.mlp.fc2.bias BF16 1280
V0-31.mlp.fc2.weight BF16 1280 5120
V0-31.self_attn.k_proj.bias BF16 1280
V0-31.self_attn.k_proj.weight BF16 1280 1280
V0-31.self_attn.out_proj.bias BF16 1280
V0-31.self_attn.out_proj.weight BF16 1280 1280
V0-31.self_attn.q_proj.bias BF16 1280
V0-31.self_attn.q_proj.weight BF16 1280 1280
V0-31.self_attn.v_proj.bias BF16 1280
V0-31.self_attn.v_proj.weight BF16 1280 1280
vision_tower.vision_model.pre_layrnorm.bias BF16 1280
vision_tower.vision_model.pre_layrnorm.weight BF16 1280
"""

Listing = dict[str, tuple[str, tuple[int, ...]]]


def mxfp8_listing() -> Listing:
    """Name -> (dtype, shape) of all 45,838 tensors of the MXFP8 repository."""
    listing: Listing = {}
    for line in _PLAIN.split("\n")[1:-1]:
        name, dtype, *shape = line.split()
        for one in _expanded(name):
            listing[one] = (dtype, tuple(map(int, shape)))
    for line in _QUANTISED_LINEARS.split("\n")[1:-1]:
        name, rows, columns = line.split()
        for one in _expanded(name):
            listing[one + ".weight"] = ("F8_E4M3", (int(rows), int(columns)))
            listing[one + ".weight_scale_inv"] = ("U8", (int(rows), int(columns) // 32))
    return listing


def bf16_listing() -> Listing:
    """The same of the BF16 repository: no scales, and BF16 where those had one."""
    return {
        name: ("BF16" if dtype == "F8_E4M3" else dtype, shape)
        for name, (dtype, shape) in mxfp8_listing().items()
        if not name.endswith("_scale_inv")
    }


def _expanded(name: str) -> list[str]:
    name = re.sub("^L", LAYERS, name)
    name = re.sub("^V", "vision_tower.vision_model.encoder.layers.", name)
    found = re.search(r"\.(\d+)-(\d+)\.", name)
    if not found:
        return [name]
    first, last = int(found[1]), int(found[2])
    parts = (name[: found.start()], name[found.end() :])
    return [one for n in range(first, last + 1) for one in _expanded(f"{parts[0]}.{n}.{parts[1]}")]
