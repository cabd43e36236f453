"""The checkpoint's tensor list: name, shape, and the slice of our parameter each one fills.

These are the tensors of a plain checkpoint; `stored.py` says how a quantised one stores them.
Source: tensor names and shapes of the released BF16 repository (23,416 tensors).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from m3stack.models.minimax_m3.config import M3Config, VisionConfig
from m3stack.models.minimax_m3.ranks import Split

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
        split: how tensor-parallel ranks divide it.
        head_rows: rows of a head, where the split is by heads.
        is_quantisable: matrix of a text linear, which a quantised checkpoint stores in fewer bits.
    """

    shape: Shape
    parameter: str
    first_row: int = 0
    expert: int | None = None
    keeps_fp32: bool = False
    split: Split = Split.NONE
    head_rows: int = 0
    is_quantisable: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def checkpoint_layout(config: M3Config) -> dict[str, Placement]:
    """Every tensor of a checkpoint with this config, and nothing else, in a fixed order."""
    width, vocab = config.hidden_size, config.vocab_size
    layout = {
        "language_model.model.embed_tokens.weight": Placement(
            (vocab, width), "embedding", split=Split.ROWS
        ),
        "language_model.lm_head.weight": Placement((vocab, width), "head.weight", split=Split.ROWS),
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
    # name -> rows, how they are split, rows of a head
    parts = {
        "q_proj": (queries, Split.ROWS, config.head_dim),
        "k_proj": (keys, Split.KV_HEADS, config.head_dim),
        "v_proj": (keys, Split.KV_HEADS, config.head_dim),
    }
    norms = {"q_norm": config.head_dim, "k_norm": config.head_dim}
    if config.sparse_layers[layer]:
        parts |= {
            # one index query head a KV head, one index key for all
            "index_q_proj": (
                config.num_kv_heads * config.index_dim,
                Split.INDEX_HEADS,
                config.index_dim,
            ),
            "index_k_proj": (config.index_dim, Split.NONE, 0),
        }
        norms |= {"index_q_norm": config.index_dim, "index_k_norm": config.index_dim}
    first_row = 0
    for name, (rows, split, head_rows) in parts.items():
        placement = Placement(
            (rows, config.hidden_size),
            here + "in_proj.weight",
            first_row,
            split=split,
            head_rows=head_rows,
            is_quantisable=True,
        )
        yield f"{there}{name}.weight", placement
        first_row += rows
    yield (
        there + "o_proj.weight",
        Placement(
            (config.hidden_size, queries),
            here + "out_proj.weight",
            split=Split.COLUMNS,
            head_rows=config.head_dim,
            is_quantisable=True,
        ),
    )
    for name, size in norms.items():
        yield f"{there}{name}.weight", Placement((size,), here + name)


def _feed_forward(width: int, inner: int, there: str, here: str) -> Iterator[tuple[str, Placement]]:
    names = ("gate_proj", "up_proj", "down_proj")
    parameters = (here + "gate_up.weight", here + "down.weight")
    yield from _swiglu(width, inner, tuple(there + name for name in names), parameters)


def _swiglu(
    width: int,
    inner: int,
    names: tuple[str, ...],
    parameters: tuple[str, str],
    expert: int | None = None,
) -> Iterator[tuple[str, Placement]]:
    """Gate, up and down of one feed-forward; gate rows stand before up rows."""
    gate, up, down = names
    for index, name in enumerate((gate, up)):
        yield (
            name + ".weight",
            Placement(
                (inner, width),
                parameters[0],
                index * inner,
                expert,
                split=Split.ROWS,
                is_quantisable=True,
            ),
        )
    yield (
        down + ".weight",
        Placement(
            (width, inner), parameters[1], 0, expert, split=Split.COLUMNS, is_quantisable=True
        ),
    )


def _experts(config: M3Config, there: str, here: str) -> Iterator[tuple[str, Placement]]:
    width, inner, count = config.hidden_size, config.expert_size, config.num_experts
    yield there + "gate.weight", Placement((count, width), here + "router", keeps_fp32=True)
    yield (
        there + "e_score_correction_bias",
        Placement((count,), here + "router_bias", keeps_fp32=True),
    )
    for expert in range(count):
        names = tuple(f"{there}experts.{expert}.{name}" for name in ("w1", "w3", "w2"))
        yield from _swiglu(width, inner, names, (here + "gate_up", here + "down"), expert)
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
