"""Rows of the report that ask what the layout of pages and tables is worth at decode.

The same attention over the same chosen blocks: our kernel on head-major and on token-major pools,
and, where FlashInfer is there, its tensor-core decode on a page table that is a view of the pool
(the KV group flattened into the batch, page * G + group) and on a gathered copy of the pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from m3stack.bench.kernels.batches import BLOCK_TOKENS, HEAD_DIM, MsaBatch
from m3stack.bench.kernels.decode import (
    ATTENTION_LIMIT,
    GROUPS,
    HEADS_PER_GROUP,
    NUM_CHOSEN,
    SCALE,
    DecodeShape,
    choose,
)
from m3stack.bench.kernels.harness import Call, Case, Ceilings, Prepared, require_close
from m3stack.kernels.attention.with_flashinfer import DecodePlan, require_flashinfer
from m3stack.kernels.build import KernelUnavailableError
from m3stack.kernels.interface import LayerPages, PagedRows
from m3stack.kernels.msa.decode.cuda_library import DecodeLibrary
from m3stack.kernels.msa.decode.with_cuda import CudaDecode


def _token_major(pages: LayerPages) -> LayerPages:
    """The same content, tokens outermost in a page, seen through strides."""
    k, v = (
        pool.transpose(1, 2).contiguous().transpose(1, 2) for pool in (pages.k_PGBD, pages.v_PGBD)
    )
    return LayerPages(k, v, None)


def _virtual_pages(batch: MsaBatch, blocks_GTK: Tensor) -> Tensor:
    """int32 [T * G, K]: page * G + group of every chosen block; each row has K of them."""
    table_SJ = batch.rows.page_table_SJ.long()
    pages_TGK = (
        table_SJ[:, None].expand(-1, GROUPS, -1).gather(2, blocks_GTK.transpose(0, 1).long())
    )
    group_G1 = torch.arange(GROUPS, device=pages_TGK.device)[:, None]
    return (pages_TGK * GROUPS + group_G1).flatten(0, 1).to(torch.int32)


def _flat_rows(tables_RK: Tensor, last_page_len: int) -> PagedRows:
    """One row a (request, group), whose sequence is its chosen pages, the row's own one last."""
    rows, chosen = tables_RK.shape
    length = (chosen - 1) * BLOCK_TOKENS + last_page_len
    integer = {"dtype": torch.int32, "device": tables_RK.device}
    return PagedRows(
        query_start_S1=torch.arange(rows + 1, **integer),
        seq_lens_S=torch.full((rows,), length, **integer),
        page_table_SJ=tables_RK,
        max_query_len=1,
        max_seq_len=length,
    )


def _flat(pages: LayerPages) -> LayerPages:
    """Every (page, group) a page of one head: a view."""
    size = (-1, 1, BLOCK_TOKENS, HEAD_DIM)
    return LayerPages(pages.k_PGBD.view(size), pages.v_PGBD.view(size), None)


def _library_calls(
    batches: Sequence[MsaBatch], chosen: Sequence[Tensor], expected: Tensor
) -> dict[str, list[Call]]:
    """FlashInfer by a table and by a gathered copy; nothing where it is not installed."""
    try:
        require_flashinfer("decode over chosen blocks")
    except KernelUnavailableError:
        return {}
    size = (-1, HEADS_PER_GROUP, HEAD_DIM)
    last = (int(batches[0].rows.seq_lens_S[0]) - 1) % BLOCK_TOKENS + 1
    by_table, gathered = [], []
    for batch, blocks_GTK in zip(batches, chosen, strict=True):
        pages, tables_RK = _flat(batch.pages), _virtual_pages(batch, blocks_GTK)
        q_RhD = batch.q_THD.view(size)
        rows = _flat_rows(tables_RK, last)
        by_table.append(partial(DecodePlan(q_RhD, pages, rows, SCALE), q_RhD, pages))
        order = torch.arange(tables_RK.numel(), dtype=torch.int32, device=tables_RK.device)
        copied_rows = _flat_rows(order.view_as(tables_RK), last)

        def copied(of: LayerPages = pages, tables_RK: Tensor = tables_RK) -> LayerPages:
            index = tables_RK.flatten()
            return LayerPages(of.k_PGBD[index], of.v_PGBD[index], None)

        plan = DecodePlan(q_RhD, copied(), copied_rows, SCALE)
        gathered.append(partial(_over_copy, plan, q_RhD, copied))
    for name, calls in (("table", by_table), ("gathered", gathered)):
        require_close(
            calls[0]().view_as(expected),
            expected,
            limit=2 * ATTENTION_LIMIT,
            what=f"library, {name}",
        )
    return {"library, table view": by_table, "library, gathered pages": gathered}


def _over_copy(plan: DecodePlan, q_RhD: Tensor, copied: Callable[[], LayerPages]) -> Tensor:
    return plan(q_RhD, copied())


def prepare(shape: DecodeShape, ceilings: Ceilings) -> Prepared:
    """Attention alone over every layout, the choice given."""
    kernels = CudaDecode(DecodeLibrary())
    batches = shape.input_sets(shape.attend_bytes())
    chosen = [choose(kernels, batch) for batch in batches]
    token_major = [_token_major(batch.pages) for batch in batches]

    def attend(batch: MsaBatch, pages: LayerPages, blocks_GTK: Tensor) -> Tensor:
        return kernels.block_attention(batch.q_THD, pages, blocks_GTK, batch.rows, SCALE)

    head_major = [batch.pages for batch in batches]
    expected = attend(batches[0], head_major[0], chosen[0])
    library = _library_calls(batches, chosen, expected)

    def check() -> None:
        actual = attend(batches[0], token_major[0], chosen[0])
        require_close(actual, expected, limit=ATTENTION_LIMIT, what="token-major pools")

    return Prepared(
        check=check,
        calls=[
            partial(attend, *inputs) for inputs in zip(batches, head_major, chosen, strict=True)
        ],
        floor_us=ceilings.floor_us(shape.attend_bytes()),
        peers={
            "token-major": [
                partial(attend, *inputs)
                for inputs in zip(batches, token_major, chosen, strict=True)
            ],
            **library,
        },
        notes=f"head-major pools, {NUM_CHOSEN} chosen blocks",
    )


SHAPES = {
    "attend_layouts_b8_32k": DecodeShape(8, 1 << 15),
    "attend_layouts_b64_32k": DecodeShape(64, 1 << 15),
}
CASES = tuple(
    Case(name, f"decode attend by layout, {shape.describe()}", partial(prepare, shape))
    for name, shape in SHAPES.items()
)
