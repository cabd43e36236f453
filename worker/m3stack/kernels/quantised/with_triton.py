"""Linears over MXFP8 weights in Triton: bf16 activations, weights decoded in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from m3stack.kernels.interface import Mxfp8Weight
from m3stack.kernels.moe.with_triton import FEW, MANY, SOME, Tiles, weight_tile
from m3stack.kernels.quantised.mxfp8 import GROUP_VALUES


def choose_tiles(num_tokens: int) -> Tiles:
    """Tiles by the tokens of a step; a function of sizes alone."""
    if num_tokens <= 16:
        return FEW
    return SOME if num_tokens <= 64 else MANY


@triton.jit
def _linear_kernel(
    x, elements, scales, out, num_tokens, num_outputs, x_row,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    GROUP: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_token, is_output = token < num_tokens, output < num_outputs
    total = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    for start in range(0, WIDTH, INPUTS):
        column = start + tl.arange(0, INPUTS)
        inside = column < WIDTH
        rows = tl.load(
            x + token[:, None].to(tl.int64) * x_row + column[None, :],
            mask=is_token[:, None] & inside[None, :],
            other=0.0,
        )
        if WIDEN:
            rows = rows.to(tl.float32)
        weights = weight_tile(
            elements, scales, output, column, is_output, inside, WIDTH, True, GROUP, WIDEN
        )
        total = tl.dot(weights, tl.trans(rows), total, input_precision="ieee")
    to = out + token[:, None].to(tl.int64) * num_outputs + output[None, :]
    result = tl.trans(total).to(out.dtype.element_ty)
    tl.store(to, result, mask=is_token[:, None] & is_output[None, :])


def linear_mxfp8(
    x: Tensor, weight: Mxfp8Weight, *, widen: bool = False, tiles: Tiles | None = None
) -> Tensor:
    """`x W^T` with the decoded weight; see `interface.LinearMxfp8`.

    Args:
        x: bf16 [..., in], dense in the last dim.
        widen: products in fp32, as Triton's interpreter needs for bf16 operands.
        tiles: sizes of the product, where the choice by size is not wanted.
    """
    num_outputs, width = weight.elements.shape
    assert weight.elements.is_contiguous(), "rows of the weight must stand back to back"
    assert weight.scales.is_contiguous(), "so must their scales"
    assert widen or x.dtype == torch.bfloat16, f"MXFP8 wants bf16, got {x.dtype}"
    rows = x.reshape(-1, width)
    assert rows.stride(1) == 1, "rows of x must be dense"
    out = torch.empty(*x.shape[:-1], num_outputs, dtype=x.dtype, device=x.device)
    num_tokens = rows.shape[0]
    if num_tokens == 0:
        return out
    tiles = tiles or choose_tiles(num_tokens)
    grid = (triton.cdiv(num_tokens, tiles.pairs), triton.cdiv(num_outputs, tiles.outputs))
    _linear_kernel[grid](
        rows, weight.elements, weight.scales, out, num_tokens, num_outputs, rows.stride(0),
        WIDTH=width, TOKENS=tiles.pairs, OUTPUTS=tiles.outputs, INPUTS=tiles.inputs,
        GROUP=GROUP_VALUES, WIDEN=widen, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out
