"""Rows of the report for prefill attention over e4m3 pages, beside the same over bf16 pages."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from m3stack.bench.kernels.decode import quantised_in_parts
from m3stack.bench.kernels.harness import Call, Case, Ceilings, Prepared, require_close
from m3stack.bench.kernels.prefill import (
    ATTENTION_LIMIT,
    CHUNK,
    SCALE,
    PrefillInputs,
    PrefillShape,
    attend,
    calls_on,
    input_sets,
)
from m3stack.kernels.interface import LayerPages
from m3stack.kernels.msa.decode.fp8_pages import Fp8Pages
from m3stack.kernels.msa.with_cuda import CudaMsa, Fp8Way, choose_fp8_way
from m3stack.memory_plan import released_model_config
from m3stack.rank_model import kernel_shape

# rows from which ways are not timed that lose by far
MANY_ROWS = 1024


def _dequantised(pages: Fp8Pages) -> tuple[Tensor, Tensor]:
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
    return k, v


@cache
def kernels() -> CudaMsa:
    """The sm_90a kernels, once a run."""
    return CudaMsa(kernel_shape(released_model_config(), torch.bfloat16))


def prepare(shape: PrefillShape, ceilings: Ceilings) -> Prepared:
    """Attention alone, the selection given: the way a worker takes, then the others."""
    inputs = input_sets(shape)
    pools = [quantised_in_parts(one.batch.pages) for one in inputs]
    taken = choose_fp8_way(shape.chunk, pools[0], inputs[0].batch.rows)
    # ways that lose by far would take most of the run
    slow = {Fp8Way.DECODE} if shape.chunk >= MANY_ROWS else set()
    others = [way for way in Fp8Way if way is not taken and way not in slow]

    def over_fp8(way: Fp8Way, one: PrefillInputs, pages: Fp8Pages) -> Tensor:
        return kernels().block_attention_fp8(
            one.batch.q_THD, pages, one.blocks_GTK, one.batch.rows, SCALE, way=way
        )

    def over_bf16(one: PrefillInputs) -> Tensor:
        return attend(kernels().prefill, one)

    def check() -> None:
        one = inputs[0]
        exact = LayerPages(*_dequantised(pools[0]), None)
        expected = over_bf16(replace(one, batch=replace(one.batch, pages=exact)))
        for way in (taken, *others):
            what = f"attention over e4m3 pages, {way.value}"
            require_close(over_fp8(way, one, pools[0]), expected, limit=ATTENTION_LIMIT, what=what)

    def calls(way: Fp8Way) -> list[Call]:
        return [partial(over_fp8, way, *pair) for pair in zip(inputs, pools, strict=True)]

    return Prepared(
        check=check,
        calls=calls(taken),
        floor_us=shape.floor_us(ceilings, shape.attend_flops()),
        peers={"bf16": calls_on(over_bf16, inputs)} | {way.value: calls(way) for way in others},
        flops=shape.attend_flops(),
        notes=f"by {taken.value}",
        graph=shape.chunk < MANY_ROWS,
    )


SHAPES = {
    "attend_fp8_8k_after_128k": PrefillShape(CHUNK, 1 << 17),
    **{
        f"attend_fp8_{rows}_after_64k": PrefillShape(rows, 1 << 16)
        for rows in (32, 64, 128, 256, 512)
    },
    "attend_fp8_1k_after_64k": PrefillShape(1024, 1 << 16),
}
CASES = tuple(
    Case(name, shape.describe("attention, e4m3 KV"), partial(prepare, shape))
    for name, shape in SHAPES.items()
)
