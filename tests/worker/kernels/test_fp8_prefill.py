"""Prefill attention over e4m3 pages: widened exactly, chosen pages alone, same as dequantised."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

pytest.importorskip("triton")

from m3stack.bench.kernels.batches import BatchShape, MsaBatch, make_batch, written_slots
from m3stack.bench.kernels.harness import require_close, require_equal
from m3stack.bench.kernels.prefill_selections import rolling_selection
from m3stack.kernels.interface import NO_BLOCK, LayerPages, PagedRows
from m3stack.kernels.msa import reference
from m3stack.kernels.msa.decode.fp8_pages import Fp8Pages, quantise_pages
from m3stack.kernels.msa.prefill import block_attention_prefill
from m3stack.kernels.msa.prefill import widened_pages as widened
from m3stack.kernels.msa.prefill.cuda_library import PrefillLibrary
from m3stack.kernels.msa.prefill.widened_pages import (
    block_attention_fp8,
    pays_to_widen,
    widen_chosen,
)
from m3stack.kernels.msa.prefill.with_cuda import Arm, AttendPolicy, CudaPrefill
from m3stack.kernels.msa.with_cuda import CudaMsa
from m3stack.kernels.triton_table import TritonMsa
from tests.worker.kernels.test_select import M3

# numpy warns about how the interpreter of triton 3.6 reads scalars
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 128**-0.5


def quantised(batch: MsaBatch) -> tuple[Fp8Pages, LayerPages]:
    """The batch's pages in e4m3, NaN where nothing is written, and what they stand for."""
    size = torch.rand(batch.pages.k_PGBD.shape[:2], device=DEVICE)[..., None, None]
    k, k_scale = quantise_pages(batch.pages.k_PGBD * (0.5 + size))
    v, v_scale = quantise_pages(batch.pages.v_PGBD * (0.01 + 30 * size))
    exact = LayerPages(
        k.float() * k_scale[..., None, None], v.float() * v_scale[..., None, None], None
    )
    written_PB = written_slots(batch.rows, batch.pages.k_PGBD.shape[0])
    page, slot = (~written_PB).nonzero(as_tuple=True)
    for pool in (k.view(torch.uint8), v.view(torch.uint8)):
        pool[page.to(DEVICE), :, slot.to(DEVICE)] = 0x7F  # NaN in e4m3
    return Fp8Pages(k, v, k_scale, v_scale), exact


def test_scales_are_the_least_powers_of_two_that_hold_a_page():
    torch.manual_seed(1)
    pool = torch.randn(6, 2, 16, 16) * 10.0 ** torch.arange(-6, 6).view(6, 2, 1, 1)
    pool[0, 0], pool[1, 1] = 0.0, 448.0 / 4
    elements, scale_PG = quantise_pages(pool)
    mantissa, _ = torch.frexp(scale_PG)
    assert bool((mantissa == 0.5).all())
    assert float(scale_PG[1, 1]) == 0.25
    most = elements.float().abs().amax((-1, -2))
    assert bool((most <= 448).all())
    assert bool((most.flatten()[1:] > 200).all())
    wide = elements.float() * scale_PG[..., None, None]
    assert torch.equal(wide.to(torch.bfloat16).float(), wide)


def test_only_chosen_pages_are_widened_and_found_again(monkeypatch):
    shape = BatchShape(seq_lens=(1500, 0, 400), num_rows=(3, 1, 2), groups=2, heads_per_group=2)
    batch = make_batch(shape, device=DEVICE, seed=2, poison=False)
    pages, exact = quantised(batch)
    blocks_GTK = torch.full((2, 6, 4), NO_BLOCK, dtype=torch.int32, device=DEVICE)
    blocks_GTK[0, :3, :2] = torch.tensor([1, 11], dtype=torch.int32)
    # the last one lies behind the row and has no page
    blocks_GTK[1, 4:, :3] = torch.tensor([0, 3, 90], dtype=torch.int32)
    with monkeypatch.context() as patched:
        # what is not written stays NaN
        patched.setattr(torch, "empty", lambda *size, **kw: torch.full(*size, math.nan, **kw))
        wide, rows = widen_chosen(pages, blocks_GTK, batch.rows, torch.bfloat16)
    table = batch.rows.page_table_SJ
    chosen = {(0, 1, 0), (0, 11, 0), (2, 0, 1), (2, 3, 1)}  # sequence, block, group
    for sequence, block, group in chosen:
        new = wide.k_PGBD[int(rows.page_table_SJ[sequence, block]), group].float()
        old = exact.k_PGBD[int(table[sequence, block]), group]
        last = min(128, int(batch.rows.seq_lens_S[sequence]) - block * 128)
        assert torch.equal(new[:last], old[:last])
    written_PG = ~torch.isnan(wide.v_PGBD[:, :, 0, 0])
    assert int(written_PG.sum()) == len(chosen)


@pytest.mark.parametrize("new_blocks", [2, 15])
def test_attention_over_e4m3_pages_is_that_over_what_they_stand_for(new_blocks):
    torch.set_num_threads(1)
    shape = BatchShape(seq_lens=(2600, 300), num_rows=(9, 5), groups=1, heads_per_group=4)
    batch = make_batch(shape, device=DEVICE, seed=3, poison=False, dtype=torch.float16)
    pages, exact = quantised(batch)
    blocks_GTK = rolling_selection(batch.rows, 14, 1, new_blocks, seed=4)
    inputs = (blocks_GTK, batch.rows, SCALE)
    actual = block_attention_fp8(block_attention_prefill, batch.q_THD, pages, *inputs)
    expected = reference.block_attention(batch.q_THD.float(), exact, *inputs)
    # fp16 weights and output
    require_close(actual, expected, limit=3e-3, what="attention over e4m3 pages")


def test_a_long_sequence_beside_many_gets_no_copy_of_all_their_pages():
    million = 1 << 20
    for seq_lens, expected in [
        ((million,), True),
        ((4096, 100, 100), True),
        ((million, *[1000] * 7), False),
        ((32_768, *[100] * 63), False),
    ]:
        rows = PagedRows(
            torch.arange(len(seq_lens) + 1, dtype=torch.int32),
            torch.tensor(seq_lens, dtype=torch.int32),
            torch.zeros((len(seq_lens), 1), dtype=torch.int32),
            1,
            max(seq_lens),
        )
        assert pays_to_widen(rows, 128) is expected, seq_lens


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("num_rows", [(1, 1), (9, 5)])
def test_triton_serves_e4m3_pages_without_scales(num_rows, in_place, monkeypatch):
    torch.set_num_threads(1)
    if in_place:
        monkeypatch.setattr(widened, "MOST_WIDENED_PAGES", 0)
        monkeypatch.setattr(widened, "widen_chosen", None)
    shape = BatchShape(seq_lens=(700, 300), num_rows=num_rows, groups=1, heads_per_group=4)
    batch = make_batch(shape, device=DEVICE, seed=7, poison=False, dtype=torch.float16)
    pages = LayerPages(
        batch.pages.k_PGBD.to(torch.float8_e4m3fn),
        batch.pages.v_PGBD.to(torch.float8_e4m3fn),
        batch.pages.index_k_PBD,
    )
    assert pages.index_k_PBD is not None
    blocks_GTK = reference.choose_blocks(batch.index_q_TGD, pages.index_k_PBD, batch.rows, 4, 1)
    inputs = (blocks_GTK, batch.rows, SCALE)
    expected = reference.block_attention(batch.q_THD, pages, *inputs)
    actual = TritonMsa().block_attention(batch.q_THD, pages, *inputs)
    require_close(actual, expected, limit=3e-3, what="e4m3 pages")


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [(1, 1), (4, 2), (60, 30), (300, 70)])
def test_cuda_serves_e4m3_pages_without_scales(num_rows):
    batch = make_batch(BatchShape(seq_lens=(9000, 5000), num_rows=num_rows), device="cuda", seed=8)
    pages = LayerPages(
        batch.pages.k_PGBD.to(torch.float8_e4m3fn),
        batch.pages.v_PGBD.to(torch.float8_e4m3fn),
        batch.pages.index_k_PBD,
    )
    msa = CudaMsa(M3)
    blocks_GTK = msa.choose_blocks(batch.index_q_TGD, pages.index_k_PBD, batch.rows, 16, 1)
    inputs = (blocks_GTK, batch.rows, SCALE)
    expected = reference.block_attention(batch.q_THD, pages, *inputs)
    actual = msa.block_attention(batch.q_THD, pages, *inputs)
    require_close(actual, expected, limit=6e-3, what="e4m3 pages")


@pytest.mark.gpu
@pytest.mark.parametrize("arm", [Arm.MEASURED, Arm.UNION, Arm.KEY_MAJOR])
def test_cuda_arms_serve_widened_pages(arm):
    shape = BatchShape(seq_lens=(30_001, 0, 900), num_rows=(1500, 1, 333))
    batch = make_batch(shape, device="cuda", seed=5, poison=False)
    pages, exact = quantised(batch)
    blocks_GTK = rolling_selection(batch.rows, 1834, 4, 2, seed=6)
    kernels = CudaPrefill(PrefillLibrary(), AttendPolicy(arm=arm))
    inputs = (blocks_GTK, batch.rows, SCALE)
    actual = block_attention_fp8(kernels.block_attention, batch.q_THD, pages, *inputs)
    expected = reference.block_attention(batch.q_THD.float(), exact, *inputs)
    require_close(actual, expected, limit=6e-3, what=arm.name)
    narrow = LayerPages(exact.k_PGBD.bfloat16(), exact.v_PGBD.bfloat16(), None)
    require_equal(actual, kernels.block_attention(batch.q_THD, narrow, *inputs), what="bf16 pages")
    again = dataclasses.replace(batch.rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = block_attention_fp8(
            kernels.block_attention, batch.q_THD, pages, blocks_GTK, again, SCALE
        )
    graph.replay()
    require_equal(output, actual, what="replay")


@pytest.mark.gpu
@pytest.mark.parametrize("with_scales", [False, True])
@pytest.mark.parametrize("tile_tokens", [4, 8])
@pytest.mark.parametrize("new_blocks", [2, 15])
def test_pages_widened_as_they_load_give_what_they_stand_for(new_blocks, tile_tokens, with_scales):
    shape = BatchShape(seq_lens=(30_001, 0, 900, 128), num_rows=(500, 1, 333, 1))
    batch = make_batch(shape, device="cuda", seed=5, poison=False)
    pages, exact = quantised(batch)
    if not with_scales:
        pages = Fp8Pages(pages.k_PGBD, pages.v_PGBD, None, None)
        exact = LayerPages(pages.k_PGBD.float(), pages.v_PGBD.float(), None)
    blocks_GTK = rolling_selection(batch.rows, 835, 4, new_blocks, seed=6)
    policy = AttendPolicy(arm=Arm.UNION, tile_tokens=tile_tokens)
    kernels = CudaPrefill(PrefillLibrary(), policy)
    inputs = (blocks_GTK, batch.rows, SCALE)
    actual = kernels.block_attention_fp8(batch.q_THD, pages, *inputs)
    # unwritten slots are NaN in the pages and no numbers in the reference
    written = LayerPages(exact.k_PGBD.nan_to_num(), exact.v_PGBD.nan_to_num(), None)
    expected = reference.block_attention(batch.q_THD.float(), written, *inputs)
    # f16 weights, bf16 output
    require_close(actual, expected, limit=3e-3, what="e4m3 pages")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = kernels.block_attention_fp8(batch.q_THD, pages, *inputs)
    for _ in range(20):
        output.fill_(float("nan"))
        graph.replay()
        require_equal(output, actual, what="replay")
