"""Rows of the report for the attention prologue: norms, rotary and cache writes of one layer."""

from __future__ import annotations

from functools import partial

import torch

from m3stack.bench.kernels.harness import (
    Case,
    Ceilings,
    Prepared,
    num_input_sets,
    require_close,
)
from m3stack.kernels.interface import HeadNorms, LayerPages
from m3stack.kernels.pointwise import reference, with_triton

HEADS, GROUPS, DIM, ROTATED, PAGE = 64, 4, 128, 64, 128
# q, k, v, index q and index k of one projection row
ROW_HEADS = HEADS + 3 * GROUPS + 1
# two bf16 roundings whose order of summation differs
LIMIT = 5e-3


def inputs(num_tokens: int, seed: int) -> tuple:
    """Arguments of the prologue: slices of one projection row, pages for every token."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    shape = (num_tokens, ROW_HEADS, DIM)
    row = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
    q, k, v, index_q, index_k = row.split((HEADS, GROUPS, GROUPS, GROUPS, 1), dim=1)
    weights = 0.1 * torch.randn(4, DIM, generator=generator, device="cuda")
    angle = 6.3 * torch.rand(num_tokens, ROTATED // 2, generator=generator, device="cuda")
    num_pages = -(-num_tokens // PAGE) + 1
    pool = torch.zeros(num_pages, GROUPS, PAGE, DIM, device="cuda", dtype=torch.bfloat16)
    pages = LayerPages(pool, pool.clone(), pool[:, 0].clone())
    slots = torch.randperm(num_pages * PAGE, generator=generator, device="cuda")[:num_tokens]
    norms = HeadNorms(weights[0], weights[1], weights[2], weights[3], 1e-6)
    return q, k, v, index_q, index_k[:, 0], norms, angle.cos(), angle.sin(), slots, pages


def prepare(num_tokens: int, ceilings: Ceilings) -> Prepared:
    """The Triton prologue against the plain reference."""
    row_bytes = 2 * ROW_HEADS * DIM * 2 + ROTATED * 4 + 8
    sets = [
        inputs(num_tokens, seed) for seed in range(min(40, num_input_sets(row_bytes * num_tokens)))
    ]

    def check() -> None:
        actual_q, actual_index_q = with_triton.attention_prologue(*sets[0])
        pages = sets[0][-1]
        assert pages.index_k_PBD is not None
        written = [tensor.clone() for tensor in (pages.k_PGBD, pages.v_PGBD, pages.index_k_PBD)]
        for tensor in (pages.k_PGBD, pages.v_PGBD, pages.index_k_PBD):
            tensor.zero_()
        expected_q, expected_index_q = reference.attention_prologue(*sets[0])
        assert actual_index_q is not None
        assert expected_index_q is not None
        require_close(actual_q, expected_q, limit=LIMIT, what="q")
        require_close(actual_index_q, expected_index_q, limit=LIMIT, what="index q")
        expected = (pages.k_PGBD, pages.v_PGBD, pages.index_k_PBD)
        for name, mine, theirs in zip(("K", "V", "index K"), written, expected, strict=True):
            require_close(mine, theirs, limit=LIMIT, what=name)

    return Prepared(
        check=check,
        calls=[partial(with_triton.attention_prologue, *arguments) for arguments in sets],
        floor_us=ceilings.floor_us(row_bytes * num_tokens),
    )


CASES = tuple(
    Case(
        f"prologue_{name}",
        f"prologue, {count} tokens, 64 q and 4 KV heads",
        partial(prepare, count),
    )
    for name, count in (("b64", 64), ("8k", 8192))
)
