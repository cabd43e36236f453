"""Candidates on a GPU: ranks with parts choose what the same kernels choose of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from m3stack.bench.kernels.batches import BLOCK_TOKENS, BatchShape, MsaBatch, make_batch
from m3stack.bench.kernels.harness import require_equal
from m3stack.kernels.msa import candidates as reference
from m3stack.kernels.msa.candidates_with_cuda import CandidateLibrary, CudaCandidates
from m3stack.kernels.msa.with_cuda import CudaMsa
from m3stack.kernels.shape import KernelShape

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

CHOSEN = 16
SHAPES = {
    "decode": BatchShape(seq_lens=(1, 128, 129, 2049, 5000, 0, 30_000)),
    "long decode": BatchShape(seq_lens=(200_123,)),
    "drafts": BatchShape(seq_lens=(2048, 2050, 9000, 4097), num_rows=(4, 4, 8, 1)),
    "prefill": BatchShape(
        seq_lens=(1, 127, 128, 129, 2047, 2048, 2049, 2047, 0, 5000, 4001, 640),
        num_rows=(1, 127, 1, 129, 100, 2048, 3, 2047, 2, 300, 77, 512),
    ),
    "chunk": BatchShape(seq_lens=(60_123,), num_rows=(5000,)),
}


@pytest.fixture(scope="module")
def msa() -> CudaMsa:
    return CudaMsa(KernelShape(torch.bfloat16, 64, 4, 128, 64, 128, CHOSEN, 1, 16, 80, 128, 4))


@pytest.fixture(scope="module")
def kernels(msa: CudaMsa) -> CudaCandidates:
    return CudaCandidates(CandidateLibrary(), msa.decode, msa.prefill)


def candidates(batch: MsaBatch, ranks: int, local: int, choose) -> Tensor:
    index_k_PBD = batch.pages.index_k_PBD
    assert index_k_PBD is not None
    found = []
    for rank in range(ranks):
        nothing = torch.full_like(index_k_PBD[:1], float("nan"))
        pool = torch.cat([index_k_PBD[rank::ranks], nothing])
        part = reference.part_of_rows(
            batch.rows, rank=rank, ranks=ranks, page_tokens=BLOCK_TOKENS,
            last_row=len(pool) - 1, num_local=local,
        )  # fmt: skip
        found.append(choose(batch.index_q_TGD, pool, part, CHOSEN, local))
    return torch.stack(found)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("ranks", "local"), [(1, 1), (2, 1), (4, 1), (8, 1), (4, 3)])
def test_merged_candidates_are_the_blocks_of_the_whole(msa, kernels, name, ranks, local):
    batch = make_batch(SHAPES[name], device="cuda", seed=3)
    found = candidates(batch, ranks, local, kernels.choose_candidates)
    merged = kernels.merge_candidates(found, batch.rows, BLOCK_TOKENS, local)
    require_equal(
        merged, reference.merge_candidates(found, batch.rows, BLOCK_TOKENS, local), what="merge"
    )
    # one score is the same products in the same order, whichever pages stand around it
    whole = msa.choose_blocks(batch.index_q_TGD, batch.pages.index_k_PBD, batch.rows, CHOSEN, local)
    require_equal(merged, whole, what=f"{name}, {ranks} ranks")


@pytest.mark.parametrize("name", ["decode", "drafts", "prefill"])
def test_candidates_of_exact_sums_are_the_reference_s(kernels, name):
    batch = make_batch(SHAPES[name], device="cuda", seed=4, poison=False)
    torch.manual_seed(5)
    index_k = batch.pages.index_k_PBD
    assert index_k is not None
    index_k.copy_(torch.randint(-2, 3, index_k.shape, device="cuda"))
    index_q = batch.index_q_TGD
    index_q.copy_(torch.randint(-1, 2, index_q.shape, device="cuda"))
    # the kernels leave the places of local blocks empty
    actual = candidates(batch, 3, 1, kernels.choose_candidates)[..., : CHOSEN - 1]
    expected = candidates(batch, 3, 1, reference.choose_candidates)[..., : CHOSEN - 1]
    require_equal(actual, expected, what=name)


def test_the_part_of_a_step_can_be_captured(kernels):
    batch = make_batch(SHAPES["decode"], device="cuda", seed=6)
    expected = candidates(batch, 2, 1, kernels.choose_candidates)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = candidates(batch, 2, 1, kernels.choose_candidates)
    found.zero_()
    graph.replay()
    require_equal(found, expected, what="replayed")
