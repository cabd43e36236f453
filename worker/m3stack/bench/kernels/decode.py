"""Rows of the report for one MSA layer at decode: score, choose, attend, in one CUDA graph.

The input sets of a row stand for the layers of a model: pools and queries of their own, the rows of
the step in common. Page ids are in random order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from m3stack.bench.kernels.batches import (
    BLOCK_TOKENS,
    HEAD_DIM,
    BatchShape,
    MsaBatch,
    make_batch,
)
from m3stack.bench.kernels.dense_peer import dense_decode_calls
from m3stack.bench.kernels.harness import (
    Call,
    Case,
    Ceilings,
    Prepared,
    num_input_sets,
    require_close,
    require_equal,
)
from m3stack.bench.kernels.selection_check import check_selection
from m3stack.kernels.interface import LayerPages, PagedRows
from m3stack.kernels.msa import reference
from m3stack.kernels.msa.decode import with_triton
from m3stack.kernels.msa.decode.cuda_library import DecodeLibrary
from m3stack.kernels.msa.decode.fp8_pages import Fp8Pages, quantise_pages
from m3stack.kernels.msa.decode.two_stage import choose_blocks_two_stage
from m3stack.kernels.msa.decode.with_cuda import CudaDecode
from m3stack.kernels.msa.index_copy import IndexCopy

NUM_CHOSEN = 16
NUM_LOCAL = 1
SCALE = HEAD_DIM**-0.5
GROUPS = 4
HEADS_PER_GROUP = 16
INDEX_BYTES = 2.0 * HEAD_DIM
COPY_BYTES = HEAD_DIM + 4.0
# bf16 weights and outputs against an fp32 softmax
ATTENTION_LIMIT = 6e-3
# longer rows would keep the scorer of one program a request for seconds
MAX_SERIAL_KEYS = 1 << 15


class DecodeKernels(Protocol):
    """The two operations of a decode layer, whatever runs them."""

    def choose_blocks(
        self, q: Tensor, k: Tensor, rows: PagedRows, num_blocks: int, num_local: int, /
    ) -> Tensor: ...

    def block_attention(
        self, q: Tensor, pages: LayerPages, blocks: Tensor, rows: PagedRows, scale: float, /
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """Requests, keys each, query rows each, and leading keys that all requests have in common."""

    batch: int
    seq_len: int
    num_rows: int = 1
    shared_len: int = 0

    def describe(self) -> str:
        """Reads like the issue's table."""
        rows = "" if self.num_rows == 1 else f", {self.num_rows} rows a request"
        shared = f", the first {self.shared_len} shared" if self.shared_len else ""
        return f"B={self.batch}, {self.seq_len} keys{shared}{rows}, 64 q and 4 KV heads"

    def index_bytes(self, bytes_per_token: float = INDEX_BYTES) -> float:
        """Index keys, each read once, shared ones once for all."""
        own = self.batch * (self.seq_len - self.shared_len)
        return (own + self.shared_len) * bytes_per_token

    def attend_bytes(self, bytes_per_value: float = 2.0) -> float:
        """K and V of the chosen blocks of every row and group."""
        keys = min(self.seq_len, NUM_CHOSEN * BLOCK_TOKENS)
        return self.batch * self.num_rows * GROUPS * keys * 2 * HEAD_DIM * bytes_per_value

    def input_sets(self, bytes_per_call: float) -> list[MsaBatch]:
        """As many inputs as keep each one out of L2 until its next turn, all with the same rows.

        Args:
            bytes_per_call: what the call that reads least of them reads.
        """
        shape = BatchShape(
            seq_lens=(self.seq_len,) * self.batch,
            num_rows=(self.num_rows,) * self.batch,
            groups=GROUPS,
            heads_per_group=HEADS_PER_GROUP,
            shared_pages=self.shared_len // BLOCK_TOKENS,
        )
        count = num_input_sets(bytes_per_call)
        first = make_batch(shape, device="cuda", seed=0, rows_seed=0)
        rest = [
            make_batch(shape, device="cuda", seed=seed, rows_seed=0) for seed in range(1, count)
        ]
        return [first, *(dataclasses.replace(batch, rows=first.rows) for batch in rest)]

    def fresh_blocks(self, turn: int) -> Tensor:
        """Blocks that no other turn attends to, until all of a sequence have been: int32 [G, T, K].

        Attention alone reads so little of a pool that its turns can share one.
        """
        num_blocks = self.seq_len // BLOCK_TOKENS
        generator = torch.Generator().manual_seed(0)
        order_GSJ = torch.rand((GROUPS, self.batch, num_blocks), generator=generator).argsort(-1)
        count = self.num_rows * NUM_CHOSEN
        places = torch.arange(turn * count, (turn + 1) * count) % num_blocks
        blocks_GTK = order_GSJ[:, :, places].view(GROUPS, -1, NUM_CHOSEN)
        return blocks_GTK.sort(-1).values.to(torch.int32)


def choose(kernels: DecodeKernels, batch: MsaBatch) -> Tensor:
    """The block choice alone."""
    return kernels.choose_blocks(
        batch.index_q_TGD, index_keys(batch), batch.rows, NUM_CHOSEN, NUM_LOCAL
    )


def decode_layer(kernels: DecodeKernels, batch: MsaBatch) -> Tensor:
    """The whole layer step: block choice, then attention over the chosen blocks."""
    blocks_GTK = choose(kernels, batch)
    return kernels.block_attention(batch.q_THD, batch.pages, blocks_GTK, batch.rows, SCALE)


def index_keys(batch: MsaBatch) -> Tensor:
    """The index plane, which every batch of this file has."""
    assert batch.pages.index_k_PBD is not None
    return batch.pages.index_k_PBD


def check_layer(kernels: DecodeKernels, batch: MsaBatch) -> None:
    """Selection by score at the cut in fp64, output by relative error."""
    blocks_GTK = choose(kernels, batch)
    check_selection(blocks_GTK, batch.index_q_TGD, index_keys(batch), batch.rows, NUM_LOCAL)
    expected = reference.block_attention(
        batch.q_THD.float(), batch.pages, blocks_GTK, batch.rows, SCALE
    )
    actual = decode_layer(kernels, batch)
    require_close(actual, expected, limit=ATTENTION_LIMIT, what="decode layer output")


def calls_on(run: Callable[[MsaBatch], object], batches: Sequence[MsaBatch]) -> list[Call]:
    """One closure for each input set."""
    return [partial(run, batch) for batch in batches]


def prepare_layer(shape: DecodeShape, ceilings: Ceilings) -> Prepared:
    """The layer by the CUDA kernels; beside it its halves, dense attention and portable Triton."""
    kernels = CudaDecode(DecodeLibrary())
    # the choice alone is timed too
    batches = shape.input_sets(shape.index_bytes())

    def attend_at(turn: int) -> Call:
        batch = batches[turn % len(batches)]
        blocks_GTK = shape.fresh_blocks(turn // len(batches)).to(batch.q_THD.device)
        inputs = (batch.q_THD, batch.pages, blocks_GTK, batch.rows, SCALE)
        return partial(kernels.block_attention, *inputs)

    turns = max(len(batches), num_input_sets(shape.attend_bytes()))
    attend = [attend_at(turn) for turn in range(turns)]
    peers = {
        "choose": calls_on(partial(choose, kernels), batches),
        "attend": attend,
        "triton": calls_on(partial(decode_layer, with_triton.TritonDecode()), batches),
    }
    if shape.seq_len <= MAX_SERIAL_KEYS:
        serial = with_triton.TritonDecode(pages_per_program=shape.seq_len // BLOCK_TOKENS)
        peers["choose, one program a request"] = calls_on(partial(choose, serial), batches)
    if shape.num_rows == 1 and not shape.shared_len:
        peers |= dense_decode_calls(batches, SCALE)
    return Prepared(
        check=partial(check_layer, kernels, batches[0]),
        calls=calls_on(partial(decode_layer, kernels), batches),
        floor_us=ceilings.floor_us(shape.index_bytes() + shape.attend_bytes()),
        peers=peers,
    )


def prepare_two_stage(shape: DecodeShape, ceilings: Ceilings) -> Prepared:
    """The layer with the exact two-stage choice; checked for equality with the one-stage choice."""
    kernels = CudaDecode(DecodeLibrary())
    batches = shape.input_sets(shape.index_bytes(COPY_BYTES))
    copies = [IndexCopy.of(index_keys(batch)) for batch in batches]
    pairs = list(zip(batches, copies, strict=True))

    def two_stages(batch: MsaBatch, copy: IndexCopy) -> tuple[Tensor, Tensor]:
        return choose_blocks_two_stage(
            kernels,
            batch.index_q_TGD,
            index_keys(batch),
            copy,
            batch.rows,
            NUM_CHOSEN,
            NUM_LOCAL,
        )

    def layer(batch: MsaBatch, copy: IndexCopy) -> Tensor:
        blocks_GTK, _ = two_stages(batch, copy)
        return kernels.block_attention(batch.q_THD, batch.pages, blocks_GTK, batch.rows, SCALE)

    def check() -> None:
        check_layer(kernels, batches[0])
        for batch, copy in pairs:
            blocks_GTK, _ = two_stages(batch, copy)
            require_equal(blocks_GTK, choose(kernels, batch), what="two-stage choice")

    rescored = two_stages(*pairs[0])[1].float().mean().item()
    share = rescored / (shape.seq_len // BLOCK_TOKENS)
    peers = {
        "choose": [partial(two_stages, *pair) for pair in pairs],
        "one_stage": calls_on(partial(decode_layer, kernels), batches),
    }
    return Prepared(
        check=check,
        calls=[partial(layer, *pair) for pair in pairs],
        floor_us=ceilings.floor_us(shape.index_bytes(COPY_BYTES) + shape.attend_bytes()),
        peers=peers | dense_decode_calls(batches, SCALE),
        notes=f"{share:.1%} of blocks rescored in bf16",
    )


def prepare_fp8(shape: DecodeShape, ceilings: Ceilings) -> Prepared:
    """Attention over e4m3 pages, the choice given; beside it the same in bf16."""
    kernels = CudaDecode(DecodeLibrary())
    batches = shape.input_sets(shape.attend_bytes(1.0))
    chosen = [choose(kernels, batch) for batch in batches]
    pools = [quantised_in_parts(batch.pages) for batch in batches]

    def attend(batch: MsaBatch, pages: Fp8Pages, blocks_GTK: Tensor) -> Tensor:
        return kernels.block_attention_fp8(batch.q_THD, pages, blocks_GTK, batch.rows, SCALE)

    def check() -> None:
        assert pools[0].k_scale_PG is not None
        assert pools[0].v_scale_PG is not None
        pages = LayerPages(
            pools[0].k_PGBD.float() * pools[0].k_scale_PG[..., None, None],
            pools[0].v_PGBD.float() * pools[0].v_scale_PG[..., None, None],
            None,
        )
        expected = reference.block_attention(
            batches[0].q_THD.float(), pages, chosen[0], batches[0].rows, SCALE
        )
        actual = attend(batches[0], pools[0], chosen[0])
        require_close(actual, expected, limit=ATTENTION_LIMIT, what="fp8 attention output")

    bf16 = [
        partial(kernels.block_attention, batch.q_THD, batch.pages, blocks_GTK, batch.rows, SCALE)
        for batch, blocks_GTK in zip(batches, chosen, strict=True)
    ]
    return Prepared(
        check=check,
        calls=[partial(attend, *inputs) for inputs in zip(batches, pools, chosen, strict=True)],
        floor_us=ceilings.floor_us(shape.attend_bytes(1.0)),
        peers={"bf16": bf16},
    )


def quantised_in_parts(pages: LayerPages) -> Fp8Pages:
    """e4m3 pages of a large pool, a few pages at a time."""
    k = [quantise_pages(part) for part in pages.k_PGBD.split(1024)]
    v = [quantise_pages(part) for part in pages.v_PGBD.split(1024)]
    return Fp8Pages(
        torch.cat([pool for pool, _ in k]),
        torch.cat([pool for pool, _ in v]),
        torch.cat([scale for _, scale in k]),
        torch.cat([scale for _, scale in v]),
    )


LAYERS = {
    "decode_b1_1m": DecodeShape(1, 1 << 20),
    "decode_b8_512k": DecodeShape(8, 1 << 19),
    "decode_b64_32k": DecodeShape(64, 1 << 15),
    "decode_b1_8k": DecodeShape(1, 1 << 13),
    "decode_b8_128k_4rows": DecodeShape(8, 1 << 17, num_rows=4),
    "decode_b8_128k": DecodeShape(8, 1 << 17),
    "decode_b8_128k_shared": DecodeShape(8, 1 << 17, shared_len=120 << 10),
}
TWO_STAGES = {
    "decode_exact2_b1_1m": DecodeShape(1, 1 << 20),
    "decode_exact2_b8_512k": DecodeShape(8, 1 << 19),
    "decode_exact2_b64_32k": DecodeShape(64, 1 << 15),
}
FP8 = {
    "attend_fp8_b8_32k": DecodeShape(8, 1 << 15),
    "attend_fp8_b64_32k": DecodeShape(64, 1 << 15),
}

CASES = (
    *(
        Case(name, f"decode layer, {shape.describe()}, bf16", partial(prepare_layer, shape))
        for name, shape in LAYERS.items()
    ),
    *(
        Case(
            name,
            f"decode layer, exact two-stage choice, {shape.describe()}, bf16",
            partial(prepare_two_stage, shape),
        )
        for name, shape in TWO_STAGES.items()
    ),
    *(
        Case(name, f"decode attend, {shape.describe()}, e4m3 KV", partial(prepare_fp8, shape))
        for name, shape in FP8.items()
    ),
)
