"""M3Config takes the released files and refuses, by name, what it does not know or cannot do."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from m3stack.errors import StartupError
from m3stack.models.minimax_m3.config import M3Config
from tests.worker.models.minimax_m3.released import released_config, released_mxfp8_config

Object = dict[str, Any]


@pytest.mark.parametrize("positions", [524288, 1048576])
def test_both_released_variants_are_read(positions: int) -> None:
    config = M3Config.from_object(released_config(max_position_embeddings=positions))
    assert config.max_position_embeddings == positions
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (60, 64, 4)
    assert (config.block_tokens, config.topk_blocks, config.num_local_blocks) == (128, 16, 1)
    assert config.sparse_layers == config.moe_layers == (False,) * 3 + (True,) * 57
    assert (config.expert_size, config.dense_size, config.shared_size) == (3072, 12288, 3072)
    assert (config.bos_token_id, config.eos_token_id) == (200034, 200020)
    assert (config.image_token_id, config.video_token_id) == (200025, 200026)
    assert config.vision.patch_values == 1176
    assert config.vision.head_dim == 80
    assert (config.dtype, config.quantization) == ("bfloat16", None)


def test_the_released_mxfp8_config_is_read() -> None:
    config = M3Config.from_object(released_mxfp8_config())
    assert config.quantization is not None
    assert config.quantization.method == "mxfp8"
    assert len(config.quantization.ignored_layers) == 5 + 57
    plain = M3Config.from_object(released_config())
    assert dataclasses.replace(config, quantization=None) == plain


def test_token_ids_of_the_file_go_before_the_released_ones() -> None:
    data = released_config()
    data["text_config"] |= {"bos_token_id": 7, "eos_token_id": 8}
    config = M3Config.from_object(data)
    assert (config.bos_token_id, config.eos_token_id) == (7, 8)


def paths(data: Object, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in data.items():
        found.append((*prefix, key))
        if isinstance(value, dict) and key != "auto_map":
            found += paths(value, (*prefix, key))
    return found


OPTIONAL = {
    "architectures",
    "auto_map",
    "image_seq_length",
    "image_grid_pinpoints",
    "num_reward_heads",
    "torch_dtype",
    "dtype",
    "transformers_version",
    "partial_rotary_factor",
    "num_mtp_modules",
    "num_nextn_predict_layers",
    "image_size",
    "initializer_range",
    "model_type",
}


def is_optional(path: tuple[str, ...]) -> bool:
    if path == ("model_type",):
        return False
    return path[-1] in OPTIONAL or path == ("vision_config", "vocab_size")


@pytest.mark.parametrize("path", paths(released_config()), ids=".".join)
def test_a_missing_key_is_named_unless_it_changes_nothing(path: tuple[str, ...]) -> None:
    data = copy.deepcopy(released_config())
    section = data
    for key in path[:-1]:
        section = section[key]
    del section[path[-1]]
    # an MTP or rotary hint may be absent; so may the tied-embeddings flag at the top only
    if is_optional(path):
        M3Config.from_object(data)
    else:
        with pytest.raises(StartupError, match=f"missing key.*{path[-1]}"):
            M3Config.from_object(data)


SECTIONS = [
    (),
    ("text_config",),
    ("text_config", "sparse_attention_config"),
    ("vision_config",),
    ("img_token_compression_config",),
    ("vision_config", "img_token_compression_config"),
]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: ".".join(s) or "top")
def test_an_unknown_key_is_named(section: tuple[str, ...]) -> None:
    data = copy.deepcopy(released_config())
    target = data
    for key in section:
        target = target[key]
    target["attention_sinks"] = 4
    with pytest.raises(StartupError, match="unknown key attention_sinks"):
        M3Config.from_object(data)


def text(**values: Any) -> Callable[[Object], None]:
    return lambda data: data["text_config"].update(values)


def sparse(**values: Any) -> Callable[[Object], None]:
    return lambda data: data["text_config"]["sparse_attention_config"].update(values)


def vision(**values: Any) -> Callable[[Object], None]:
    return lambda data: data["vision_config"].update(values)


def top(**values: Any) -> Callable[[Object], None]:
    return lambda data: data.update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (top(model_type="minimax_m2"), "model_type is 'minimax_m2'"),
        (top(tie_word_embeddings=True), "tie_word_embeddings is true, expected false"),
        (top(multimodal_projector_bias=False), "multimodal_projector_bias is false"),
        (top(num_reward_heads=1), "num_reward_heads is 1"),
        (top(torch_dtype="int8"), 'torch_dtype is "int8"'),
        (top(quantization_config={}), "quantization_config has no quant_method"),
        (top(image_token_index=200064), "image_token_id is 200064"),
        (top(image_token_index=200026), "placeholder are both 200026"),
        (text(attention_output_gate=True), "attention_output_gate is true, expected false"),
        (text(rope_scaling={"type": "dynamic", "factor": 2.0}), "rope_type is 'dynamic'"),
        (text(swiglu_beta=0.5), "swiglu_beta is 0.5"),
        (text(scoring_func="softmax"), 'scoring_func is "softmax"'),
        (text(qk_norm_type="full"), "qk_norm_type"),
        (text(n_shared_experts=2), "n_shared_experts is 2, expected 1"),
        (text(n_shared_experts=True), "n_shared_experts is true, expected 1"),
        (text(tie_word_embeddings=True), "tie_word_embeddings is true"),
        (text(use_routing_bias=False), "use_routing_bias is false"),
        (text(hidden_size="6144"), 'hidden_size is "6144", expected an integer'),
        (text(hidden_size=True), "hidden_size is true, expected an integer"),
        (text(num_hidden_layers=0), "num_hidden_layers is 0, expected at least 1"),
        (text(num_hidden_layers=61), "a list of 61 zeros and ones"),
        (text(moe_layer_freq=[2] * 60), "moe_layer_freq.*zeros and ones"),
        (text(rope_theta=-1), "rope_theta is -1"),
        (text(rms_norm_eps=float("inf")), "rms_norm_eps is Infinity"),
        (text(num_attention_heads=62), "num_attention_heads is 62, expected a multiple of 4"),
        (text(rotary_dim=130), "rotary_dim is 130"),
        (text(rotary_dim=63), "rotary_dim is 63"),
        (text(partial_rotary_factor=0.25), "partial_rotary_factor is 0.25"),
        (text(num_experts_per_tok=129), "num_experts_per_tok is 129"),
        (text(eos_token_id=[200020]), "eos_token_id"),
        (text(eos_token_id=300000), "eos_token_id is 300000"),
        (sparse(sparse_init_block=1), "sparse_init_block is 1, expected 0"),
        (sparse(sparse_score_type="mean"), 'sparse_score_type is "mean", expected "max"'),
        (sparse(use_sparse_attention=False), "use_sparse_attention is false"),
        (sparse(sparse_num_index_heads=2), "sparse_num_index_heads is 2, expected 4"),
        (sparse(sparse_index_dim=32), "sparse_index_dim is 32, expected at least rotary_dim"),
        (sparse(sparse_local_block=17), "sparse_local_block is 17, expected at most 16"),
        (sparse(sparse_local_block=0), "sparse_local_block is 0, expected at least 1"),
        (sparse(sparse_disable_index_value=[0] * 60), "1 on every sparse layer"),
        (vision(rope_mode="2d"), 'rope_mode is "2d"'),
        (vision(attention_dropout=0.1), "attention_dropout is 0.1"),
        (vision(projection_dim=1280), "projection_dim is 1280, expected text_config.hidden_size"),
        (vision(num_attention_heads=13), "hidden_size is 1280, expected 13 heads"),
        (vision(vision_segment_max_frames=0), "vision_segment_max_frames is 0"),
    ],
)
def test_a_value_that_cannot_be_honoured_is_named(
    change: Callable[[Object], None], message: str
) -> None:
    data = copy.deepcopy(released_config())
    change(data)
    with pytest.raises(StartupError, match=message):
        M3Config.from_object(data)


def test_the_two_merge_sections_must_agree() -> None:
    data = copy.deepcopy(released_config())
    data["img_token_compression_config"] = dict(data["img_token_compression_config"])
    data["img_token_compression_config"]["spatial_merge_size"] = 4
    with pytest.raises(StartupError, match="img_token_compression_config differ"):
        M3Config.from_object(data)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"config\.json does not exist"):
        M3Config.from_dir(tmp_path)
    for content, message in [
        ("{", "cannot be read as JSON"),
        ("[]", "holds a list, expected a JSON object"),
        ('{"a": 1, "a": 2}', "key 'a' stands twice"),
        ('{"a": {"b": 1, "b": 1}}', "key 'b' stands twice"),
    ]:
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(StartupError, match=message):
            M3Config.from_dir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(released_config()))
    assert M3Config.from_dir(str(tmp_path)).num_layers == 60


def test_facts_follow_the_config() -> None:
    facts = M3Config.from_object(released_config()).facts()
    assert facts.model_type == "minimax_m3_vl"
    assert (facts.vocab_size, facts.eos_token_id) == (200064, 200020)
    assert (facts.image_token_id, facts.video_token_id) == (200025, 200026)
    assert (facts.patch_size, facts.temporal_patch_size, facts.merge_size) == (14, 2, 2)
    assert facts.max_position_embeddings == 1048576
