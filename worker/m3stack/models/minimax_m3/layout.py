"""The checkpoint's tensor list: name, shape, and the slice of our parameter each one fills.

Source: tensor names and shapes of the released BF16 repository (23,416 tensors).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from m3stack.models.minimax_m3.config import M3Config, VisionConfig

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a checkpoint tensor goes.

    Attributes:
        shape: in the checkpoint.
        parameter: name in `M3Model.named_parameters()`.
        first_row: where it begins in the (expert's) parameter; 0 unless fused with others.
        expert: first index of a parameter that stacks experts, else None.
        keeps_fp32: stored and computed in fp32, whatever the model's dtype.
    """

    shape: Shape
    parameter: str
    first_row: int = 0
    expert: int | None = None
    keeps_fp32: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def checkpoint_layout(config: M3Config) -> dict[str, Placement]:
    """Every tensor of a checkpoint with this config, and nothing else, in a fixed order."""
    width, vocab = config.hidden_size, config.vocab_size
    layout = {
        "language_model.model.embed_tokens.weight": Placement((vocab, width), "embedding"),
        "language_model.lm_head.weight": Placement((vocab, width), "head.weight"),
        "language_model.model.norm.weight": Placement((width,), "norm"),
    }
    for layer in range(config.num_layers):
        there = f"language_model.model.layers.{layer}."
        here = f"layers.{layer}."
        norms = {"input_layernorm": "input_norm", "post_attention_layernorm": "middle_norm"}
        for name, parameter in norms.items():
            layout[f"{there}{name}.weight"] = Placement((width,), here + parameter)
        layout.update(_attention(config, layer, there + "self_attn.", here + "attention."))
        if config.moe_layers[layer]:
            layout.update(_experts(config, there + "block_sparse_moe.", here + "feed_forward."))
        else:
            layout.update(
                _feed_forward(width, config.dense_size, there + "mlp.", here + "feed_forward.")
            )
    layout.update(_vision(config.vision, width))
    return layout


def _attention(
    config: M3Config, layer: int, there: str, here: str
) -> Iterator[tuple[str, Placement]]:
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    parts = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    norms = {"q_norm": config.head_dim, "k_norm": config.head_dim}
    if config.sparse_layers[layer]:
        parts |= {
            "index_q_proj": config.num_kv_heads * config.index_dim,
            "index_k_proj": config.index_dim,
        }
        norms |= {"index_q_norm": config.index_dim, "index_k_norm": config.index_dim}
    first_row = 0
    for name, rows in parts.items():
        yield (
            f"{there}{name}.weight",
            Placement((rows, config.hidden_size), here + "in_proj.weight", first_row),
        )
        first_row += rows
    yield (
        there + "o_proj.weight",
        Placement((config.hidden_size, queries), here + "out_proj.weight"),
    )
    for name, size in norms.items():
        yield f"{there}{name}.weight", Placement((size,), here + name)


def _feed_forward(width: int, inner: int, there: str, here: str) -> Iterator[tuple[str, Placement]]:
    yield there + "gate_proj.weight", Placement((inner, width), here + "gate_up.weight")
    yield there + "up_proj.weight", Placement((inner, width), here + "gate_up.weight", inner)
    yield there + "down_proj.weight", Placement((width, inner), here + "down.weight")


def _experts(config: M3Config, there: str, here: str) -> Iterator[tuple[str, Placement]]:
    width, inner, count = config.hidden_size, config.expert_size, config.num_experts
    yield there + "gate.weight", Placement((count, width), here + "router", keeps_fp32=True)
    yield (
        there + "e_score_correction_bias",
        Placement((count,), here + "router_bias", keeps_fp32=True),
    )
    for expert in range(count):
        name = f"{there}experts.{expert}."
        yield name + "w1.weight", Placement((inner, width), here + "gate_up", 0, expert)
        yield name + "w3.weight", Placement((inner, width), here + "gate_up", inner, expert)
        yield name + "w2.weight", Placement((width, inner), here + "down", 0, expert)
    yield from _feed_forward(width, config.shared_size, there + "shared_experts.", here + "shared.")


def _vision(vision: VisionConfig, text_width: int) -> Iterator[tuple[str, Placement]]:
    there, width = "vision_tower.vision_model.", vision.hidden_size
    patch = (vision.num_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    yield (
        there + "embeddings.patch_embedding.weight",
        Placement((width, *patch), "vision.patch_embedding", keeps_fp32=True),
    )
    yield from _affine(there + "pre_layrnorm", (width,), "vision.input_norm")
    for layer in range(vision.num_layers):
        old, new = f"{there}encoder.layers.{layer}.", f"vision.layers.{layer}."
        yield from _affine(old + "layer_norm1", (width,), new + "attention_norm")
        for index, name in enumerate(("q_proj", "k_proj", "v_proj")):
            yield from _affine(
                f"{old}self_attn.{name}", (width, width), new + "in_proj", index * width
            )
        yield from _affine(old + "self_attn.out_proj", (width, width), new + "out_proj")
        yield from _affine(old + "layer_norm2", (width,), new + "mlp_norm")
        yield from _affine(old + "mlp.fc1", (vision.intermediate_size, width), new + "up")
        yield from _affine(old + "mlp.fc2", (width, vision.intermediate_size), new + "down")
    inner, merged = vision.projector_hidden_size, text_width * vision.merge_size**2
    yield from _affine("multi_modal_projector.linear_1", (inner, width), "projector.patch_up")
    yield from _affine(
        "multi_modal_projector.linear_2", (text_width, inner), "projector.patch_down"
    )
    yield from _affine("patch_merge_mlp.linear_1", (inner, merged), "projector.merge_up")
    yield from _affine("patch_merge_mlp.linear_2", (text_width, inner), "projector.merge_down")


def _affine(
    there: str, shape: Shape, here: str, first_row: int = 0
) -> Iterator[tuple[str, Placement]]:
    yield there + ".weight", Placement(shape, here + ".weight", first_row)
    yield there + ".bias", Placement(shape[:1], here + ".bias", first_row)
