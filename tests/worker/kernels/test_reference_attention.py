"""The dense attention references against softmax spelled out row by row."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from m3stack.kernels import paged_rows
from m3stack.kernels.attention import reference
from tests.worker.kernels.paged_cases import DIM, GROUPS, HEADS, paged_case


@pytest.mark.parametrize("tile_values", [40, 3000, 1 << 24])
@pytest.mark.parametrize("seed", range(20))
def test_paged_attention_sees_every_earlier_key_and_no_other(
    seed: int, tile_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_rows, "TILE_VALUES", tile_values)
    case = paged_case(seed, decode_only=seed % 3 == 0)
    q = torch.randn(case.num_tokens, HEADS, DIM)
    out = reference.paged_attention(q, case.pages, case.rows, 0.4)
    for row in range(case.num_tokens):
        position, sequence = case.row_position[row], case.row_sequence[row]
        if sequence < 0:
            assert not out[row].any()
            continue
        keys = case.keys(case.pages.k_PGBD, sequence, position + 1).double()
        values = case.keys(case.pages.v_PGBD, sequence, position + 1).double()
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            weights = (keys[:, group] @ q[row, head].double() * 0.4).softmax(0)
            assert (out[row, head] - weights @ values[:, group]).abs().max() < 2e-6


@pytest.mark.parametrize("tile_values", [10, 1 << 24])
def test_varlen_attention_stays_inside_each_packed_row(
    tile_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "TILE_VALUES", tile_values)
    lengths = [5, 1, 0, 12]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, sum(lengths), 2, DIM)
    out = reference.varlen_attention(q, k, v, cu_seqlens, max(lengths), 0.3)
    bounds = cu_seqlens.tolist()
    for first, last in pairwise(bounds):
        for head in range(2):
            logits = q[first:last, head].double() @ k[first:last, head].double().T * 0.3
            expected = logits.softmax(-1) @ v[first:last, head].double()
            assert torch.allclose(out[first:last, head].double(), expected, atol=2e-6)


def test_attention_leaves_the_cache_as_it_was() -> None:
    case = paged_case(2)
    before = case.pages.k_PGBD.clone(), case.pages.v_PGBD.clone()
    reference.paged_attention(torch.randn(case.num_tokens, HEADS, DIM), case.pages, case.rows, 1.0)
    for now, then in zip((case.pages.k_PGBD, case.pages.v_PGBD), before, strict=True):
        assert torch.equal(now.nan_to_num(7e9), then.nan_to_num(7e9))
