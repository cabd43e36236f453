"""The MSA reference against the definition, spelled out row by row and key by key."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor

from m3stack.kernels import paged_rows
from m3stack.kernels.interface import PagedRows
from m3stack.kernels.msa.reference import (
    block_attention,
    block_scores,
    choose_blocks,
    rank_blocks,
    row_positions,
)
from tests.worker.kernels.paged_cases import BLOCK, DIM, GROUPS, HEADS, PagedCase, paged_case

# every tile of 40 values holds one row; the large one holds whole steps
TILES = pytest.mark.parametrize("tile_values", [40, 3000, 1 << 24])


def spelled_scores(case: PagedCase, index_q_TGD: Tensor, row: int, group: int) -> list[float]:
    position, sequence = case.row_position[row], case.row_sequence[row]
    keys = case.keys(case.pages.index_k_PBD, sequence, position + 1)
    dots = (keys @ index_q_TGD[row, group]).tolist()
    return [max(dots[start : start + BLOCK]) for start in range(0, position + 1, BLOCK)]


def spelled_choice(scores: list[float], num_blocks: int, num_local: int) -> list[int]:
    own = len(scores) - 1
    local = [block for block in range(own + 1) if block > own - num_local]
    others = [block for block in range(own + 1) if block not in local]

    def better(a: int, b: int) -> int:
        left, right = (-math.inf if math.isnan(scores[x]) else scores[x] for x in (a, b))
        if left != right:
            return -1 if left > right else 1
        return a - b

    others.sort(key=functools.cmp_to_key(better))
    kept = sorted(local + others[: num_blocks - len(local)])
    return kept + [-1] * (num_blocks - len(kept))


@TILES
@pytest.mark.parametrize("seed", range(25))
def test_scores_and_choice_follow_the_definition(
    seed: int, tile_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_rows, "TILE_VALUES", tile_values)
    case = paged_case(seed)
    num_blocks = 2 + seed % 5
    num_local = 1 + seed % 2
    index_q = torch.randint(-2, 3, (case.num_tokens, GROUPS, DIM)).float()
    scores = block_scores(index_q, case.pages.index_k_PBD, case.rows)
    blocks = choose_blocks(index_q, case.pages.index_k_PBD, case.rows, num_blocks, num_local)
    ranked = rank_blocks(scores, case.rows, BLOCK, num_blocks, num_local)
    assert blocks.dtype == torch.int32
    assert blocks.shape == (GROUPS, case.num_tokens, num_blocks)
    # the shortcut for short sequences chooses what ranking chooses
    assert torch.equal(blocks, ranked)
    for row in range(case.num_tokens):
        for group in range(GROUPS):
            if case.row_sequence[row] < 0:
                assert blocks[group, row].tolist() == [-1] * num_blocks
                continue
            expected = spelled_scores(case, index_q, row, group)
            seen = scores[group, row].tolist()
            assert seen[: len(expected)] == expected
            assert all(score == -math.inf for score in seen[len(expected) :])
            choice = spelled_choice(expected, num_blocks, num_local)
            assert blocks[group, row].tolist() == choice


def rows_at(position: int) -> PagedRows:
    width = position // BLOCK + 1
    return PagedRows(
        query_start_S1=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens_S=torch.tensor([position + 1], dtype=torch.int32),
        page_table_SJ=torch.arange(width, dtype=torch.int32)[None],
        max_query_len=1,
        max_seq_len=position + 1,
    )


@pytest.mark.parametrize(
    ("scores", "num_blocks", "num_local", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0, 0.0], 3, 1, [0, 1, 4]),
        ([0.0, -0.0, 0.0, -9.0], 3, 1, [0, 1, 3]),
        ([-0.0, 0.0, -9.0], 2, 1, [0, 2]),
        ([math.nan, -5.0, math.nan, 0.0], 2, 1, [1, 3]),
        ([math.nan, math.nan, math.nan, 0.0], 3, 1, [0, 1, 3]),
        ([-math.inf, -math.inf, 2.0, 0.0], 3, 1, [0, 2, 3]),
        ([math.inf, math.inf, math.inf, -3.0], 2, 1, [0, 3]),
        ([math.inf, 3.4028234663852886e38, math.inf, math.nan], 3, 1, [0, 2, 3]),
        ([9.0, 8.0, 7.0, -1.0, -2.0], 3, 2, [0, 3, 4]),
        ([9.0, 8.0, 7.0, -1.0, -2.0], 2, 2, [3, 4]),
        ([5.0], 3, 2, [0, -1, -1]),
    ],
)
def test_ranking_is_a_total_order(
    scores: list[float], num_blocks: int, num_local: int, expected: list[int]
) -> None:
    rows = rows_at(BLOCK * len(scores) - 1)
    chosen = rank_blocks(torch.tensor(scores).view(1, 1, -1), rows, BLOCK, num_blocks, num_local)
    assert chosen.view(-1).tolist() == expected


def test_ranking_ignores_scores_of_later_blocks() -> None:
    scores = torch.tensor([1.0, 2.0, 9.0, 9.0]).view(1, 1, -1)
    assert rank_blocks(scores, rows_at(BLOCK + 1), BLOCK, 3, 1).view(-1).tolist() == [0, 1, -1]


@TILES
@pytest.mark.parametrize("seed", range(25))
def test_block_attention_is_softmax_over_the_chosen_visible_keys(
    seed: int, tile_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_rows, "TILE_VALUES", tile_values)
    case = paged_case(seed, decode_only=seed % 3 == 0)
    num_chosen = 1 + seed % 4
    q = torch.randn(case.num_tokens, HEADS, DIM)
    blocks = random_choice(case, num_chosen)
    out = block_attention(q, case.pages, blocks, case.rows, 0.7)
    assert out.shape == q.shape
    for row in range(case.num_tokens):
        position, sequence = case.row_position[row], case.row_sequence[row]
        if sequence < 0:
            assert not out[row].any()
            continue
        keys = case.keys(case.pages.k_PGBD, sequence, position + 1).double()
        values = case.keys(case.pages.v_PGBD, sequence, position + 1).double()
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            chosen = blocks[group, row].tolist()
            seen = [at for at in range(position + 1) if at // BLOCK in chosen]
            logits = keys[seen, group] @ q[row, head].double() * 0.7
            expected = logits.softmax(0) @ values[seen, group]
            # an empty choice sees nothing and gives zeros
            assert (out[row, head] - expected).abs().max() < 2e-6


def random_choice(case: PagedCase, num_chosen: int) -> Tensor:
    blocks = torch.full((GROUPS, case.num_tokens, num_chosen), -1, dtype=torch.int32)
    for row, position in enumerate(case.row_position):
        for group in range(GROUPS):
            visible = position // BLOCK + 1
            picked = torch.randperm(visible)[:num_chosen].sort().values
            # some rows are left with no block at all
            picked = picked[: 0 if torch.rand(()) < 0.1 else None]
            blocks[group, row, : len(picked)] = picked.to(torch.int32)
    return blocks


@pytest.mark.parametrize("seed", range(12))
def test_row_positions_follow_the_definition(seed: int) -> None:
    case = paged_case(seed)
    positions = row_positions(case.rows, case.num_tokens, torch.device("cpu"))
    assert positions.tolist() == case.row_position


def test_fp64_stays_fp64_and_bf16_is_computed_in_fp32() -> None:
    case = paged_case(3)
    index_q = torch.randn(case.num_tokens, GROUPS, DIM)
    exact = block_scores(index_q.double(), case.pages.index_k_PBD.double(), case.rows)
    assert exact.dtype == torch.float64
    halved = block_scores(index_q.bfloat16(), case.pages.index_k_PBD.bfloat16(), case.rows)
    assert halved.dtype == torch.float32
    expected = block_scores(index_q.bfloat16().float(), case.pages.index_k_PBD, case.rows)
    assert torch.equal(halved, expected)


def test_a_long_prefill_needs_little_memory() -> None:
    # gathering every row's blocks at once would take 2 x 2048 x 2 x 8 x 128 x 32 x 4 = 1 GiB
    length, block, dim = 2048 + 8192, 128, 32
    num_pages = length // block
    rows = PagedRows(
        query_start_S1=torch.tensor([0, 2048], dtype=torch.int32),
        seq_lens_S=torch.tensor([length], dtype=torch.int32),
        page_table_SJ=torch.arange(num_pages, dtype=torch.int32)[None],
        max_query_len=2048,
        max_seq_len=length,
    )
    needs = [
        tile.rows_SR.numel()
        for tile in paged_rows.tiles(
            rows, block, lambda pages, count: paged_rows.TileCost(0, 8 * 2 * block * dim)
        )
    ]
    assert sum(needs) == 2048
    assert max(needs) * 8 * 2 * block * dim <= paged_rows.TILE_VALUES
