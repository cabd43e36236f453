"""Every back end by name on a GPU: what it serves passes its check, what it does not it says."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging

import pytest
import torch

from m3stack.bench.kernels.batches import BatchShape, make_batch, poison_unwritten
from m3stack.bench.kernels.harness import require_close, require_equal
from m3stack.kernels.attention import reference as dense_reference
from m3stack.kernels.build import KernelUnavailableError
from m3stack.kernels.interface import Kernels
from m3stack.kernels.msa.decode.cuda_library import DecodeLibrary
from m3stack.kernels.msa.decode.index_copy import write_index_copy
from m3stack.kernels.msa.decode.two_stage import choose_blocks_two_stage
from m3stack.kernels.msa.decode.with_cuda import CudaDecode
from m3stack.kernels.msa.index_copy import IndexCopy, copy_index_keys
from m3stack.kernels.msa.with_cuda import CudaMsa
from m3stack.kernels.select import build_kernels
from m3stack.kernels.shape import KernelShape

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

M3 = KernelShape(
    dtype=torch.bfloat16,
    heads=64,
    groups=4,
    head_dim=128,
    rotary_dim=64,
    page_tokens=128,
    num_blocks=16,
    num_local_blocks=1,
    vision_heads=16,
    vision_head_dim=80,
    experts=128,
    experts_per_token=4,
)
TINY = dataclasses.replace(
    M3, heads=8, groups=2, head_dim=32, rotary_dim=16, num_blocks=4, vision_heads=4,
    vision_head_dim=20, experts=8, experts_per_token=2,
)  # fmt: skip
SHAPES = {
    "m3": M3,
    "m3_rank_of_four": dataclasses.replace(M3, heads=16, groups=1),
    "m3_rank_of_eight": dataclasses.replace(M3, heads=8, groups=1),
    "tiny_bf16": TINY,
    "tiny_fp32": dataclasses.replace(TINY, dtype=torch.float32),
}
needs_flashinfer = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed"
)


def table(name: str, shape: str) -> Kernels:
    return build_kernels(name, shape=SHAPES[shape], device=torch.device("cuda"))


@pytest.mark.parametrize("shape", SHAPES)
def test_triton_serves_every_model(shape):
    assert table("triton", shape).name.startswith("triton (triton, torch")


@pytest.mark.parametrize("shape", ["m3", "m3_rank_of_four", "m3_rank_of_eight"])
def test_cuda_serves_the_real_model_and_each_of_its_ranks(shape):
    assert table("cuda", shape).name.startswith("cuda (cuda, triton, torch")


@pytest.mark.parametrize("shape", ["tiny_bf16", "tiny_fp32"])
def test_cuda_says_why_it_does_not_serve_the_tiny_model(shape):
    with pytest.raises(KernelUnavailableError, match=r"sm_90a serve (head dim 128|dtype)"):
        table("cuda", shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_auto_serves_every_model_and_names_what_it_leaves_out(shape, caplog):
    caplog.set_level(logging.INFO)
    kernels = table("auto", shape)
    assert "triton" in kernels.name
    assert ("cuda" in kernels.name) == shape.startswith("m3")
    chosen = [record for record in caplog.messages if record.startswith("kernel op=")]
    assert len(chosen) == len(dataclasses.fields(Kernels)) - 1


@needs_flashinfer
def test_flashinfer_serves_dense_attention_of_the_real_model():
    kernels = table("flashinfer", "m3")
    assert kernels.name.startswith("flashinfer (flashinfer, cuda")
    shape = BatchShape(seq_lens=(5000, 129, 0, 700), num_rows=(300, 1, 1, 129))
    batch = make_batch(shape, device="cuda", seed=31)
    inputs = (batch.pages, batch.rows, 128**-0.5)
    expected = dense_reference.paged_attention(batch.q_THD.float(), *inputs)
    for _ in range(2):  # the second time by the plan that the first has made
        actual = kernels.paged_attention(batch.q_THD, *inputs)
        require_close(actual, expected, limit=6e-3, what="paged attention")


@needs_flashinfer
def test_flashinfer_serves_packed_pictures():
    kernels = table("flashinfer", "m3")
    bounds = torch.tensor([0, 1200, 1200, 1300, 4000], dtype=torch.int32, device="cuda")
    q, k, v = torch.randn(3, 4000, 16, 80, dtype=torch.bfloat16, device="cuda")
    inputs = (bounds, 2700, 80**-0.5)
    expected = dense_reference.varlen_attention(q.float(), k.float(), v.float(), *inputs)
    actual = kernels.varlen_attention(q, k, v, *inputs)
    require_close(actual, expected, limit=6e-3, what="packed pictures")


def test_the_written_index_copy_makes_the_choice_of_one_stage():
    shape = BatchShape(seq_lens=(70_001, 3000, 40), num_rows=(1, 2, 1))
    batch = make_batch(shape, device="cuda", seed=32)
    index_k = batch.pages.index_k_PBD
    assert index_k is not None
    copy = IndexCopy.empty_like(index_k)
    poison_unwritten(batch.pages, batch.rows)
    copy.keys_PBD.fill_(77)
    copy.meta_PB.fill_(0x7FC00000)
    written = (~torch.isnan(index_k[..., 0].float())).flatten().nonzero()[:, 0]
    write_index_copy(index_k, written, copy)
    plain = copy_index_keys(index_k.view(-1, 128)[written])[1] & ~0xFFFF
    made = copy.meta_PB.flatten()[written] & ~0xFFFF
    bounds = [meta.view(torch.float32) for meta in (made, plain)]
    torch.testing.assert_close(bounds[0], bounds[1], rtol=0.02, atol=0.0)
    decode = CudaDecode(DecodeLibrary())
    chosen = choose_blocks_two_stage(decode, batch.index_q_TGD, index_k, copy, batch.rows, 16, 1)
    expected = decode.choose_blocks(batch.index_q_TGD, index_k, batch.rows, 16, 1)
    require_equal(chosen[0], expected, what="two-stage choice on the written copy")


def test_long_decode_steps_read_the_copy_and_short_ones_do_not():
    msa = CudaMsa(M3)
    for length, in_two_stages in ((300_000, True), (9000, False)):
        batch = make_batch(BatchShape(seq_lens=(length,)), device="cuda", seed=33)
        index_k = batch.pages.index_k_PBD
        assert index_k is not None
        copy_PX = torch.zeros(index_k.shape[0], 128 * 132, dtype=torch.uint8, device="cuda")
        copy, made = IndexCopy.over(copy_PX, 128), IndexCopy.of(index_k)
        copy.keys_PBD.copy_(made.keys_PBD)
        copy.meta_PB.copy_(made.meta_PB)
        before = msa.rescored()
        inputs = (batch.index_q_TGD, index_k, batch.rows, 16, 1)
        require_equal(
            msa.choose_blocks(*inputs, copy_PX), msa.choose_blocks(*inputs), what="choice"
        )
        after = msa.rescored()
        ranked = after.ranked - before.ranked
        assert ranked == (4 * (length // 128) if in_two_stages else 0)
        if in_two_stages:
            assert 0 < after.blocks - before.blocks < 0.1 * ranked
