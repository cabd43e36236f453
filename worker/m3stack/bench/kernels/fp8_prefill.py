"""Rows of the report for prefill attention over e4m3 pages, beside the same over bf16 pages."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from m3stack.bench.kernels.decode import quantised_in_parts
from m3stack.bench.kernels.harness import Case, Ceilings, Prepared, require_close
from m3stack.bench.kernels.prefill import (
    ATTENTION_LIMIT,
    CHUNK,
    GROUPS,
    SCALE,
    PrefillInputs,
    PrefillShape,
    attend,
    calls_on,
    input_sets,
    library,
)
from m3stack.kernels.interface import LayerPages
from m3stack.kernels.msa.decode.cuda_library import DecodeLibrary
from m3stack.kernels.msa.decode.fp8_pages import Fp8Pages
from m3stack.kernels.msa.decode.with_cuda import CudaDecode
from m3stack.kernels.msa.prefill.widened_pages import block_attention_fp8
from m3stack.kernels.msa.prefill.with_cuda import CudaPrefill
from m3stack.kernels.msa.with_cuda import FEW_FP8_LINES


def _dequantised(pages: Fp8Pages) -> LayerPages:
    """Exactly what the pages stand for: the scales are powers of two."""
    assert pages.k_scale_PG is not None
    assert pages.v_scale_PG is not None
    k, v = (
        pool.to(torch.bfloat16) * scale_PG[..., None, None].to(torch.bfloat16)
        for pool, scale_PG in (
            (pages.k_PGBD, pages.k_scale_PG),
            (pages.v_PGBD, pages.v_scale_PG),
        )
    )
    return LayerPages(k, v, None)


def prepare(shape: PrefillShape, ceilings: Ceilings) -> Prepared:
    """Attention alone, the selection given."""
    kernels, inputs = CudaPrefill(library()), input_sets(shape)
    # as the worker does: so few rows read the pages in place
    in_place = CudaDecode(DecodeLibrary()) if shape.chunk * GROUPS <= FEW_FP8_LINES else None
    pools = [quantised_in_parts(one.batch.pages) for one in inputs]

    def over_fp8(one: PrefillInputs, pages: Fp8Pages) -> Tensor:
        inputs = (one.batch.q_THD, pages, one.blocks_GTK, one.batch.rows, SCALE)
        if in_place is not None:
            return in_place.block_attention_fp8(*inputs)
        return block_attention_fp8(kernels.block_attention, *inputs)

    def check() -> None:
        first = inputs[0]
        expected = kernels.block_attention(
            first.batch.q_THD, _dequantised(pools[0]), first.blocks_GTK, first.batch.rows, SCALE
        )
        actual = over_fp8(first, pools[0])
        require_close(actual, expected, limit=ATTENTION_LIMIT, what="attention over e4m3 pages")

    return Prepared(
        check=check,
        calls=[partial(over_fp8, *pair) for pair in zip(inputs, pools, strict=True)],
        floor_us=shape.floor_us(ceilings, shape.attend_flops()),
        peers={"bf16": calls_on(partial(attend, kernels), inputs)},
        flops=shape.attend_flops(),
        graph=shape.chunk < 1024,
    )


SHAPES = {
    "attend_fp8_8k_after_128k": PrefillShape(CHUNK, 1 << 17),
    "attend_fp8_128_after_64k": PrefillShape(128, 1 << 16),
}
CASES = tuple(
    Case(name, shape.describe("attention, e4m3 KV"), partial(prepare, shape))
    for name, shape in SHAPES.items()
)
