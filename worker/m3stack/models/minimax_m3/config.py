"""`M3Config`: config.json of a MiniMax-M3 checkpoint, parsed strictly.

Any key that `config_keys` does not list is refused by name, and so is a missing one.
Source: config.json of the released repositories; transformers 5.24 `minimax_m3_vl`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from m3stack.errors import StartupError
from m3stack.models.facts import ModelFacts
from m3stack.models.minimax_m3 import config_keys as keys
from m3stack.models.minimax_m3.quantization import Quantization, read_quantization
from m3stack.models.minimax_m3.rope import Rope, read_rope
from m3stack.models.strict_json import Section, read_object


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The vision tower and the projector behind it.

    Attributes:
        hidden_size, num_layers, num_heads, intermediate_size: of the tower.
        patch_size, temporal_patch_size, num_channels: what one patch row holds.
        merge_size: patches per side of the square that becomes one token.
        segment_max_patches: temporal patches that see each other (one attention range).
        projector_hidden_size: width inside both projector stages.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    patch_size: int
    temporal_patch_size: int
    num_channels: int
    merge_size: int
    segment_max_patches: int
    rope_theta: float
    layer_norm_eps: float
    projector_hidden_size: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_values(self) -> int:
        """Values of a full patch, all its frames included."""
        return self.num_channels * self.temporal_patch_size * self.patch_size**2


@dataclass(frozen=True, slots=True)
class M3Config:
    """Everything about a MiniMax-M3 checkpoint that its forward pass depends on.

    Attributes:
        index_dim: width of the index heads, of which there are `num_kv_heads`.
        block_tokens: tokens per selection block, which is a cache page.
        topk_blocks: blocks a row attends to, the `num_local_blocks` included.
        rope: of the text model.
        sparse_layers, moe_layers: one entry a layer.
        expert_size, dense_size, shared_size: inner widths of the three kinds of feed-forward.
        dtype: what the checkpoint says its weights are stored in.
        quantization: how its linears are stored, or None where all are plain.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope: Rope
    rms_norm_eps: float
    index_dim: int
    block_tokens: int
    topk_blocks: int
    num_local_blocks: int
    sparse_layers: tuple[bool, ...]
    moe_layers: tuple[bool, ...]
    num_experts: int
    num_experts_per_token: int
    expert_size: int
    dense_size: int
    shared_size: int
    swiglu_alpha: float
    swiglu_limit: float
    routed_scaling_factor: float
    max_position_embeddings: int
    image_token_id: int
    video_token_id: int
    bos_token_id: int
    eos_token_id: int
    dtype: str
    quantization: Quantization | None
    vision: VisionConfig

    @classmethod
    def from_dir(cls, path: Path | str) -> M3Config:
        """Reads `config.json` of a checkpoint directory.

        Raises:
            StartupError: the file cannot be read, a key is missing or unknown, or a value cannot
                be honoured; the message names the key, the value and what was expected.
        """
        return cls.from_object(read_object(Path(path) / "config.json"))

    @classmethod
    def from_object(cls, data: Mapping[str, Any]) -> M3Config:
        """The same from a parsed `config.json`."""
        if data.get("model_type", keys.MODEL_TYPE) != keys.MODEL_TYPE:
            raise StartupError(
                f"config.json: model_type is {data['model_type']!r}, "
                f"this worker serves {keys.MODEL_TYPE!r}"
            )
        top = Section("config.json", data, required=keys.TOP_REQUIRED, optional=keys.TOP_OPTIONAL)
        top.pin(keys.TOP_PINNED | keys.TOP_OPTIONAL_PINNED)
        text = Section(
            "config.json: text_config",
            top.inner("text_config"),
            required=keys.TEXT_REQUIRED,
            optional=keys.TEXT_OPTIONAL,
        )
        text.pin(keys.TEXT_PINNED | keys.TEXT_OPTIONAL_PINNED)
        sparse = Section(
            "config.json: text_config.sparse_attention_config",
            text.inner("sparse_attention_config"),
            required=keys.SPARSE_REQUIRED,
            optional=(),
        )
        sparse.pin(keys.SPARSE_PINNED)
        config = cls(
            **_text_fields(text),
            **_sparse_fields(sparse, text.whole("num_hidden_layers")),
            **_token_fields(top, text),
            dtype=_stored_dtype(top),
            quantization=(
                read_quantization(top.inner("quantization_config"))
                if "quantization_config" in top
                else None
            ),
            vision=_vision(top),
        )
        _check_text(text, sparse, config)
        return config

    def per_rank(self, size: int, *, width_ranks: int | None = None) -> M3Config:
        """The sizes that each of `size` tensor-parallel ranks computes with.

        Heads, inner widths and vocabulary are divided; with more ranks than KV heads, neighbours
        share one. Whether they divide is checked where the weights are split (`slices`).

        Args:
            width_ranks: ranks that split the width of an expert; all of them where None.
        """
        if size == 1:
            return self
        return replace(
            self,
            vocab_size=self.vocab_size // size,
            num_heads=self.num_heads // size,
            num_kv_heads=max(1, self.num_kv_heads // size),
            expert_size=self.expert_size // (width_ranks or size),
            dense_size=self.dense_size // size,
            shared_size=self.shared_size // size,
        )

    def facts(self) -> ModelFacts:
        """What the gateway must agree with."""
        return ModelFacts(
            model_type=keys.MODEL_TYPE,
            vocab_size=self.vocab_size,
            image_token_id=self.image_token_id,
            video_token_id=self.video_token_id,
            eos_token_id=self.eos_token_id,
            patch_size=self.vision.patch_size,
            temporal_patch_size=self.vision.temporal_patch_size,
            merge_size=self.vision.merge_size,
            max_position_embeddings=self.max_position_embeddings,
        )


def _text_fields(text: Section) -> dict[str, Any]:
    num_layers = text.whole("num_hidden_layers")
    return {
        "vocab_size": text.whole("vocab_size"),
        "hidden_size": text.whole("hidden_size"),
        "num_layers": num_layers,
        "num_heads": text.whole("num_attention_heads"),
        "num_kv_heads": text.whole("num_key_value_heads"),
        "head_dim": text.whole("head_dim"),
        "rotary_dim": text.whole("rotary_dim", at_least=2),
        "rope": read_rope(
            text,
            partial_factor=text.whole("rotary_dim", at_least=2) / text.whole("head_dim"),
            max_tokens=text.whole("max_position_embeddings"),
        ),
        "rms_norm_eps": text.number("rms_norm_eps"),
        "moe_layers": text.flags("moe_layer_freq", num_layers),
        "num_experts": text.whole("num_local_experts"),
        "num_experts_per_token": text.whole("num_experts_per_tok"),
        "expert_size": text.whole("intermediate_size"),
        "dense_size": text.whole("dense_intermediate_size"),
        "shared_size": text.whole("shared_intermediate_size"),
        "swiglu_alpha": text.number("swiglu_alpha"),
        "swiglu_limit": text.number("swiglu_limit"),
        "routed_scaling_factor": text.number("routed_scaling_factor"),
        "max_position_embeddings": text.whole("max_position_embeddings"),
    }


def _sparse_fields(sparse: Section, num_layers: int) -> dict[str, Any]:
    return {
        "index_dim": sparse.whole("sparse_index_dim"),
        "block_tokens": sparse.whole("sparse_block_size"),
        "topk_blocks": sparse.whole("sparse_topk_blocks"),
        "num_local_blocks": sparse.whole("sparse_local_block"),
        "sparse_layers": sparse.flags("sparse_attention_freq", num_layers),
    }


def _token_fields(top: Section, text: Section) -> dict[str, Any]:
    released = {
        "bos_token_id": keys.RELEASED_BOS_TOKEN_ID,
        "eos_token_id": keys.RELEASED_EOS_TOKEN_ID,
    }
    ids = {
        "image_token_id": top.whole("image_token_index", at_least=0),
        "video_token_id": top.whole("video_token_index", at_least=0),
    }
    for key, default in released.items():
        ids[key] = text.whole(key, at_least=0) if key in text else default
    vocab_size = text.whole("vocab_size")
    for key, token_id in ids.items():
        if token_id >= vocab_size:
            raise StartupError(
                f"config.json: {key} is {token_id}, text_config.vocab_size is only {vocab_size}"
            )
    if ids["image_token_id"] == ids["video_token_id"]:
        raise StartupError(
            f"config.json: image and video placeholder are both {ids['image_token_id']}"
        )
    return ids


def _stored_dtype(top: Section) -> str:
    for key in ("torch_dtype", "dtype"):
        if key in top:
            return top.one_of(key, keys.DTYPE_NAMES)
    return "bfloat16"


def _vision(top: Section) -> VisionConfig:
    vision = Section(
        "config.json: vision_config",
        top.inner("vision_config"),
        required=keys.VISION_REQUIRED,
        optional=keys.VISION_OPTIONAL,
    )
    vision.pin(keys.VISION_PINNED)
    merge = _merge("config.json: ", top.inner("img_token_compression_config"))
    inner_merge = _merge(
        "config.json: vision_config.", vision.inner("img_token_compression_config")
    )
    if merge != inner_merge:
        raise StartupError(
            "config.json: the two img_token_compression_config differ: "
            f"(spatial_merge_size, temporal_patch_size) {merge} and {inner_merge}"
        )
    hidden_size, num_heads = vision.whole("hidden_size"), vision.whole("num_attention_heads")
    # three rotary axes need at least one frequency pair each
    if hidden_size % num_heads or hidden_size // num_heads < 6:
        raise vision.refusal("hidden_size", f"{num_heads} heads of at least 6 channels")
    text_width = top.inner("text_config").get("hidden_size")
    if vision.whole("projection_dim") != text_width:
        raise vision.refusal("projection_dim", f"text_config.hidden_size, {text_width}")
    return VisionConfig(
        hidden_size=hidden_size,
        num_layers=vision.whole("num_hidden_layers"),
        num_heads=num_heads,
        intermediate_size=vision.whole("intermediate_size"),
        patch_size=vision.whole("patch_size"),
        temporal_patch_size=merge[1],
        num_channels=vision.whole("num_channels"),
        merge_size=merge[0],
        segment_max_patches=vision.whole("vision_segment_max_frames"),
        rope_theta=vision.number("rope_theta"),
        layer_norm_eps=vision.number("layer_norm_eps"),
        projector_hidden_size=top.whole("projector_hidden_size"),
    )


def _merge(prefix: str, data: Mapping[str, Any]) -> tuple[int, int]:
    merge = Section(
        prefix + "img_token_compression_config", data, required=keys.MERGE_REQUIRED, optional=()
    )
    merge.pin(keys.MERGE_PINNED)
    return merge.whole("spatial_merge_size"), merge.whole("temporal_patch_size")


def _check_text(text: Section, sparse: Section, config: M3Config) -> None:
    if config.num_heads % config.num_kv_heads:
        raise text.refusal("num_attention_heads", f"a multiple of {config.num_kv_heads} KV heads")
    if config.rotary_dim % 2 or config.rotary_dim > config.head_dim:
        raise text.refusal("rotary_dim", f"even and at most head_dim, {config.head_dim}")
    factor = config.rotary_dim / config.head_dim
    if "partial_rotary_factor" in text and text.number("partial_rotary_factor") != factor:
        raise text.refusal("partial_rotary_factor", f"rotary_dim / head_dim, {factor}")
    if config.num_experts_per_token > config.num_experts:
        raise text.refusal("num_experts_per_tok", f"at most {config.num_experts} experts")
    if sparse.whole("sparse_num_index_heads") != config.num_kv_heads:
        raise sparse.refusal("sparse_num_index_heads", f"{config.num_kv_heads}, one per KV head")
    if config.index_dim < config.rotary_dim:
        raise sparse.refusal("sparse_index_dim", f"at least rotary_dim, {config.rotary_dim}")
    if config.num_local_blocks > config.topk_blocks:
        raise sparse.refusal("sparse_local_block", f"at most {config.topk_blocks} chosen blocks")
    disabled = sparse.flags("sparse_disable_index_value", config.num_layers)
    if any(
        is_sparse and not off for is_sparse, off in zip(config.sparse_layers, disabled, strict=True)
    ):
        raise sparse.refusal("sparse_disable_index_value", "1 on every sparse layer")
