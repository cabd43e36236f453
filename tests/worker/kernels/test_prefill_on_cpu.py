"""The CUDA sources of attention by query tiles on a CPU: any order of threads gives the reference.

What the emulator cannot tell: whether a PTX wrapper says what its name says, and anything of time.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from m3stack.bench.kernels.batches import BatchShape, MsaBatch, make_batch, written_slots
from m3stack.bench.kernels.harness import require_close
from m3stack.bench.kernels.prefill_selections import rolling_selection
from m3stack.kernels.interface import NO_BLOCK, LayerPages
from m3stack.kernels.msa import reference
from m3stack.kernels.msa.decode.fp8_pages import Fp8Pages, quantise_pages
from m3stack.kernels.msa.prefill.with_cuda import Arm, AttendPolicy, CudaPrefill
from tests.worker.kernels.cuda_on_cpu.prefill import EmulatedPrefill, build

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

SCALE = 128**-0.5
# bf16 weights and output against an fp32 softmax; over e4m3 pages weights are f16, of 3 bits more
CLOSE, CLOSE_CODED = 6e-3, 3e-3
NAN_CODE = 0x7F
# a chunk in mid sequence, an idle row, one row alone, a chunk from its start
RAGGED = BatchShape(seq_lens=(2950, 0, 300, 260), num_rows=(6, 1, 1, 5), groups=2)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("prefill_on_cpu"))


def prefill(built: Path, tile_tokens: int, *, seed: int) -> CudaPrefill:
    torch.set_num_threads(1)
    library = EmulatedPrefill(built, processors=3, seed=seed)
    policy = AttendPolicy(arm=Arm.UNION, tile_tokens=tile_tokens)
    return CudaPrefill(library, policy, device="cpu")


def coded(batch: MsaBatch, *, with_scales: bool) -> tuple[Fp8Pages, LayerPages]:
    """The batch's pages in e4m3, NaN where nothing is written, and in bf16 what they stand for."""
    size = torch.linspace(0.01, 30, batch.pages.k_PGBD.shape[0])[:, None, None, None]
    k, k_scale = quantise_pages(batch.pages.k_PGBD * size.clamp(0.5, 2))
    v, v_scale = quantise_pages(batch.pages.v_PGBD * size)
    if not with_scales:
        k_scale, v_scale = torch.ones_like(k_scale), torch.ones_like(v_scale)
        k = batch.pages.k_PGBD.to(torch.float8_e4m3fn)
    exact = LayerPages(
        (k.float() * k_scale[..., None, None]).bfloat16(),
        (v.float() * v_scale[..., None, None]).bfloat16(),
        None,
    )
    page, slot = (~written_slots(batch.rows, k.shape[0])).nonzero(as_tuple=True)
    for pool in (k.view(torch.uint8), v.view(torch.uint8)):
        pool[page, :, slot] = NAN_CODE
    for pool in (exact.k_PGBD, exact.v_PGBD):
        pool[page, :, slot] = float("nan")
    if with_scales:
        return Fp8Pages(k, v, k_scale, v_scale), exact
    return Fp8Pages(k, v, None, None), exact


@pytest.mark.parametrize("tile_tokens", [4, 8])
def test_rows_attend_the_blocks_they_chose(built: Path, tile_tokens: int) -> None:
    batch = make_batch(RAGGED, device="cpu", seed=tile_tokens)
    blocks_GTK = rolling_selection(batch.rows, 13, 2, 2, seed=3)
    inputs = (batch.pages, blocks_GTK, batch.rows, SCALE)
    actual = prefill(built, tile_tokens, seed=tile_tokens).block_attention(batch.q_THD, *inputs)
    expected = reference.block_attention(batch.q_THD.float(), *inputs)
    require_close(actual, expected, limit=CLOSE, what="attention over bf16 pages")


@pytest.mark.parametrize("with_scales", [False, True])
@pytest.mark.parametrize("new_blocks", [2, 15])
@pytest.mark.parametrize("tile_tokens", [4, 8])
def test_coded_pages_give_what_they_stand_for(
    built: Path, tile_tokens: int, new_blocks: int, with_scales: bool
) -> None:
    batch = make_batch(RAGGED, device="cpu", seed=new_blocks, poison=False)
    pages, exact = coded(batch, with_scales=with_scales)
    blocks_GTK = rolling_selection(batch.rows, 13, 2, new_blocks, seed=4)
    # a list with a hole, and a row that chose nothing
    blocks_GTK[0, 2, 4], blocks_GTK[1, 3] = NO_BLOCK, NO_BLOCK
    inputs = (blocks_GTK, batch.rows, SCALE)
    kernels = prefill(built, tile_tokens, seed=7 * tile_tokens + new_blocks)
    actual = kernels.block_attention_fp8(batch.q_THD, pages, *inputs)
    expected = reference.block_attention(batch.q_THD.float(), exact, *inputs)
    require_close(actual, expected, limit=CLOSE_CODED, what="attention over e4m3 pages")


def test_a_nan_that_was_written_is_seen(built: Path) -> None:
    batch = make_batch(BatchShape(seq_lens=(300,), num_rows=(5,), groups=2), device="cpu", seed=1)
    pages, _ = coded(batch, with_scales=True)
    page = int(batch.rows.page_table_SJ[0, 1])
    pages.v_PGBD.view(torch.uint8)[page, 1, 7, 5] = NAN_CODE
    blocks_GTK = rolling_selection(batch.rows, 5, 2, 2, seed=4)
    kernels = prefill(built, 8, seed=2)
    out_THD = kernels.block_attention_fp8(batch.q_THD, pages, blocks_GTK, batch.rows, SCALE)
    is_nan_HD = out_THD.isnan().all(0)
    assert is_nan_HD[16:, 5].all()
    assert int(is_nan_HD.sum()) == 16


def test_ranks_of_fewer_heads_are_filled_up(built: Path) -> None:
    shape = BatchShape(seq_lens=(700,), num_rows=(6,), groups=1, heads_per_group=8)
    batch = make_batch(shape, device="cpu", seed=5, poison=False)
    pages, exact = coded(batch, with_scales=False)
    inputs = (rolling_selection(batch.rows, 6, 1, 2, seed=4), batch.rows, SCALE)
    actual = prefill(built, 4, seed=5).block_attention_fp8(batch.q_THD, pages, *inputs)
    expected = reference.block_attention(batch.q_THD.float(), exact, *inputs)
    require_close(actual, expected, limit=CLOSE_CODED, what="eight heads of a group")
