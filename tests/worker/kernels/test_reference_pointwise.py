"""The pointwise references against their formulas in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from m3stack.kernels.interface import HeadNorms, LayerPages
from m3stack.kernels.pointwise.reference import (
    attention_prologue,
    gemma_norm,
    rotate,
    swiglu_oai,
)

T, H, G, D, B, R = 5, 4, 2, 8, 4, 4


def spelled_norm(x: list[float], weight: list[float], eps: float) -> list[float]:
    scale = 1 / math.sqrt(sum(value * value for value in x) / len(x) + eps)
    return [value * scale * (1 + w) for value, w in zip(x, weight, strict=True)]


def test_norm_scales_by_one_plus_weight() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 7) * 3, torch.randn(7)
    expected = [spelled_norm(row, weight.tolist(), 1e-6) for row in x.tolist()]
    assert torch.allclose(gemma_norm(x, weight, 1e-6), torch.tensor(expected), atol=1e-6)


def test_norm_of_half_precision_is_rounded_once() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(64, 33).bfloat16(), torch.randn(33).bfloat16()
    once = gemma_norm(x.float(), weight.float(), 1e-6).bfloat16()
    assert torch.equal(gemma_norm(x, weight, 1e-6), once)


@pytest.mark.parametrize(("gate", "up"), [(9.0, 3.0), (-9.0, -9.0), (0.5, 9.0), (7.0, -7.5)])
def test_swiglu_clamps_the_gate_above_and_up_on_both_sides(gate: float, up: float) -> None:
    g, u = min(gate, 7.0), max(-7.0, min(up, 7.0))
    expected = (u + 1) * g / (1 + math.exp(-1.702 * g))
    got = swiglu_oai(torch.tensor([gate]), torch.tensor([up]), 1.702, 7.0)
    assert got.item() == pytest.approx(expected, rel=1e-6)


def test_rotary_turns_split_half_pairs_and_spares_the_rest() -> None:
    torch.manual_seed(2)
    x, angles = torch.randn(T, H, D), torch.randn(T, R // 2)
    out = rotate(x, angles.cos(), angles.sin())
    for token in range(T):
        for head in range(H):
            for pair in range(R // 2):
                a, b = x[token, head, pair].item(), x[token, head, pair + R // 2].item()
                cos, sin = math.cos(angles[token, pair]), math.sin(angles[token, pair])
                assert out[token, head, pair].item() == pytest.approx(a * cos - b * sin, abs=1e-6)
                turned = out[token, head, pair + R // 2].item()
                assert turned == pytest.approx(b * cos + a * sin, abs=1e-6)
    assert torch.equal(out[..., R:], x[..., R:])


def prologue_inputs() -> dict[str, Tensor]:
    torch.manual_seed(3)
    angles = torch.randn(T, R // 2)
    return {
        "q": torch.randn(T, H, D),
        "k": torch.randn(T, G, D),
        "v": torch.randn(T, G, D),
        "index_q": torch.randn(T, G, D),
        "index_k": torch.randn(T, D),
        "cos": angles.cos(),
        "sin": angles.sin(),
    }


def empty_pages(num_pages: int, *, sparse: bool) -> LayerPages:
    nan = float("nan")
    return LayerPages(
        k_PGBD=torch.full((num_pages, G, B, D), nan),
        v_PGBD=torch.full((num_pages, G, B, D), nan),
        index_k_PBD=torch.full((num_pages, B, D), nan) if sparse else None,
    )


@pytest.mark.parametrize("sparse", [True, False])
def test_prologue_norms_rotates_and_writes_only_the_given_slots(sparse: bool) -> None:
    given, pages = prologue_inputs(), empty_pages(6, sparse=sparse)
    weights = torch.randn(4, D)
    norms = HeadNorms(*weights[:2], *(weights[2:] if sparse else (None, None)), eps=1e-6)
    slots = torch.tensor([9, -1, 20, 3, -1])
    q, index_q = attention_prologue(
        given["q"],
        given["k"],
        given["v"],
        given["index_q"] if sparse else None,
        given["index_k"] if sparse else None,
        norms,
        given["cos"],
        given["sin"],
        slots,
        pages,
    )

    def turned(name: str, weight: Tensor) -> Tensor:
        x = given[name].view(T, -1, D)
        return rotate(gemma_norm(x, weight, 1e-6), given["cos"], given["sin"])

    assert torch.equal(q, turned("q", weights[0]))
    k = turned("k", weights[1])
    written = torch.zeros(6, B, dtype=torch.bool)
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        page, offset = divmod(slot, B)
        written[page, offset] = True
        assert torch.equal(pages.k_PGBD[page, :, offset], k[token])
        assert torch.equal(pages.v_PGBD[page, :, offset], given["v"][token])
        if sparse:
            expected = turned("index_k", weights[3])[token, 0]
            assert torch.equal(pages.index_k_PBD[page, offset], expected)
    assert torch.equal(pages.k_PGBD.isnan().any(-1).all(1), ~written)
    assert torch.equal(pages.v_PGBD.isnan().any(-1).all(1), ~written)
    if sparse:
        assert torch.equal(index_q, turned("index_q", weights[2]))
        assert torch.equal(pages.index_k_PBD.isnan().any(-1), ~written)
    else:
        assert index_q is None
