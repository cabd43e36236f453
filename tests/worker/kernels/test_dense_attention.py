"""Dense attention by torch's fused kernels and by Triton against the plain reference, on a CPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from m3stack.bench.kernels.batches import BatchShape, make_batch
from m3stack.bench.kernels.harness import require_close
from m3stack.kernels.attention import reference, with_torch, with_triton

# numpy warns about how the interpreter of triton 3.6 reads scalars
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 128**-0.5
SHAPES = {
    "decode": BatchShape(seq_lens=(1, 127, 129, 0, 700), groups=2, heads_per_group=4),
    "drafts": BatchShape(seq_lens=(300, 130), num_rows=(3, 2), groups=1, heads_per_group=16),
    "chunks": BatchShape(
        seq_lens=(300, 40, 129), num_rows=(140, 40, 1), groups=1, heads_per_group=2
    ),
    "one_long": BatchShape(seq_lens=(1500,), groups=1, heads_per_group=3, max_seq_len=4000),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("back_end", ["torch", "triton"])
def test_paged_attention_matches_the_reference_beside_poison(name, back_end):
    torch.set_num_threads(1)
    batch = make_batch(SHAPES[name], device=DEVICE, seed=1, dtype=torch.float16)
    inputs = (batch.pages, batch.rows, SCALE)
    expected = reference.paged_attention(batch.q_THD.float(), *inputs)
    if back_end == "torch":
        actual = with_torch.paged_attention(batch.q_THD, *inputs)
    else:
        actual = with_triton.paged_attention(batch.q_THD, *inputs, widen=DEVICE == "cpu")
    assert bool(torch.isfinite(actual).all())
    # fp16 weights and output: 2^-11 each
    require_close(actual, expected, limit=2e-3, what=name)


def test_packed_rows_attend_only_within_themselves():
    torch.manual_seed(2)
    bounds = torch.tensor([0, 5, 5, 21, 22], dtype=torch.int32)
    q, k, v = torch.randn(3, 22, 4, 20)
    inputs = (q, k, v, bounds, 16, 20**-0.5)
    expected = reference.varlen_attention(*inputs)
    # fp32 on both sides
    require_close(with_torch.varlen_attention(*inputs), expected, limit=1e-5, what="packed rows")
