"""Scales of a cache in e4m3, one power of two a layer and KV head, folded into the weights.

The rows of the projection that give a head's values are divided by its scale, the columns of the
output projection that read them are multiplied by it. Both are exact, so nothing is left to do at a
step, and every kernel stays as it is. Why these scales hold whatever is cached:
docs/decisions/0017.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from m3stack.errors import StartupError
from m3stack.kernels.interface import Mxfp8Weight
from m3stack.kernels.quantised import mxfp8
from m3stack.layers import TextLinear
from m3stack.models.minimax_m3.model import DecoderLayer, M3Model

LARGEST = 448.0
# above what rounding the normed row and the value itself to bf16 can add
ROUNDING = 1.0 + 2.0**-7


def fold_value_scales(model: M3Model) -> list[list[int]]:
    """Folds the scales into a loaded model whose sparse layers cache K and V in e4m3.

    Returns:
        The exponent of each of this rank's KV heads, by sparse layer.

    Raises:
        StartupError: keys could pass the largest number of e4m3, or weights kept in MXFP8 have no
            room for a scale; the message names the layer.
    """
    exponents = []
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        if layer.attention.is_sparse:
            _check_keys(number, layer)
            exponents.append(_fold(number, layer))
    return exponents


def _check_keys(number: int, layer: DecoderLayer) -> None:
    """Keys are normed: no longer than sqrt(D) times the largest 1 + w, rotated or not."""
    weight = layer.attention.k_norm.double()
    most = math.sqrt(weight.shape[0]) * float((1.0 + weight).abs().max())
    if not most <= LARGEST:
        raise StartupError(
            f"kv_dtype is fp8, but keys of layer {number} may reach {most:.0f}, past "
            f"{LARGEST:.0f}, the largest e4m3 number; choose kv_dtype auto"
        )


def _fold(number: int, layer: DecoderLayer) -> list[int]:
    attention = layer.attention
    exponents = value_exponents(_rows(attention.in_proj, attention.value_rows), layer)
    heads_per_group = attention.query_width // len(exponents)
    for group, exponent in enumerate(exponents):
        rows = attention.value_rows
        width = (rows.stop - rows.start) // len(exponents)
        first = rows.start + group * width
        columns = slice(group * heads_per_group, (group + 1) * heads_per_group)
        _shift(number, attention.in_proj, (slice(first, first + width), slice(None)), -exponent)
        _shift(number, attention.out_proj, (slice(None), columns), exponent)
    return exponents


def value_exponents(value_weight: Tensor, layer: DecoderLayer) -> list[int]:
    """The least exponent of each KV head under which none of its values can pass 448.

    A normed row is no longer than sqrt(M), so a value is at most sqrt(M) |w_i (1 + norm)|.

    Args:
        value_weight: fp64 [G * D, M].
    """
    normed = value_weight * (1.0 + layer.input_norm.double())
    bounds = torch.linalg.vector_norm(normed, dim=-1) * math.sqrt(normed.shape[-1]) * ROUNDING
    by_group = bounds.view(layer.attention.num_groups, -1).amax(-1).tolist()
    return [math.ceil(math.log2(max(bound, 1e-30) / LARGEST)) for bound in by_group]


def _rows(linear: TextLinear, rows: slice) -> Tensor:
    """fp64 values of these rows of a weight."""
    if linear.weight_scale is None:
        return linear.weight[rows].double()
    kept = Mxfp8Weight(linear.weight[rows], linear.weight_scale[rows])
    return mxfp8.decode(kept, torch.float32).double()


def _shift(number: int, linear: TextLinear, at: Sequence[slice], exponent: int) -> None:
    """Multiplies a part of a weight by 2^exponent, in place."""
    rows, columns = at
    if linear.weight_scale is None:
        linear.weight[rows, columns].mul_(2.0**exponent)
        return
    if columns != slice(None):
        columns = slice(columns.start // mxfp8.GROUP_VALUES, columns.stop // mxfp8.GROUP_VALUES)
    scales = linear.weight_scale[rows, columns]
    moved = scales.int() + exponent
    # what is clipped from below is less than 2^-110
    if int(moved.max()) > mxfp8.MOST_KEPT_SCALE:
        raise StartupError(
            f"kv_dtype is fp8, but MXFP8 weights of layer {number} leave no room for a scale of "
            f"2^{exponent}; choose kv_dtype auto, or mxfp8_weights decode"
        )
    scales.copy_(moved.clamp_min(0).to(torch.uint8))
