"""The MoE bench: floors by hand, checks that refuse wrong layers, rows as the report wants them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from m3stack.bench.kernels import __main__ as command
from m3stack.bench.kernels import moe
from m3stack.bench.kernels.harness import Ceilings, CheckError, Row
from m3stack.bench.kernels.moe_layers import (
    LayerCheck,
    MoeShape,
    check_routing,
    make_layer,
    make_tokens,
    used_experts,
)
from m3stack.kernels.moe.cuda_sizes import Path as Kernel
from m3stack.kernels.moe.cuda_sizes import choose_path
from m3stack.kernels.moe.with_triton import TritonExperts

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

CPU = torch.device("cpu")
SMALL = MoeShape(tokens=9, experts=6, top_k=2, width=64, inner=32)
CEILINGS = Ceilings(4.3e12, 766e12, "a GPU", "torch")


def kernels() -> TritonExperts:
    torch.set_num_threads(1)
    return TritonExperts(CPU, widen=True)


@pytest.mark.parametrize("is_skewed", [False, True])
@pytest.mark.parametrize("form", moe.FORMS)
def test_a_right_layer_passes_and_wrong_ones_do_not(
    form: str, is_skewed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(SMALL, is_skewed=is_skewed)
    layer, x = make_layer(shape, form, CPU), make_tokens(shape, CPU, seed=1)
    # the interpreter cuts to bf16 where a GPU rounds, which doubles the error
    monkeypatch.setattr("m3stack.bench.kernels.moe_layers.OUTPUT_LIMIT", 8e-3)
    check = LayerCheck(layer, x)
    check(kernels())

    class Unclamped(TritonExperts):
        def run_experts(self, x, *rest, **more):
            return super().run_experts(3 * x, *rest, **more)

    with pytest.raises(CheckError, match="MoE layer output: relative error"):
        check(Unclamped(CPU, widen=True))
    # and once more, now that the reference is kept
    check(kernels())


def test_wrong_routing_is_named() -> None:
    layer, x = make_layer(SMALL, "bf16", CPU), make_tokens(SMALL, CPU, seed=2)
    ids, weights = kernels().route_tokens(x, layer.router_EM, layer.bias_E, SMALL.top_k)
    check_routing(layer, x, ids, weights)
    wrong = ids.clone()
    scores = (x[4].double() @ layer.router_EM.double().T).tolist()
    wrong[4, 0] = min(set(range(6)) - set(ids[4].tolist()), key=lambda e: scores[e])
    with pytest.raises(CheckError, match="token 4: experts"):
        check_routing(layer, x, wrong, weights)
    with pytest.raises(CheckError, match="routing weights"):
        check_routing(layer, x, ids, weights.flip(1) * 1.01)
    wrong[4, 0] = ids[4, 1]
    with pytest.raises(CheckError, match="token 4"):
        check_routing(layer, x, wrong, weights)


def test_skew_uses_fewer_experts() -> None:
    even, skewed = (MoeShape(12, s, experts=64, width=64, inner=32) for s in (False, True))

    def used(shape: MoeShape) -> int:
        return used_experts(make_layer(shape, "bf16", CPU), make_tokens(shape, CPU, 3))

    assert used(skewed) < used(even) <= 48


def test_floors_are_the_published_ones() -> None:
    # one token: four experts of 113 MB and the shared one in 132 us at 4.3 TB/s
    one = MoeShape(1)
    assert CEILINGS.floor_us(one.least_bytes(4, 2.0), one.flops()) == pytest.approx(132, abs=1)
    many = MoeShape(8192)
    assert many.flops(with_shared=False) == pytest.approx(8.4e-3 * 440e12, rel=0.01)
    in_mxfp8 = CEILINGS.floor_us(one.least_bytes(4, moe.BYTES_PER_VALUE["mxfp8"]), one.flops())
    assert in_mxfp8 == pytest.approx(68.4, abs=0.5)


def test_rows_join_by_tokens_and_keep_refusals(tmp_path: Path) -> None:
    rows = [
        Row(
            "moe_8_bf16",
            "",
            900.0,
            890.0,
            910.0,
            800.0,
            peers_us={"torch": 1206.0, "triton": 901.0, "many": 950.0},
            notes="29 experts",
        ),
        Row("moe_8_mxfp8", "", None, error="refused, not timed: x"),
        Row("moe_64_mxfp8_skewed", "", 1700.0, floor_us=1500.0),
    ]
    summary = moe.summarise(rows)
    assert [(row.tokens, row.routing) for row in summary] == [(8, "random"), (64, "skewed")]
    assert (summary[0].torch_us, summary[0].bf16_us, summary[0].mxfp8_us) == (1206.0, 900.0, None)
    assert (summary[0].triton_bf16_us, summary[0].others_us) == (901.0, {"bf16 many": 950.0})
    assert summary[0].notes == "29 experts; refused, not timed: x"
    moe.write_json(tmp_path / "a.json", summary, CEILINGS, "c")
    record = json.loads((tmp_path / "a.json").read_text())[0]
    assert {"tokens", "torch_us", "bf16_us", "mxfp8_us", "floor_bf16_us"} <= set(record)
    moe.write_picture(tmp_path / "a.svg", summary)
    assert "8 tokens, random" in (tmp_path / "a.svg").read_text()


def test_kernels_beside_the_chosen_one_can_compute_the_layer() -> None:
    for tokens in moe.TOKENS:
        for form in moe.FORMS:
            shape = MoeShape(tokens)
            others = moe.other_kernels(shape, form)
            chosen = choose_path(tokens, 4 * tokens, 128, is_mxfp8=form == "mxfp8")
            assert chosen not in others
            assert form == "mxfp8" or Kernel.SOME not in others
    assert moe.other_kernels(MoeShape(8192), "bf16") == []


def test_the_command_needs_a_gpu_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert command.main(["moe"]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
