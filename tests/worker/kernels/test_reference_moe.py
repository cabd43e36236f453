"""Routing and experts against the definition, token by token."""

from __future__ import annotations

import pytest
import torch

from m3stack.kernels.moe import reference
from m3stack.kernels.pointwise.reference import swiglu_oai

T, M, F, E, K = 9, 6, 5, 7, 3


def test_routing_chooses_by_biased_and_weighs_by_unbiased_scores() -> None:
    torch.manual_seed(0)
    x, router, bias = torch.randn(T, M), torch.randn(E, M), torch.randn(E) * 0.5
    ids, weights = reference.route_tokens(x, router, bias, K)
    assert ids.dtype == torch.int32
    assert weights.dtype == torch.float32
    scores = (x.double() @ router.double().T).sigmoid()
    for token in range(T):
        biased = (scores[token] + bias.double()).tolist()
        expected = sorted(range(E), key=lambda expert: -biased[expert])[:K]
        assert ids[token].tolist() == expected
        total = sum(scores[token, expert].item() for expert in expected)
        for place, expert in enumerate(expected):
            share = scores[token, expert].item() / total
            assert weights[token, place].item() == pytest.approx(share, rel=1e-5)


def test_equal_scores_go_to_the_lower_expert() -> None:
    ids, _ = reference.route_tokens(
        torch.ones(2, M), torch.zeros(E, M), torch.tensor([0.0, 1, 0, 1, 1, 0, 1]), K
    )
    assert ids.tolist() == [[1, 3, 4]] * 2


def test_the_router_is_computed_in_fp32_for_half_precision_tokens() -> None:
    torch.manual_seed(1)
    x, router, bias = torch.randn(T, M).bfloat16(), torch.randn(E, M), torch.randn(E)
    for got, expected in zip(
        reference.route_tokens(x, router, bias, K),
        reference.route_tokens(x.float(), router, bias, K),
        strict=True,
    ):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("gather_values", [0, 1 << 22])
def test_experts_add_up_by_weight_and_negative_ids_add_nothing(
    gather_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "GATHER_VALUES", gather_values)
    torch.manual_seed(2)
    x, gate_up, down = torch.randn(T, M), torch.randn(E, 2 * F, M), torch.randn(E, M, F)
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).to(torch.int32)
    ids[0, 1] = ids[4, 0] = -1
    ids[5] = -1
    weights = torch.rand(T, K)
    out = reference.run_experts(x, gate_up, down, ids, weights, 1.702, 7.0)
    expected = torch.zeros(T, M, dtype=torch.float64)
    for token in range(T):
        for place, expert in enumerate(ids[token].tolist()):
            if expert >= 0:
                hidden = gate_up[expert].double() @ x[token].double()
                acted = swiglu_oai(hidden[:F], hidden[F:], 1.702, 7.0)
                expected[token] += weights[token, place].double() * (down[expert].double() @ acted)
    assert (out - expected).abs().max() < 1e-5
    assert not out[5].any()


def test_both_ways_of_running_experts_agree_in_half_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(3)
    x, gate_up, down = (
        torch.randn(*shape).bfloat16() for shape in ((T, M), (E, 2 * F, M), (E, M, F))
    )
    ids = torch.randint(0, E, (T, K), dtype=torch.int32)
    weights = torch.rand(T, K)
    side_by_side = reference.run_experts(x, gate_up, down, ids, weights, 1.702, 7.0)
    monkeypatch.setattr(reference, "GATHER_VALUES", 0)
    in_turn = reference.run_experts(x, gate_up, down, ids, weights, 1.702, 7.0)
    assert side_by_side.dtype == torch.bfloat16
    # fp32 sums in another order, then one rounding: at most one bf16 step apart
    assert torch.allclose(side_by_side.float(), in_turn.float(), rtol=2**-7, atol=1e-5)
