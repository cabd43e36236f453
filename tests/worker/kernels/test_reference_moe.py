"""Routing and experts against the definition, token by token."""

from __future__ import annotations

import pytest
import torch

from m3stack.kernels.interface import Mxfp8Weight
from m3stack.kernels.moe import reference
from m3stack.kernels.pointwise.reference import swiglu_oai
from m3stack.kernels.quantised import mxfp8

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


@pytest.mark.parametrize("poisoned", ["router", "bias", "token"])
def test_a_nan_is_chosen_and_poisons_its_token_alone(poisoned: str) -> None:
    torch.manual_seed(4)
    x, router, bias = torch.randn(T, M), torch.randn(E, M), torch.zeros(E)
    clean_ids, clean_weights = reference.route_tokens(x, router, bias, K)
    if poisoned == "router":
        router[5, 2] = float("nan")
    elif poisoned == "bias":
        bias[5] = float("nan")
    else:
        x[3, 1] = float("nan")
    ids, weights = reference.route_tokens(x, router, bias, K)
    assert all(len(set(row)) == K and min(row) >= 0 and max(row) < E for row in ids.tolist())
    if poisoned == "token":
        assert ids[3].tolist() == list(range(K))
        assert weights[3].isnan().all()
        others = [token for token in range(T) if token != 3]
        assert torch.equal(ids[others], clean_ids[others])
        assert torch.equal(weights[others], clean_weights[others])
    else:
        assert (ids[:, 0] == 5).all()
        # the bias takes part in the choice alone
        assert weights.isnan().all() == (poisoned == "router")


def test_a_negative_id_adds_nothing_even_beside_a_broken_expert() -> None:
    torch.manual_seed(5)
    x, gate_up, down = torch.randn(2, M), torch.randn(E, 2 * F, M), torch.randn(E, M, F)
    gate_up[0] = float("nan")
    ids = torch.tensor([[1, -1], [-1, -1]], dtype=torch.int32)
    out = reference.run_experts(x, gate_up, down, ids, torch.ones(2, 2), 1.702, 7.0)
    alone = reference.run_experts(x[:1], gate_up, down, ids[:1, :1], torch.ones(1, 1), 1.702, 7.0)
    assert torch.equal(out[:1], alone)
    assert not out[1].any()


def random_mxfp8(*shape: int, size: float = 1.0) -> Mxfp8Weight:
    return mxfp8.encode(torch.randn(*shape) * size)


@pytest.mark.parametrize("gather_values", [0, 1 << 22])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_in_mxfp8_mean_their_decoded_weights(
    gather_values: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "GATHER_VALUES", gather_values)
    torch.manual_seed(6)
    gate_up, down = random_mxfp8(E, 128, 32, size=2.0), random_mxfp8(E, 32, 64)
    x, weights = torch.randn(T, 32).to(dtype), torch.rand(T, K)
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).to(torch.int32)
    ids[2, 0] = -1
    out = reference.run_experts(x, gate_up, down, ids, weights, 1.702, 7.0)
    plain = (mxfp8.decode(weight, torch.float32) for weight in (gate_up, down))
    assert torch.equal(out, reference.run_experts(x, *plain, ids, weights, 1.702, 7.0))


@pytest.mark.parametrize("form", ["plain", "mxfp8", "mxfp8 both", "side by side"])
def test_the_clamp_acts_on_every_path(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "GATHER_VALUES", 1 << 22 if form == "side by side" else 0)
    torch.manual_seed(7)
    # gates and ups of about 50: nearly all of them beyond the limit of 7
    x = torch.randn(T, 32)
    coded = random_mxfp8(E, 128, 32, size=9.0), random_mxfp8(E, 32, 64)
    decoded = tuple(mxfp8.decode(weight, torch.float32) for weight in coded)
    ids = torch.randint(0, E, (T, K), dtype=torch.int32)
    is_quantised = form.startswith("mxfp8")
    run = reference.run_experts_mxfp8_both if form == "mxfp8 both" else reference.run_experts
    rounded = mxfp8.round_trip if form == "mxfp8 both" else lambda value: value

    def expected(limit: float) -> torch.Tensor:
        out = torch.zeros(T, 32, dtype=torch.float64)
        for token in range(T):
            for expert in ids[token].tolist():
                hidden = (decoded[0][expert].double() @ rounded(x[token]).double()).float()
                gate, up = hidden[:64].clamp(max=limit), hidden[64:].clamp(-limit, limit)
                acted = (up + 1) * gate * torch.sigmoid(1.702 * gate)
                out[token] += decoded[1][expert].double() @ rounded(acted).double() / K
        return out

    weights = torch.full((T, K), 1 / K)
    out = run(x, *(coded if is_quantised else decoded), ids, weights, 1.702, 7.0)
    # fp32 sums against fp64 ones; a rounded hidden value may also fall to the other side of a tie
    limit = 5e-3 if form == "mxfp8 both" else 2e-6
    right = expected(7.0)
    assert (out - right).norm() <= limit * right.norm()
    assert (right - expected(float("inf"))).norm() > 0.5 * right.norm()


def test_rounding_activations_costs_what_the_decision_note_says() -> None:
    torch.manual_seed(8)
    gate_up, down = random_mxfp8(E, 256, 128, size=128**-0.5), random_mxfp8(E, 128, 128)
    x, weights = torch.randn(64, 128), torch.full((64, K), 1 / K)
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(64)]).to(torch.int32)
    exact = reference.run_experts(x, gate_up, down, ids, weights, 1.702, 7.0)
    rounded = reference.run_experts_mxfp8_both(x, gate_up, down, ids, weights, 1.702, 7.0)
    in_bf16 = reference.run_experts(x.bfloat16(), gate_up, down, ids, weights, 1.702, 7.0)
    loss = ((rounded - exact).norm() / exact.norm()).item()
    assert 0.02 < loss < 0.06
    assert (in_bf16.float() - exact).norm() / exact.norm() < loss / 8
