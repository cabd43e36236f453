"""Rows of the report for MSA prefill: block choice, attention by arm, whole layers, short turns.

A layer row times the real scorer on random keys and, behind it, attention over a synthetic
selection: random keys would choose blocks as no trained model does. What the scorer chose is
checked, then dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from m3stack.bench.kernels.batches import BLOCK_TOKENS, HEAD_DIM, BatchShape, MsaBatch, make_batch
from m3stack.bench.kernels.bursts import time_bursts
from m3stack.bench.kernels.dense_prefill import dense_prefill_calls
from m3stack.bench.kernels.harness import (
    Call,
    Case,
    Ceilings,
    Prepared,
    num_input_sets,
    require_close,
)
from m3stack.bench.kernels.prefill_selections import (
    DISJOINT,
    IDENTICAL,
    MEASURED_LIKE,
    rolling_selection,
)
from m3stack.bench.kernels.selection_check import check_row, exact_scores
from m3stack.kernels.interface import PagedRows
from m3stack.kernels.msa import reference
from m3stack.kernels.msa.prefill import with_triton
from m3stack.kernels.msa.prefill.cuda_library import PrefillLibrary
from m3stack.kernels.msa.prefill.lists import load_factor
from m3stack.kernels.msa.prefill.with_cuda import Arm, AttendPolicy, CudaPrefill

NUM_CHOSEN, NUM_LOCAL = 16, 1
GROUPS, HEADS_PER_GROUP = 4, 16
SCALE = HEAD_DIM**-0.5
# bf16 weights and outputs against an fp32 softmax
ATTENTION_LIMIT = 6e-3
CHECKED_ROWS = 192


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """New rows behind a prefix, and how many blocks a row has that its neighbour lacks."""

    chunk: int
    prefix: int
    new_blocks: int = MEASURED_LIKE

    def describe(self, what: str) -> str:
        """Reads like the issue's table."""
        return (
            f"{what}, {self.chunk} rows after {self.prefix}, {self.new_blocks} new blocks a row, "
            "64 q and 4 KV heads, bf16"
        )

    def score_flops(self) -> float:
        """Products of every index query with every key at or before its row."""
        return 2 * GROUPS * HEAD_DIM * self._pairs(self.chunk, self.prefix)

    def dense_flops(self) -> float:
        """Both products of dense causal attention."""
        return 4 * GROUPS * HEADS_PER_GROUP * HEAD_DIM * self._pairs(self.chunk, self.prefix)

    def attend_flops(self) -> float:
        """Both products over the chosen blocks, the own block half full."""
        keys = min(self.prefix, (NUM_CHOSEN - 1) * BLOCK_TOKENS) + BLOCK_TOKENS / 2
        return 4 * GROUPS * HEADS_PER_GROUP * HEAD_DIM * self.chunk * keys

    def floor_us(self, ceilings: Ceilings, flops: float) -> float:
        """Arithmetic against reading the prefix's index keys and the rows once."""
        num_bytes = self.prefix * HEAD_DIM * 2 + self.chunk * 2 * GROUPS * HEADS_PER_GROUP * 256
        return ceilings.floor_us(num_bytes, flops)

    @staticmethod
    def _pairs(chunk: int, prefix: int) -> float:
        return chunk * prefix + chunk * chunk / 2


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """One input set: the batch and the selection its attention uses, int32 [G, T, K]."""

    batch: MsaBatch
    blocks_GTK: Tensor


def make_inputs(shape: PrefillShape, seed: int) -> PrefillInputs:
    """Random inputs on the GPU."""
    batch = make_batch(
        BatchShape(
            seq_lens=(shape.chunk + shape.prefix,),
            num_rows=(shape.chunk,),
            groups=GROUPS,
            heads_per_group=HEADS_PER_GROUP,
        ),
        device="cuda",
        seed=seed,
    )
    blocks = rolling_selection(batch.rows, shape.chunk, GROUPS, shape.new_blocks, seed=seed)
    return PrefillInputs(batch, blocks)


@cache
def library() -> PrefillLibrary:
    """The built kernels, once a run."""
    return PrefillLibrary()


def choose(kernels: CudaPrefill, inputs: PrefillInputs) -> Tensor:
    """The block choice alone."""
    batch = inputs.batch
    assert batch.pages.index_k_PBD is not None
    return kernels.choose_blocks(
        batch.index_q_TGD, batch.pages.index_k_PBD, batch.rows, NUM_CHOSEN, NUM_LOCAL
    )


def attend(kernels: CudaPrefill, inputs: PrefillInputs) -> Tensor:
    """Attention over the input's selection alone."""
    batch = inputs.batch
    return kernels.block_attention(batch.q_THD, batch.pages, inputs.blocks_GTK, batch.rows, SCALE)


def layer(kernels: CudaPrefill, inputs: PrefillInputs) -> Tensor:
    """The whole layer step."""
    choose(kernels, inputs)
    return attend(kernels, inputs)


def portable_choice(inputs: PrefillInputs) -> Tensor:
    """The Triton scorer and ranking."""
    batch = inputs.batch
    assert batch.pages.index_k_PBD is not None
    return with_triton.choose_blocks(
        batch.index_q_TGD, batch.pages.index_k_PBD, batch.rows, NUM_CHOSEN, NUM_LOCAL
    )


def portable_attention(tile_rows: int, inputs: PrefillInputs) -> Tensor:
    """A Triton arm; one row a program is the query-major baseline."""
    batch = inputs.batch
    return with_triton.block_attention(
        batch.q_THD, batch.pages, inputs.blocks_GTK, batch.rows, SCALE, tile_rows=tile_rows
    )


def check_choice(kernels: CudaPrefill, inputs: PrefillInputs) -> None:
    """Rows spread over the chunk, by their fp64 scores at the cut."""
    batch, blocks_GTK = inputs.batch, choose(kernels, inputs)
    num_rows, length = batch.q_THD.shape[0], batch.rows.max_seq_len
    table_J = batch.rows.page_table_SJ[0].long()
    assert batch.pages.index_k_PBD is not None
    for row in torch.linspace(0, num_rows - 1, 6).long().tolist():
        position = length - num_rows + row
        own = position // BLOCK_TOKENS
        scores_GJ = exact_scores(
            batch.index_q_TGD[row], batch.pages.index_k_PBD, table_J[: own + 1], position
        )
        # keys of 128 unit normals: no norm reaches 16
        slack_G = 2.0**-12 * 16 * batch.index_q_TGD[row].double().norm(dim=-1)
        check_row(blocks_GTK[:, row], scores_GJ, slack_G, own, NUM_LOCAL)


def check_attention(kernels: CudaPrefill, inputs: PrefillInputs) -> None:
    """The last rows against the reference, all rows against the query-major arm."""
    batch, actual = inputs.batch, attend(kernels, inputs)
    count = min(CHECKED_ROWS, actual.shape[0])
    start = torch.tensor([0, count], dtype=torch.int32, device=actual.device)
    rows: PagedRows = replace(batch.rows, query_start_S1=start, max_query_len=count)
    expected = reference.block_attention(
        batch.q_THD[-count:].float(),
        batch.pages,
        inputs.blocks_GTK[:, -count:].contiguous(),
        rows,
        SCALE,
    )
    require_close(actual[-count:], expected, limit=ATTENTION_LIMIT, what="last rows")
    portable = portable_attention(1, inputs)
    require_close(actual, portable, limit=ATTENTION_LIMIT, what="all rows, query-major arm")


def check_layer(kernels: CudaPrefill, inputs: PrefillInputs) -> None:
    """Both halves."""
    check_choice(kernels, inputs)
    check_attention(kernels, inputs)


def calls_on(
    run: Callable[[PrefillInputs], object], inputs: Sequence[PrefillInputs]
) -> Sequence[Call]:
    """One closure for each input set."""
    return [partial(run, one) for one in inputs]


def input_sets(shape: PrefillShape) -> list[PrefillInputs]:
    """As many as keep each one out of L2 until its next turn."""
    rows_bytes = shape.chunk * 2 * GROUPS * HEADS_PER_GROUP * HEAD_DIM * 2
    count = min(4, num_input_sets(rows_bytes + shape.prefix * HEAD_DIM * 2))
    return [make_inputs(shape, seed) for seed in range(count)]


def _overlap(shape: PrefillShape, inputs: PrefillInputs) -> float:
    """Load factor of tiles of 8 rows, from the first 1,024 rows."""
    count = min(1024, shape.chunk)
    rows = PagedRows(
        query_start_S1=torch.tensor([0, count], dtype=torch.int32),
        seq_lens_S=torch.tensor([shape.prefix + count], dtype=torch.int32),
        page_table_SJ=torch.zeros(1, 1, dtype=torch.int32),
        max_query_len=count,
        max_seq_len=shape.prefix + count,
    )
    return load_factor(inputs.blocks_GTK[:, :count].cpu(), rows, 8)


def prepare_choice(shape: PrefillShape, sustained: bool, ceilings: Ceilings) -> Prepared:
    """Scoring and ranking, with the portable form and a plain product of as many operations."""
    kernels, inputs = CudaPrefill(library()), input_sets(shape)
    # rows x 8192 x columns, as near to the scorer's operations as whole tiles of 256 allow
    columns = round(shape.score_flops() / (2 * CHUNK * CHUNK) / 256) * 256
    left = torch.randn(CHUNK, CHUNK, dtype=torch.bfloat16, device="cuda")
    right = torch.randn(CHUNK, columns, dtype=torch.bfloat16, device="cuda")
    return Prepared(
        check=partial(check_choice, kernels, inputs[0]),
        calls=calls_on(partial(choose, kernels), inputs),
        floor_us=shape.floor_us(ceilings, shape.score_flops()),
        peers={
            "matrix product of as many operations": [partial(torch.matmul, left, right)],
            "triton": calls_on(portable_choice, inputs),
        },
        flops=shape.score_flops(),
        notes="scores, ranks and merges: the whole block choice",
        timing=None if sustained else time_bursts,
    )


def prepare_attention(shape: PrefillShape, arm: Arm, ceilings: Ceilings) -> Prepared:
    """One arm of the attention over a synthetic selection."""
    kernels = CudaPrefill(library(), AttendPolicy(arm=arm))
    inputs = input_sets(shape)
    return Prepared(
        check=partial(check_attention, kernels, inputs[0]),
        calls=calls_on(partial(attend, kernels), inputs),
        floor_us=shape.floor_us(ceilings, shape.attend_flops()),
        peers={
            "triton query-major": calls_on(partial(portable_attention, 1), inputs),
            "triton union of 4": calls_on(partial(portable_attention, 4), inputs),
        },
        flops=shape.attend_flops(),
        overlap=_overlap(shape, inputs[0]),
    )


def prepare_layer(shape: PrefillShape, ceilings: Ceilings) -> Prepared:
    """The layer, its halves, the portable layer and dense attention."""
    kernels, inputs = CudaPrefill(library()), input_sets(shape)

    def portable(one: PrefillInputs) -> None:
        portable_choice(one)
        portable_attention(1, one)

    peers = {
        "choose": calls_on(partial(choose, kernels), inputs),
        "attend": calls_on(partial(attend, kernels), inputs),
        "portable layer": calls_on(portable, inputs[:1]),
    }
    notes = ""
    if shape.new_blocks == MEASURED_LIKE:
        dense, notes = dense_prefill_calls(inputs[0].batch, SCALE)
        peers["dense"] = dense
    return Prepared(
        check=partial(check_layer, kernels, inputs[0]),
        calls=calls_on(partial(layer, kernels), inputs),
        floor_us=shape.floor_us(ceilings, shape.score_flops() + shape.attend_flops()),
        peers=peers,
        overlap=_overlap(shape, inputs[0]),
        notes=notes,
        # launches of a chunk hide behind its kernels, those of a short turn do not
        graph=shape.chunk < 1024,
    )


CHUNK = 8192
PREFIXES = {"32k": 1 << 15, "128k": 1 << 17, "512k": 1 << 19, "1m": 1 << 20}
OVERLAPS = {"": MEASURED_LIKE, "_identical": IDENTICAL, "_disjoint": DISJOINT}
SCORED = PrefillShape(CHUNK, 1 << 17)


def _choice_case(name: str, *, sustained: bool) -> Case:
    what = "block choice under lasting load" if sustained else "block choice in bursts"
    return Case(name, SCORED.describe(what), partial(prepare_choice, SCORED, sustained))


def _layer_case(name: str, shape: PrefillShape) -> Case:
    return Case(name, shape.describe("prefill layer"), partial(prepare_layer, shape))


def _attention_case(name: str, new_blocks: int, arm: Arm) -> Case:
    shape = PrefillShape(CHUNK, 1 << 17, new_blocks)
    what = f"attention only, arm {arm.name.lower()}"
    return Case(name, shape.describe(what), partial(prepare_attention, shape, arm))


CASES = (
    _choice_case("score_prefill_tflops", sustained=False),
    _choice_case("score_prefill_sustained", sustained=True),
    _attention_case("attend_measured", MEASURED_LIKE, Arm.MEASURED),
    _attention_case("attend_identical", IDENTICAL, Arm.MEASURED),
    _attention_case("attend_kv_major_disjoint", DISJOINT, Arm.KEY_MAJOR),
    _attention_case("attend_kv_major_measured", MEASURED_LIKE, Arm.KEY_MAJOR),
    _attention_case("attend_union_disjoint", DISJOINT, Arm.UNION),
    _layer_case("prefill_128_after_64k", PrefillShape(128, 1 << 16)),
    *(
        _layer_case(f"prefill_8k_after_{name}{suffix}", PrefillShape(CHUNK, prefix, new_blocks))
        for name, prefix in PREFIXES.items()
        for suffix, new_blocks in OVERLAPS.items()
    ),
)
