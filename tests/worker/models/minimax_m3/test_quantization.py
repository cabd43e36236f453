"""quantization_config is taken as released, and anything else is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from m3stack.errors import StartupError
from m3stack.models.minimax_m3.quantization import (
    Quantization,
    WeightFormat,
    read_quantization,
    released_quantization_config,
)
from tests.worker.models.minimax_m3.released import LAYERS, released_mxfp8_config

RELEASED = released_mxfp8_config()["quantization_config"]
ATTENTION = LAYERS + "7.self_attn.q_proj"
EXPERT = LAYERS + "7.block_sparse_moe.experts.3.w1"


def mixed(**changes: Any) -> dict[str, Any]:
    """The object that ModelOpt writes for MXFP8 with NVFP4 experts."""
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": None,
        "exclude_modules": ["lm_head"],
        "quantized_layers": {
            ATTENTION: {"quant_algo": "MXFP8"},
            EXPERT: {"quant_algo": "NVFP4", "group_size": 16},
        },
    } | changes


def test_the_object_that_we_write_is_the_released_one() -> None:
    gates = [f"{LAYERS}{layer}.block_sparse_moe.gate" for layer in range(3, 60)]
    assert released_quantization_config(gates) == RELEASED


@pytest.mark.parametrize(
    ("ignored", "is_plain"),
    [
        ("lm_head", False),
        (ATTENTION, True),
        ("q_proj", True),
        ("self_attn", True),
        ("layers.7", True),
        ("layers.70", False),
        ("layers.7.self_attn.k_proj", False),
        # a part of a component is not the component
        ("proj", False),
        ("q_pro", False),
        ("*.7.*.q_proj", True),
        ("layers.*.self_attn", True),
        ("*mlp*", False),
    ],
)
def test_ignored_layers_name_modules_parents_and_tails(ignored: str, is_plain: bool) -> None:
    quantization = read_quantization(RELEASED | {"ignored_layers": [ignored]})
    expected = WeightFormat.PLAIN if is_plain else WeightFormat.MXFP8
    assert quantization.format_of(ATTENTION) is expected


def test_the_mixed_export_names_every_layer() -> None:
    quantization = read_quantization(mixed())
    assert isinstance(quantization, Quantization)
    assert quantization.format_of(ATTENTION) is WeightFormat.MXFP8
    assert quantization.format_of(EXPERT) is WeightFormat.NVFP4
    assert quantization.format_of(LAYERS + "7.self_attn.k_proj") is WeightFormat.PLAIN


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "quantization_config has no quant_method"),
        ({"quant_method": 3}, "has no quant_method"),
        ({"quant_method": "fp8"}, "quantised by 'fp8' are not supported; use .*BF16.*MXFP8"),
        ({"quant_method": "quark"}, r"quantised by 'quark' \(that is how MXFP4 repositories"),
        ({"quant_method": "mxfp4"}, "'mxfp4' .*are not supported"),
        (RELEASED | {"weight_block_size": [128, 128]}, r"weight_block_size is \[128, 128\]"),
        (RELEASED | {"activation_scheme": "static"}, 'activation_scheme is "static"'),
        (RELEASED | {"moe_quant_algo": "NVFP4"}, "unknown key moe_quant_algo"),
        (RELEASED | {"ignored_layers": "lm_head"}, "expected a list of module names"),
        ({"quant_method": "mxfp8"}, "missing key weight_block_size"),
        (mixed(quant_algo="NVFP4"), 'quant_algo is "NVFP4", expected "MIXED_PRECISION"'),
        (mixed(kv_cache_quant_algo="FP8"), 'kv_cache_quant_algo is "FP8", expected null'),
        (mixed(quantized_layers={}), "quantized_layers is empty"),
        (
            mixed(quantized_layers={EXPERT: {"quant_algo": "NVFP4", "group_size": 32}}),
            rf"quantized_layers\.{EXPERT} is .*32.*expected MXFP8, or NVFP4 in groups of 16",
        ),
    ],
)
def test_what_cannot_be_honoured_is_named(data: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        read_quantization(data)
