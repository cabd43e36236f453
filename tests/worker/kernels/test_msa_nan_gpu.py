"""A key that is not a number shows in the rows that attend to it, whatever arm computes them."""

from __future__ import annotations

import pytest
import torch

from m3stack.bench.kernels.batches import BatchShape, make_batch
from m3stack.bench.kernels.prefill_selections import rolling_selection
from m3stack.kernels.msa import reference
from m3stack.kernels.msa.prefill.cuda_library import PrefillLibrary
from m3stack.kernels.msa.prefill.with_cuda import Arm, AttendPolicy, CudaPrefill

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

SCALE = 128**-0.5


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_both_arms_give_nan_where_the_reference_does(value: float) -> None:
    # rows of disjoint choices, so many that they go by key where nothing is said
    batch = make_batch(BatchShape(seq_lens=(50_000,), num_rows=(1100,)), device="cuda", seed=3)
    blocks_GTK = rolling_selection(batch.rows, 1100, 4, 15, seed=1)
    block = int(blocks_GTK[0, 700, 4])
    batch.pages.k_PGBD[batch.rows.page_table_SJ[0, block].long(), 0, 9] = value
    inputs = (batch.pages, blocks_GTK, batch.rows, SCALE)
    expected = reference.block_attention(batch.q_THD.float(), *inputs).isnan()
    assert expected[700, :16].all()
    assert not expected.all()
    library = PrefillLibrary()
    for arm in Arm:
        kernels = CudaPrefill(library, AttendPolicy(arm=arm))
        assert torch.equal(kernels.block_attention(batch.q_THD, *inputs).isnan(), expected), arm
