"""Rotary frequencies against transformers' own, from both forms of config.json."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLRotaryEmbedding
from transformers.utils import logging as transformers_logging

from m3stack.errors import StartupError
from m3stack.models.minimax_m3.config import M3Config
from tests.worker.models.minimax_m3.released import released_config

CPU = torch.device("cpu")
transformers_logging.set_verbosity_error()


def random_rope(draw: random.Random) -> dict[str, Any]:
    """A `rope_scaling` as checkpoints write it, without theta."""
    kind = draw.choice(["default", "linear", "yarn", "yarn", "yarn", "llama3"])
    rope: dict[str, Any] = {draw.choice(["type", "rope_type"]): kind}
    if kind == "default":
        return rope
    rope["factor"] = draw.choice([1.0, 2.0, 4, 16.0, 40.0])
    if draw.random() < 0.7:
        rope["original_max_position_embeddings"] = draw.choice([4096, 32768, 262144, 524288])
    if kind == "llama3":
        rope |= {"low_freq_factor": draw.choice([1.0, 2.0]), "high_freq_factor": 4.0}
    if kind == "yarn":
        options: dict[str, Any] = {
            "beta_fast": draw.choice([32.0, 8.0, 1.5]),
            "beta_slow": draw.choice([1.0, 0.5]),
            "truncate": draw.choice([True, False]),
            "attention_factor": draw.choice([1.0, 0.7, 1.3]),
            "mscale": draw.choice([1.0, 0.707, 0.0]),
            "mscale_all_dim": draw.choice([1.0, 0.5, 0.0]),
        }
        rope |= {key: value for key, value in options.items() if draw.random() < 0.4}
    return rope


def config_with(form: str, rope: dict[str, Any], theta: float, **text: Any) -> dict[str, Any]:
    data = copy.deepcopy(released_config())
    data["text_config"] |= text
    if form == "rope_scaling":
        data["text_config"] |= {"rope_theta": theta, "rope_scaling": rope}
    else:
        del data["text_config"]["rope_theta"]
        renamed = {("rope_type" if key == "type" else key): value for key, value in rope.items()}
        data["text_config"]["rope_parameters"] = renamed | {"rope_theta": theta}
    return data


def theirs(text: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """Frequencies and attention factor by transformers."""
    config = MiniMaxM3VLTextConfig(**copy.deepcopy(text))
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        return MiniMaxM3VLRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[kind](config)


@given(
    seed=st.integers(0, 1 << 30),
    form=st.sampled_from(["rope_scaling", "rope_parameters"]),
    theta=st.sampled_from([10_000.0, 500_000.0, 5_000_000.0]),
    sizes=st.sampled_from([(128, 64), (128, 128), (32, 16), (24, 12)]),
    max_tokens=st.sampled_from([4096, 524288, 1048576]),
)
@settings(max_examples=120, deadline=None)
def test_frequencies_and_attention_factor_are_those_of_transformers(
    seed: int, form: str, theta: float, sizes: tuple[int, int], max_tokens: int
) -> None:
    head_dim, rotary_dim = sizes
    rope = random_rope(random.Random(seed))
    data = config_with(
        form,
        rope,
        theta,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        partial_rotary_factor=rotary_dim / head_dim,
        max_position_embeddings=max_tokens,
    )
    data["text_config"]["sparse_attention_config"]["sparse_index_dim"] = head_dim
    config = M3Config.from_object(data)
    expected, factor = theirs(data["text_config"])
    given = config.rope.frequencies(rotary_dim, CPU)
    assert given.dtype == torch.float32
    # the same operations in another order: one rounding apart
    torch.testing.assert_close(given, expected, rtol=3e-7, atol=0)
    assert config.rope.attention_factor == pytest.approx(factor, rel=1e-12)


def test_the_two_forms_say_the_same() -> None:
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 524288}
    forms = ("rope_scaling", "rope_parameters")
    one, other = (M3Config.from_object(config_with(form, rope, 5e6)).rope for form in forms)
    assert one == other
    plain = M3Config.from_object(released_config()).rope
    frequencies = one.frequencies(64, CPU)
    # fast channels are kept, slow ones are halved
    assert torch.equal(frequencies[:4], plain.frequencies(64, CPU)[:4])
    assert torch.allclose(frequencies[-4:], plain.frequencies(64, CPU)[-4:] / 2)
    assert one.attention_factor > 1


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"type": "dynamic", "factor": 2.0}, "rope_type is 'dynamic', expected one of default"),
        ({"type": "yarn"}, "missing key factor"),
        ({"type": "yarn", "factor": 0.5}, "factor is 0.5, expected at least 1"),
        ({"type": "yarn", "rope_type": "linear", "factor": 2}, "type and rope_type differ"),
        ({"type": "yarn", "factor": 2, "low_freq_factor": 1}, "unknown key low_freq_factor"),
        ({"type": "yarn", "factor": 2, "beta_fast": 1, "beta_slow": 2}, "beta_fast is 1"),
        ({"type": "yarn", "factor": 2, "truncate": 1}, "truncate is 1, expected true or false"),
        ({"type": "linear", "factor": "2"}, "factor is"),
        (
            {"type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4},
            "low_freq_factor is 4",
        ),
        ({"type": "yarn", "factor": 2, "partial_rotary_factor": 0.25}, "partial_rotary_factor is"),
        ({"type": "yarn", "factor": 2, "rope_theta": 7.0}, "rope_theta is 5000000, expected 7.0"),
    ],
)
def test_scaling_that_cannot_be_honoured_is_refused_by_name(
    rope: dict[str, Any], message: str
) -> None:
    data = copy.deepcopy(released_config())
    data["text_config"]["rope_scaling"] = rope
    with pytest.raises(StartupError, match=message):
        M3Config.from_object(data)


def test_both_forms_at_once_and_neither_are_refused() -> None:
    data = config_with("rope_parameters", {"rope_type": "default"}, 5e6)
    data["text_config"]["rope_scaling"] = {"type": "default"}
    with pytest.raises(StartupError, match="null beside rope_parameters"):
        M3Config.from_object(data)
    data = copy.deepcopy(released_config())
    del data["text_config"]["rope_theta"]
    with pytest.raises(StartupError, match="missing key rope_theta"):
        M3Config.from_object(data)


def test_null_scaling_is_no_scaling() -> None:
    data = copy.deepcopy(released_config())
    data["text_config"]["rope_scaling"] = None
    assert M3Config.from_object(data).rope == M3Config.from_object(released_config()).rope
