"""Ranks together hold the whole model, nothing twice but what is meant to be, evenly."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch

from m3stack.errors import StartupError
from m3stack.kernels.reference_table import reference_kernels
from m3stack.layers import Place
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.layout import checkpoint_layout
from m3stack.models.minimax_m3.model import M3Model
from m3stack.models.minimax_m3.ranks import WHOLE, Rank, tensor_rank
from m3stack.models.minimax_m3.slices import parameter_shapes, rank_slices
from tests.worker.models.minimax_m3.random_checkpoint import random_config
from tests.worker.models.minimax_m3.released import LAYERS, released_config, released_mxfp8_config

WORLDS = {
    "tp1": [WHOLE],
    "tp2": [Rank(r, 2) for r in range(2)],
    "tp4": [Rank(r, 4) for r in range(4)],
    "tp8": [Rank(r, 8) for r in range(8)],
    "tp4 ep4": [Rank(r, 4, r, 4) for r in range(4)],
    "tp4 ep2": [tensor_rank(r, 4, expert_parallel=2) for r in range(4)],
    "tp8 ep2 index in parts": [
        tensor_rank(r, 8, expert_parallel=2, index_in_parts=True) for r in range(8)
    ],
    "dp8 ep8": [Rank(0, 1, r, 8) for r in range(8)],
    "tp2 dp2 ep4": [Rank(r % 2, 2, r, 4) for r in range(4)],
}


def truncated(config: dict[str, Any]) -> M3Config:
    """The released widths, four layers of them."""
    text, schedule = config["text_config"], [0, 0, 0, 1]
    text |= {"num_hidden_layers": 4, "moe_layer_freq": schedule}
    text["sparse_attention_config"] |= {
        "sparse_attention_freq": schedule,
        "sparse_disable_index_value": schedule,
    }
    return M3Config.from_object(config)


CONFIGS = {
    "bf16": truncated(released_config()),
    "mxfp8": truncated(released_mxfp8_config()),
}


def copies_meant(name: str, world: list[Rank]) -> int:
    """How many ranks of a world should hold each value of a tensor."""
    size, tp = len(world), world[0].tp_size
    if ".experts." in name:
        return 1
    if "index_q_proj" in name and world[0].index_in_parts:
        return size
    if any(part in name for part in ("k_proj", "v_proj", "index_q_proj")):
        text = name.startswith("language") and "index_k_proj" not in name
        return (size // tp) * max(1, tp // 4) if text else size
    split = ("q_proj", "o_proj", "mlp.", "shared_experts", "lm_head", "embed_tokens")
    is_split = name.startswith("language") and any(part in name for part in split)
    return size // tp if is_split else size


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())
def test_ranks_together_hold_every_value_as_often_as_meant(world: list[Rank]) -> None:
    # half of the worlds as plain, half as quantised weights: the spans are the same
    config = CONFIGS["mxfp8" if len(world) > 2 else "bf16"]
    per_rank = [rank_slices(config, rank) for rank in world]
    for name, placement in checkpoint_layout(config).items():
        rows, columns = Counter(), Counter()
        values = 0
        for slices in per_rank:
            if name in slices:
                item = slices[name]
                rows.update(range(item.rows.first, item.rows.first + item.rows.count))
                columns.update(range(item.columns.first, item.columns.first + item.columns.count))
                values += item.rows.count * item.columns.count
        copies = copies_meant(name, world)
        assert values == copies * placement.numel, name
        # with even counts along both dims, no value can be missing while another stands twice
        assert len(rows) == placement.shape[0], name
        assert len(set(rows.values())) == 1, name
        assert len(columns) == placement.numel // placement.shape[0], name
        assert len(set(columns.values())) == 1, name


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())
def test_a_rank_s_parameters_are_filled_without_gap_or_overlap(world: list[Rank]) -> None:
    for rank in world:
        slices = rank_slices(CONFIGS["bf16"], rank)
        shapes = parameter_shapes(slices)
        held: Counter[str] = Counter()
        spans: dict[tuple[str, int | None], list[tuple[int, int]]] = {}
        for item in slices.values():
            held[item.parameter] += item.rows.count * item.columns.count
            span = (item.first_row, item.first_row + item.rows.count)
            spans.setdefault((item.parameter, item.expert), []).append(span)
        for name, shape in shapes.items():
            assert held[name] == torch.Size(shape).numel(), name
        for parts in spans.values():
            ends = sorted(parts)
            assert ends[0][0] == 0
            assert all(a[1] == b[0] for a, b in pairwise(ends))


@pytest.mark.parametrize("seed", range(3))
def test_the_whole_has_the_model_s_own_shapes(seed: int) -> None:
    config = M3Config.from_object(random_config(seed))
    place = Place(torch.device("meta"), torch.float32)
    model = M3Model(config, kernels=reference_kernels(), place=place)
    shapes = parameter_shapes(rank_slices(config, WHOLE))
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        assert shapes.pop(name) == (shape if len(shape) > 1 else (*shape, 1))
    assert not shapes


def test_eight_ranks_hold_whole_heads_and_share_the_kv_ones() -> None:
    slices = [rank_slices(CONFIGS["bf16"], rank) for rank in WORLDS["tp8"]]
    attention = LAYERS + "3.self_attn."
    firsts = [[part[attention + f"{n}_proj.weight"].rows.first for part in slices] for n in "qk"]
    assert firsts[0] == [rank * 8 * 128 for rank in range(8)]
    assert firsts[1] == [0, 0, 128, 128, 256, 256, 384, 384]
    # the index head of a group sits where its keys do
    index = [part[attention + "index_q_proj.weight"].rows.first for part in slices]
    assert index == firsts[1]
    shapes = parameter_shapes(slices[5])
    assert shapes["layers.3.attention.in_proj.weight"] == (1024 + 4 * 128, 6144)
    assert shapes["layers.0.feed_forward.gate_up.weight"] == (2 * 1536, 6144)
    assert shapes["layers.3.feed_forward.down"] == (128, 6144, 384)
    assert shapes["head.weight"] == (25008, 6144)


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (lambda: Rank(8, 8), "tensor-parallel rank is 8, expected 0 to 7"),
        (lambda: Rank(0, 1, -1, 4), "expert-parallel rank is -1, expected 0 to 3"),
        (lambda: Rank(0, 8, 0, 3), "3 expert-parallel and 8 tensor-parallel ranks: neither"),
        (lambda: Rank(5, 8, 1, 4), "expert-parallel rank is 1, expected 2, where tensor-par"),
        (
            lambda: tensor_rank(0, 4, expert_parallel=3),
            "expert_parallel is 3, expected a divisor of tensor_parallel, 4",
        ),
    ],
)
def test_ranks_that_make_no_sense_are_refused(rank: Any, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        rank()


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        # 200064 divides by 3, the 64 heads do not
        (Rank(0, 3), r"q_proj\.weight: 8192 in units of 128 cannot be split evenly over 3"),
        (Rank(0, 7), "embed_tokens.weight: 200064 cannot be split evenly over 7 ranks"),
        (Rank(0, 1, 0, 3), "experts: 128 cannot be split evenly over 3 ranks"),
    ],
)
def test_sizes_that_do_not_divide_are_named(rank: Rank, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        rank_slices(CONFIGS["bf16"], rank)


def test_groups_of_a_quantised_row_stay_whole() -> None:
    config = released_mxfp8_config()
    config["text_config"]["intermediate_size"] = 3072 + 128
    # 3200 columns are 100 groups, over 8 ranks 12.5 of them
    with pytest.raises(StartupError, match=r"w2\.weight: 3200 in units of 32 cannot be split"):
        rank_slices(truncated(config), Rank(0, 8))
    config = released_config()
    config["text_config"]["intermediate_size"] = 3072 + 128
    assert rank_slices(truncated(config), Rank(0, 8))
