"""Every key of the released config.json: required, optional, or pinned to its one honoured value.

Optional keys that are not pinned and not read are inert: known to change nothing in a forward pass.
Source: config.json of the released repositories; transformers 5.24 `minimax_m3_vl`.
"""

from __future__ import annotations

MODEL_TYPE = "minimax_m3_vl"

# ids of the released tokenizer; its text_config names neither
RELEASED_BOS_TOKEN_ID = 200034
RELEASED_EOS_TOKEN_ID = 200020

DTYPE_NAMES = ("bfloat16", "float16", "float32")

TOP_PINNED = {
    "model_type": MODEL_TYPE,
    "multimodal_projector_bias": True,
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "process_image_mode": "dynamic_res",
}
TOP_REQUIRED = {
    *TOP_PINNED,
    "text_config",
    "vision_config",
    "img_token_compression_config",
    "image_token_index",
    "video_token_index",
    "projector_hidden_size",
}
TOP_OPTIONAL_PINNED = {"tie_word_embeddings": False, "num_reward_heads": 0}
TOP_OPTIONAL = {
    *TOP_OPTIONAL_PINNED,
    "torch_dtype",
    "dtype",
    "quantization_config",
    # inert
    "architectures",
    "auto_map",
    "image_seq_length",
    "image_grid_pinpoints",
    "transformers_version",
}

TEXT_PINNED = {
    "use_gemma_norm": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "attention_output_gate": False,
    "hidden_act": "swigluoai",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "n_shared_experts": 1,
    "tie_word_embeddings": False,
}
TEXT_REQUIRED = {
    *TEXT_PINNED,
    "hidden_size",
    "intermediate_size",
    "dense_intermediate_size",
    "shared_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rotary_dim",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_layer_freq",
    "swiglu_alpha",
    "swiglu_limit",
    "routed_scaling_factor",
    "sparse_attention_config",
}
TEXT_OPTIONAL_PINNED = {
    "swiglu_beta": 1.0,
    "attention_dropout": 0.0,
    "router_jitter_noise": 0.0,
    "sliding_window": None,
}
TEXT_OPTIONAL = {
    *TEXT_OPTIONAL_PINNED,
    # one of the two forms; see `rope`
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "bos_token_id",
    "eos_token_id",
    # inert; MTP modules are named by the config and not shipped
    "architectures",
    "dtype",
    "torch_dtype",
    "model_type",
    "pad_token_id",
    "num_mtp_modules",
    "num_nextn_predict_layers",
    "initializer_range",
    "output_router_logits",
    "router_aux_loss_coef",
    "use_cache",
}

SPARSE_PINNED = {"use_sparse_attention": True, "sparse_init_block": 0, "sparse_score_type": "max"}
SPARSE_REQUIRED = {
    *SPARSE_PINNED,
    "sparse_index_dim",
    "sparse_num_index_heads",
    "sparse_topk_blocks",
    "sparse_block_size",
    "sparse_local_block",
    "sparse_attention_freq",
    "sparse_disable_index_value",
}

VISION_PINNED = {
    "position_embedding_type": "rope",
    "rope_mode": "3d",
    "hidden_act": "gelu",
    "attention_dropout": 0.0,
}
VISION_REQUIRED = {
    *VISION_PINNED,
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "intermediate_size",
    "patch_size",
    "num_channels",
    "projection_dim",
    "rope_theta",
    "layer_norm_eps",
    "vision_segment_max_frames",
    "img_token_compression_config",
}
# inert: the picture size is bounded by the processor, and there is no token table
VISION_OPTIONAL = {
    "image_size",
    "initializer_factor",
    "initializer_range",
    "model_type",
    "vocab_size",
    "dtype",
    "torch_dtype",
}

MERGE_PINNED = {"image_token_compression_method": "patch_merge"}
MERGE_REQUIRED = {*MERGE_PINNED, "spatial_merge_size", "temporal_patch_size"}
