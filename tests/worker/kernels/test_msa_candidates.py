"""Blocks chosen from index keys in parts: what one rank with all keys would choose."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from m3stack.kernels.msa import candidates as msa
from m3stack.kernels.msa.reference import choose_blocks
from tests.worker.kernels.paged_cases import BLOCK, DIM, GROUPS, PagedCase, paged_case


def part_of_pool(index_k_PBD: Tensor, rank: int, ranks: int) -> Tensor:
    """A rank's every `ranks`-th page, and the row of NaN behind them."""
    nothing = torch.full_like(index_k_PBD[:1], float("nan"))
    return torch.cat([index_k_PBD[rank::ranks], nothing])


def merged(
    case: PagedCase, index_q_TGD: Tensor, ranks: int, num_blocks: int, num_local: int
) -> Tensor:
    index_k_PBD = case.pages.index_k_PBD
    assert index_k_PBD is not None
    gathered = []
    for rank in range(ranks):
        pool = part_of_pool(index_k_PBD, rank, ranks)
        part = msa.part_of_rows(
            case.rows, rank=rank, ranks=ranks, page_tokens=BLOCK,
            last_row=len(pool) - 1, num_local=num_local,
        )  # fmt: skip
        best = msa.choose_candidates(index_q_TGD, pool, part, num_blocks, num_local)
        assert best.shape == (GROUPS, case.num_tokens, num_blocks)
        assert (best[..., 1:] <= best[..., :-1]).all()
        gathered.append(best)
    return msa.merge_candidates(torch.stack(gathered), case.rows, BLOCK, num_local)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(20))
def test_merged_candidates_are_the_blocks_of_the_whole(seed: int, ranks: int) -> None:
    case = paged_case(seed)
    num_blocks, num_local = 2 + seed % 5, 1 + seed % 2
    # small integers: sums are exact in any order, and ties are common
    index_q = torch.randint(-2, 3, (case.num_tokens, GROUPS, DIM)).float()
    assert case.pages.index_k_PBD is not None
    expected = choose_blocks(index_q, case.pages.index_k_PBD, case.rows, num_blocks, num_local)
    assert torch.equal(merged(case, index_q, ranks, num_blocks, num_local), expected)


def test_a_rank_reads_its_own_pages_of_the_prefix_and_none_of_the_others() -> None:
    case = paged_case(3)
    for rank in range(2):
        part = msa.part_of_rows(
            case.rows, rank=rank, ranks=2, page_tokens=BLOCK, last_row=99, num_local=1
        )
        for sequence, length in enumerate(case.rows.seq_lens_S.tolist()):
            pages = case.rows.page_table_SJ[sequence, : -(-length // BLOCK)].tolist()
            first = length - int(case.rows.query_start_S1.diff()[sequence])
            shared = max(0, first // BLOCK)
            kept = [b for b, page in enumerate(pages[:shared]) if page % 2 == rank]
            tail = [b if pages[b] % 2 == rank else -1 for b in range(shared, len(pages))]
            short = int(part.rows.seq_lens_S[sequence])
            used = -(-short // BLOCK)
            assert part.blocks_SJ[sequence, :used].tolist() == (kept + tail if length else [])
            rows = [pages[b] // 2 if b >= 0 else 99 for b in kept + tail]
            assert part.rows.page_table_SJ[sequence, :used].tolist() == (rows if length else [])
            assert (short - length) % BLOCK == 0


def test_packed_order_is_the_total_order() -> None:
    # best first; of equal scores the lower block
    order = [
        (torch.inf, 7), (1.5, 2), (1.5, 9), (1e-42, 0), (0.0, 3), (-0.0, 4), (-2.0, 1),
        (-torch.inf, 5), (torch.nan, 6), (-torch.inf, 8),
    ]  # fmt: skip
    scores, blocks = map(torch.tensor, zip(*order, strict=True))
    packed = msa.pack(scores, blocks)
    assert (packed[1:] < packed[:-1]).all()
    assert (packed > msa.NO_CANDIDATE).all()
    assert torch.equal(msa.blocks_of(packed), blocks)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_slot_is_written_on_one_rank(ranks: int) -> None:
    slots = torch.tensor([0, 5, 130, 64 * 128 + 3, -1])
    parts = [msa.own_slots(slots, rank=rank, ranks=ranks, page_tokens=128) for rank in range(ranks)]
    for index, slot in enumerate(slots.tolist()):
        page, offset = divmod(slot, 128)
        held = [int(part[index]) for part in parts]
        expected = [
            page // ranks * 128 + offset if slot >= 0 and page % ranks == rank else -1
            for rank in range(ranks)
        ]
        assert held == expected
