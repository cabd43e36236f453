"""Routed experts in Triton: two grouped products with the clamped SwiGLU between, then the sum.

Weights are the left operand of the products, so that few tokens do not leave the matrix units
idle, and so that MXFP8 weights, which are decoded in registers, need not go back to shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from m3stack.kernels.interface import Mxfp8Weight, SharedExpert, Weight
from m3stack.kernels.moe.grouping_with_triton import group_pairs
from m3stack.kernels.moe.routing_with_triton import TritonRouter
from m3stack.kernels.quantised.mxfp8 import GROUP_VALUES


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes of one grouped product.

    Attributes:
        pairs: of a block.
        outputs: rows of a weight tile.
        inputs: columns of a weight tile.
        shared_blocks: neighbouring blocks that read a weight tile one after another.
    """

    pairs: int
    outputs: int
    inputs: int
    shared_blocks: int
    num_warps: int
    num_stages: int


# bytes in flight matter for few tokens, reuse of tiles for many; to be measured on a GPU
FEW = Tiles(pairs=16, outputs=64, inputs=128, shared_blocks=1, num_warps=4, num_stages=4)
SOME = Tiles(pairs=32, outputs=128, inputs=64, shared_blocks=1, num_warps=4, num_stages=4)
MANY = Tiles(pairs=128, outputs=128, inputs=64, shared_blocks=4, num_warps=8, num_stages=3)
COMBINED_COLUMNS = 1024


def choose_tiles(average: float) -> Tiles:
    """Tiles by the pairs an expert of any rank has on average; a function of sizes alone."""
    if average <= 8:
        return FEW
    return SOME if average <= 48 else MANY


def fitted(tiles: Tiles, dtype: torch.dtype) -> Tiles:
    """The same bytes of shared memory for wider elements: fewer columns."""
    return replace(tiles, inputs=tiles.inputs * 2 // max(dtype.itemsize, 2))


@triton.jit
def weight_tile(
    elements, scales, row, column, is_row, is_column, width,
    MXFP8: tl.constexpr, GROUP: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """[rows, columns] of one expert's matrix in the activations' dtype; fp32 if widened."""
    at = row[:, None].to(tl.int64) * width + column[None, :]
    tile = tl.load(elements + at, mask=is_row[:, None] & is_column[None, :], other=0.0)
    if MXFP8:
        rows: tl.constexpr = tile.shape[0]
        groups: tl.constexpr = tile.shape[1] // GROUP
        group = tl.min(column, 0) // GROUP + tl.arange(0, groups)
        scale_at = row[:, None].to(tl.int64) * (width // GROUP) + group[None, :]
        is_scale = is_row[:, None] & (group * GROUP < width)[None, :]
        byte = tl.load(scales + scale_at, mask=is_scale, other=127)
        if WIDEN:
            bits = tl.where(byte == 0, 1 << 22, byte.to(tl.int32) << 23)
            factor = tl.where(byte == 255, float("nan"), bits.to(tl.float32, bitcast=True))
            wide = tile.to(tl.float32)
        else:
            # the byte is a bf16 exponent; the product of a power of two is exact
            bits = tl.where(byte == 0, 1 << 6, byte.to(tl.int16) << 7)
            bits = tl.where(byte == 255, 0x7FC0, bits).to(tl.int16)
            factor = bits.to(tl.bfloat16, bitcast=True)
            wide = tile.to(tl.bfloat16)
        wide = tl.reshape(wide, [rows, groups, GROUP]) * factor[:, :, None]
        tile = tl.reshape(wide, [rows, groups * GROUP])
    elif WIDEN:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _block_of_program(max_blocks, num_tiles, SHARED: tl.constexpr):
    """(block, output tile): neighbouring programs share a weight tile between their blocks."""
    program = tl.program_id(0)
    in_group = SHARED * num_tiles
    first = program // in_group * SHARED
    size = tl.minimum(max_blocks - first, SHARED)
    inside = program % in_group
    return first + inside % size, inside // size


@triton.jit
def _up_kernel(
    x, elements, scales, pairs, experts, hidden,
    num_pairs, max_blocks, x_row, alpha, limit,
    CHOSEN: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr,
    PAIRS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, SHARED: tl.constexpr,
    MXFP8: tl.constexpr, GROUP: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    block, tile = _block_of_program(max_blocks, tl.cdiv(INNER, OUTPUTS), SHARED)
    expert = tl.load(experts + block)
    if expert >= 0:
        pair = tl.load(pairs + block * PAIRS + tl.arange(0, PAIRS))
        is_pair = pair < num_pairs
        token = (pair // CHOSEN).to(tl.int64)
        output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
        is_output = output < INNER
        elements += expert.to(tl.int64) * (2 * INNER * WIDTH)
        scales += expert.to(tl.int64) * (2 * INNER * (WIDTH // GROUP))
        gate = tl.zeros([OUTPUTS, PAIRS], tl.float32)
        up = tl.zeros([OUTPUTS, PAIRS], tl.float32)
        for start in range(0, WIDTH, INPUTS):
            column = start + tl.arange(0, INPUTS)
            inside = column < WIDTH
            rows = tl.load(
                x + token[:, None] * x_row + column[None, :],
                mask=is_pair[:, None] & inside[None, :],
                other=0.0,
            )
            if WIDEN:
                rows = rows.to(tl.float32)
            inputs = tl.trans(rows)
            gates = weight_tile(
                elements, scales, output, column, is_output, inside, WIDTH, MXFP8, GROUP, WIDEN
            )
            gate = tl.dot(gates, inputs, gate, input_precision="ieee")
            ups = weight_tile(
                elements, scales, INNER + output, column, is_output, inside, WIDTH,
                MXFP8, GROUP, WIDEN,
            )  # fmt: skip
            up = tl.dot(ups, inputs, up, input_precision="ieee")
        # comparisons that keep NaN, as clamp does
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        acted = tl.trans((up + 1.0) * gate * tl.sigmoid(alpha * gate))
        to = hidden + pair[:, None].to(tl.int64) * INNER + output[None, :]
        keep = is_pair[:, None] & is_output[None, :]
        tl.store(to, acted.to(hidden.dtype.element_ty), mask=keep)


@triton.jit
def _down_kernel(
    hidden, elements, scales, pairs, experts, weights, results,
    num_pairs, max_blocks, factor,
    HAS_WEIGHTS: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr,
    PAIRS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, SHARED: tl.constexpr,
    MXFP8: tl.constexpr, GROUP: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    block, tile = _block_of_program(max_blocks, tl.cdiv(WIDTH, OUTPUTS), SHARED)
    expert = tl.load(experts + block)
    if expert >= 0:
        pair = tl.load(pairs + block * PAIRS + tl.arange(0, PAIRS))
        is_pair = pair < num_pairs
        output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
        is_output = output < WIDTH
        elements += expert.to(tl.int64) * (WIDTH * INNER)
        scales += expert.to(tl.int64) * (WIDTH * (INNER // GROUP))
        total = tl.zeros([OUTPUTS, PAIRS], tl.float32)
        for start in range(0, INNER, INPUTS):
            column = start + tl.arange(0, INPUTS)
            inside = column < INNER
            rows = tl.load(
                hidden + pair[:, None].to(tl.int64) * INNER + column[None, :],
                mask=is_pair[:, None] & inside[None, :],
                other=0.0,
            )
            if WIDEN:
                rows = rows.to(tl.float32)
            downs = weight_tile(
                elements, scales, output, column, is_output, inside, INNER, MXFP8, GROUP, WIDEN
            )
            total = tl.dot(downs, tl.trans(rows), total, input_precision="ieee")
        result = tl.trans(total)
        if HAS_WEIGHTS:
            weight = tl.load(weights + pair, mask=is_pair, other=0.0).to(tl.float32)
            result *= (weight * factor)[:, None]
        to = results + pair[:, None].to(tl.int64) * WIDTH + output[None, :]
        tl.store(to, result, mask=is_pair[:, None] & is_output[None, :])


@triton.jit
def combine_kernel(
    results, ids, own, out,
    CHOSEN: tl.constexpr, HAS_OWN: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Adds up each token's results [T * k, WIDTH], and the shared expert's [T, WIDTH]."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    total = tl.zeros([COLUMNS], tl.float32)
    for choice in tl.static_range(CHOSEN):
        # results of negative ids were never written
        used = tl.load(ids + token * CHOSEN + choice) >= 0
        one = results + (token * CHOSEN + choice) * WIDTH + column
        total += tl.load(one, mask=inside & used, other=0.0).to(tl.float32)
    if HAS_OWN:
        total += tl.load(own + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + column, total.to(out.dtype.element_ty), mask=inside)


def combine(results: Tensor, ids_Tk: Tensor, out_TM: Tensor, own_TM: Tensor | None) -> None:
    """Writes each token's sum of its experts' results, and its shared one's, into `out_TM`."""
    (num_tokens, chosen), width = ids_Tk.shape, out_TM.shape[1]
    columns = min(COMBINED_COLUMNS, triton.next_power_of_2(width))
    combine_kernel[(num_tokens, triton.cdiv(width, columns))](
        results, ids_Tk, results if own_TM is None else own_TM, out_TM,
        CHOSEN=chosen, HAS_OWN=own_TM is not None, WIDTH=width, COLUMNS=columns, num_warps=4,
    )  # fmt: skip


class TritonExperts(TritonRouter):
    """Routing and routed experts for one device.

    Args:
        experts: of a layer, those of all ranks, whose pairs are in every call, with negative ids;
            those whose weights are given where None.
        widen: products in fp32, as Triton's interpreter needs for bf16 operands.
        tiles: sizes of the products, where the choice by size is not wanted.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        experts: int | None = None,
        widen: bool = False,
        tiles: Tiles | None = None,
    ) -> None:
        super().__init__(device)
        self._experts, self._widen, self._tiles = experts, widen, tiles

    def run_experts(
        self,
        x_TM: Tensor,
        gate_up_EfM: Weight,
        down_EMF: Weight,
        ids_Tk: Tensor,
        weights_Tk: Tensor,
        alpha: float,
        limit: float,
        *,
        shared: SharedExpert | None = None,
        factor: float = 1.0,
    ) -> Tensor:
        """Weighted sum of the chosen experts; see `interface.RunExperts`.

        Sums are fp32; the activated hidden values are rounded to the dtype of `x_TM` between the
        products, as the second one needs. MXFP8 weights want bf16 tokens.
        """
        num_tokens = ids_Tk.shape[0]
        out = torch.empty_like(x_TM, memory_format=torch.contiguous_format)
        if num_tokens == 0:
            return out
        num_pairs, width = ids_Tk.numel(), x_TM.shape[1]
        rows = num_pairs + num_tokens * (shared is not None)
        results = torch.empty(rows, width, dtype=torch.float32, device=x_TM.device)
        ids_Tk, weights_Tk = ids_Tk.contiguous(), weights_Tk.contiguous()
        clamp = (alpha, limit)
        matrices = (_parts(gate_up_EfM), _parts(down_EMF))
        average = num_pairs / (self._experts or matrices[0].elements.shape[0])
        given = (weights_Tk, factor)
        self._products(x_TM, *matrices, ids_Tk, given, clamp, results[:num_pairs], average=average)
        if shared is not None:
            first_T1 = torch.zeros(num_tokens, 1, dtype=torch.int32, device=x_TM.device)
            matrices = (_parts(shared.gate_up_fM).stack(), _parts(shared.down_MF).stack())
            own = results[num_pairs:]
            self._products(x_TM, *matrices, first_T1, None, clamp, own, average=num_tokens)
        combine(results, ids_Tk, out, None if shared is None else results[num_pairs:])
        return out

    def _products(
        self,
        x_TM: Tensor,
        up: _Parts,
        down: _Parts,
        ids_Tk: Tensor,
        weights: tuple[Tensor, float] | None,
        clamp: tuple[float, float],
        results: Tensor,
        *,
        average: float,
    ) -> None:
        """Writes the weighted result of each pair, fp32 [T * k, M]; not those of negative ids."""
        num_experts, twice_inner, width = up.elements.shape
        inner, chosen, num_pairs = twice_inner // 2, ids_Tk.shape[1], ids_Tk.numel()
        _check_inputs(x_TM, up, down, self._widen)
        if num_pairs == 0:
            return
        tiles = self._tiles or fitted(choose_tiles(average), up.elements.dtype)
        blocks = group_pairs(ids_Tk, num_experts, tiles.pairs)
        hidden = torch.empty(num_pairs, inner, dtype=x_TM.dtype, device=x_TM.device)
        sizes = {
            "PAIRS": tiles.pairs, "OUTPUTS": tiles.outputs, "INPUTS": tiles.inputs,
            "SHARED": tiles.shared_blocks, "GROUP": GROUP_VALUES, "WIDEN": self._widen,
            "num_warps": tiles.num_warps, "num_stages": tiles.num_stages,
        }  # fmt: skip
        grid = (blocks.max_blocks * triton.cdiv(inner, tiles.outputs),)
        _up_kernel[grid](
            x_TM, up.elements, up.scales, blocks.pairs, blocks.experts, hidden,
            num_pairs, blocks.max_blocks, x_TM.stride(0), *clamp,
            CHOSEN=chosen, WIDTH=width, INNER=inner, MXFP8=up.is_mxfp8, **sizes,
        )  # fmt: skip
        grid = (blocks.max_blocks * triton.cdiv(width, tiles.outputs),)
        given, factor = weights or (results, 1.0)
        _down_kernel[grid](
            hidden, down.elements, down.scales, blocks.pairs, blocks.experts, given, results,
            num_pairs, blocks.max_blocks, factor, HAS_WEIGHTS=weights is not None,
            WIDTH=width, INNER=inner, MXFP8=down.is_mxfp8, **sizes,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Parts:
    """A weight as kernels take it; plain ones have no scales, and pass something in their place."""

    elements: Tensor
    scales: Tensor
    is_mxfp8: bool

    def stack(self) -> _Parts:
        """A matrix as a stack of one."""
        return _Parts(self.elements[None], self.scales[None], self.is_mxfp8)


def _parts(weight: Weight) -> _Parts:
    if isinstance(weight, Mxfp8Weight):
        return _Parts(weight.elements, weight.scales, True)
    return _Parts(weight, weight, False)


def _check_inputs(x_TM: Tensor, up: _Parts, down: _Parts, widen: bool) -> None:
    assert x_TM.stride(1) == 1, "token rows must be dense"
    for part in (up, down):
        assert part.elements.is_contiguous(), "experts must stand back to back"
        assert part.scales.is_contiguous(), "so must their scales"
        if part.is_mxfp8:
            assert widen or x_TM.dtype == torch.bfloat16, f"MXFP8 wants bf16, got {x_TM.dtype}"
        else:
            assert part.elements.dtype == x_TM.dtype, (part.elements.dtype, x_TM.dtype)
