"""Rows of the report for one MSA layer at decode: score, choose, attend, in one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from m3stack.bench.kernels.batches import (
    BLOCK_TOKENS,
    HEAD_DIM,
    BatchShape,
    MsaBatch,
    make_batch,
)
from m3stack.bench.kernels.harness import (
    Call,
    Case,
    Ceilings,
    Prepared,
    num_input_sets,
    require_close,
)
from m3stack.bench.kernels.selection_check import check_selection
from m3stack.kernels.msa import reference
from m3stack.kernels.msa.decode.cuda_library import DecodeLibrary
from m3stack.kernels.msa.decode.with_cuda import CudaDecode

NUM_CHOSEN = 16
NUM_LOCAL = 1
SCALE = HEAD_DIM**-0.5
GROUPS = 4
HEADS_PER_GROUP = 16
# bf16 weights and outputs against an fp64 softmax
ATTENTION_LIMIT = 6e-3


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """Requests, keys each, query rows each."""

    batch: int
    seq_len: int
    num_rows: int = 1

    def describe(self) -> str:
        """Reads like the issue's table."""
        rows = "" if self.num_rows == 1 else f", {self.num_rows} rows a request"
        return f"decode layer, B={self.batch}, {self.seq_len} keys{rows}, 64 q and 4 KV heads, bf16"

    def index_bytes(self, bytes_per_token: float = 2 * HEAD_DIM) -> float:
        """Index keys, each read once."""
        return self.batch * self.seq_len * bytes_per_token

    def attend_bytes(self) -> float:
        """K and V of the chosen blocks of every row and group."""
        keys = min(self.seq_len, NUM_CHOSEN * BLOCK_TOKENS)
        return self.batch * self.num_rows * GROUPS * keys * 2 * HEAD_DIM * 2

    def make(self, *, seed: int) -> MsaBatch:
        """One set of inputs on the GPU."""
        shape = BatchShape(
            seq_lens=(self.seq_len,) * self.batch,
            num_rows=(self.num_rows,) * self.batch,
            groups=GROUPS,
            heads_per_group=HEADS_PER_GROUP,
        )
        return make_batch(shape, device="cuda", seed=seed)


def decode_layer(kernels: CudaDecode, batch: MsaBatch) -> Tensor:
    """The whole layer step: block choice, then attention over the chosen blocks."""
    blocks_GTK = choose(kernels, batch)
    return kernels.block_attention(batch.q_THD, batch.pages, blocks_GTK, batch.rows, SCALE)


def choose(kernels: CudaDecode, batch: MsaBatch) -> Tensor:
    """The block choice alone."""
    assert batch.pages.index_k_PBD is not None
    return kernels.choose_blocks(
        batch.index_q_TGD, batch.pages.index_k_PBD, batch.rows, NUM_CHOSEN, NUM_LOCAL
    )


def check_layer(kernels: CudaDecode, batch: MsaBatch) -> None:
    """Selection by score at the cut and output by relative error, both in fp64."""
    assert batch.pages.index_k_PBD is not None
    blocks_GTK = choose(kernels, batch)
    check_selection(blocks_GTK, batch.index_q_TGD, batch.pages.index_k_PBD, batch.rows, NUM_LOCAL)
    expected = reference.block_attention(
        batch.q_THD.float(), batch.pages, blocks_GTK, batch.rows, SCALE
    )
    actual = decode_layer(kernels, batch)
    require_close(actual, expected, limit=ATTENTION_LIMIT, what="decode layer output")


def input_sets(shape: DecodeShape) -> list[MsaBatch]:
    """As many inputs as keep each one out of L2 until its next turn."""
    count = num_input_sets(shape.index_bytes() + shape.attend_bytes())
    return [shape.make(seed=seed) for seed in range(count)]


def calls_on(run: Callable[[MsaBatch], object], batches: Sequence[MsaBatch]) -> list[Call]:
    """One closure for each input set."""
    return [partial(run, batch) for batch in batches]


def prepare_layer(shape: DecodeShape, ceilings: Ceilings) -> Prepared:
    """The layer through the CUDA kernels, with its two halves timed beside it."""
    kernels = CudaDecode(DecodeLibrary())
    batches = input_sets(shape)
    blocks = [choose(kernels, batch) for batch in batches]
    attend = [
        partial(kernels.block_attention, batch.q_THD, batch.pages, blocks_GTK, batch.rows, SCALE)
        for batch, blocks_GTK in zip(batches, blocks, strict=True)
    ]
    return Prepared(
        check=partial(check_layer, kernels, batches[0]),
        calls=calls_on(partial(decode_layer, kernels), batches),
        floor_us=ceilings.floor_us(shape.index_bytes() + shape.attend_bytes()),
        peers={"choose": calls_on(partial(choose, kernels), batches), "attend": attend},
    )


SHAPES = {
    "decode_b1_1m": DecodeShape(1, 1 << 20),
    "decode_b8_512k": DecodeShape(8, 1 << 19),
    "decode_b64_32k": DecodeShape(64, 1 << 15),
    "decode_b1_8k": DecodeShape(1, 1 << 13),
    "decode_b8_128k_4rows": DecodeShape(8, 1 << 17, num_rows=4),
}

CASES = tuple(
    Case(name, shape.describe(), partial(prepare_layer, shape)) for name, shape in SHAPES.items()
)
