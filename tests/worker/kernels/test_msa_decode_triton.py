"""The portable decode kernels against the plain reference, by the Triton interpreter on a CPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from m3stack.bench.kernels.batches import (
    BatchShape,
    make_batch,
    poison_unwritten,
)
from m3stack.bench.kernels.harness import require_close, require_equal
from m3stack.bench.kernels.selection_check import check_selection
from m3stack.kernels.interface import NO_BLOCK
from m3stack.kernels.msa import reference
from m3stack.kernels.msa.decode.with_triton import TritonDecode

# numpy warns about how the interpreter of triton 3.6 reads scalars, and about NaN in products
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 128**-0.5
SHAPES = {
    "edges": BatchShape(seq_lens=(1, 127, 128, 129, 0, 700), groups=1, heads_per_group=4),
    "drafts": BatchShape(seq_lens=(600, 130), num_rows=(3, 2), groups=2, heads_per_group=2),
    "shared_prefix": BatchShape(
        seq_lens=(700, 513), shared_pages=4, groups=2, heads_per_group=2, max_seq_len=1500
    ),
}


@pytest.fixture
def decode() -> TritonDecode:
    torch.set_num_threads(1)
    return TritonDecode(widen=DEVICE == "cpu")


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("chosen", "local"), [(3, 1), (4, 2), (2, 0)])
def test_ties_of_exact_sums_fall_to_the_lower_block(decode, name, chosen, local):
    batch = make_batch(SHAPES[name], device=DEVICE, seed=1)
    index_k, index_q = batch.pages.index_k_PBD, batch.index_q_TGD
    # products of small integers sum exactly in any order, so lists must agree, ties included
    index_k.copy_(torch.randint(-2, 3, index_k.shape).to(index_k))
    index_q.copy_(torch.randint(-1, 2, index_q.shape).to(index_q))
    poison_unwritten(batch.pages, batch.rows)
    inputs = (index_q, index_k, batch.rows, chosen, local)
    require_equal(decode.choose_blocks(*inputs), reference.choose_blocks(*inputs), what=name)


def test_nan_loses_and_zero_has_no_sign(decode):
    shape = BatchShape(seq_lens=(900,), groups=1, heads_per_group=1)
    batch = make_batch(shape, device=DEVICE, seed=2)
    index_k, table = batch.pages.index_k_PBD, batch.rows.page_table_SJ[0].long()
    batch.index_q_TGD.fill_(1.0)
    index_k[table[:8]] = -1.0
    index_k[table[1]] = 0.0
    index_k[table[2]] = -0.0
    index_k[table[3], 5] = float("inf")
    index_k[table[4], 7] = float("nan")
    index_k[table[5], 9] = float("-inf")
    for chosen in (2, 3, 4, 8):
        inputs = (batch.index_q_TGD, index_k, batch.rows, chosen, 1)
        expected = reference.choose_blocks(*inputs)
        require_equal(decode.choose_blocks(*inputs), expected, what=f"{chosen} chosen")


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_choice_and_attention_match_the_reference(decode, name, dtype):
    batch = make_batch(SHAPES[name], device=DEVICE, seed=3, dtype=dtype)
    blocks_GTK = decode.choose_blocks(batch.index_q_TGD, batch.pages.index_k_PBD, batch.rows, 3, 1)
    check_selection(blocks_GTK, batch.index_q_TGD, batch.pages.index_k_PBD, batch.rows, 1)
    actual = decode.block_attention(batch.q_THD, batch.pages, blocks_GTK, batch.rows, SCALE)
    expected = reference.block_attention(
        batch.q_THD.float(), batch.pages, blocks_GTK, batch.rows, SCALE
    )
    # the interpreter cuts to bf16 instead of rounding: up to one unit, 2^-8, in the output
    require_close(actual, expected, limit=6e-3, what=name)
    assert bool(torch.isfinite(actual).all())


def test_attention_skips_holes_and_blocks_after_the_row(decode):
    shape = BatchShape(seq_lens=(600,), groups=1, heads_per_group=16)
    batch = make_batch(shape, device=DEVICE, seed=4)
    listed = torch.tensor([0, NO_BLOCK, 3, 4, NO_BLOCK], dtype=torch.int32, device=DEVICE)
    blocks_GTK = listed.view(1, 1, 5)
    inputs = (batch.pages, blocks_GTK, batch.rows, SCALE)
    expected = reference.block_attention(batch.q_THD.float(), *inputs)
    require_close(decode.block_attention(batch.q_THD, *inputs), expected, limit=6e-3, what="holes")
    later = torch.full_like(blocks_GTK, 4 + 3)
    later[..., 0] = 1
    only_first = torch.full_like(blocks_GTK, NO_BLOCK)
    only_first[..., 0] = 1
    expected = reference.block_attention(
        batch.q_THD.float(), batch.pages, only_first, batch.rows, SCALE
    )
    actual = decode.block_attention(batch.q_THD, batch.pages, later, batch.rows, SCALE)
    require_close(actual, expected, limit=6e-3, what="later blocks")
