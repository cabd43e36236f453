"""Routing and experts in Triton against their meaning, by the interpreter on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from m3stack.kernels.interface import Mxfp8Weight, SharedExpert, Weight
from m3stack.kernels.moe import reference, routing_with_triton
from m3stack.kernels.moe.grouping_with_triton import group_pairs, most_blocks
from m3stack.kernels.moe.with_triton import FEW, MANY, SOME, Tiles, TritonExperts, choose_tiles
from m3stack.kernels.quantised import mxfp8
from m3stack.kernels.quantised.reference import linear_mxfp8 as reference_linear
from m3stack.kernels.quantised.with_triton import linear_mxfp8

# numpy warns about how the interpreter of triton 3.6 reads scalars, and about NaN in products
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_CPU = DEVICE.type == "cpu"
ALPHA, LIMIT = 1.702, 7.0
SMALL = Tiles(pairs=16, outputs=32, inputs=32, shared_blocks=2, num_warps=4, num_stages=2)


def experts(tiles: Tiles | None = None) -> TritonExperts:
    torch.set_num_threads(1)
    return TritonExperts(DEVICE, widen=ON_CPU, tiles=tiles)


def small_integers(*shape: int, low: int = -2, high: int = 3) -> Tensor:
    """Sums of products of these are exact in any order, so choices must be equal."""
    return torch.randint(low, high, shape, device=DEVICE).float()


SIZES = [(1, 128, 4), (17, 9, 3), (5, 6, 1)]


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SIZES)
@pytest.mark.parametrize("programs", [1, 132])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routing_is_the_reference_s(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    programs: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routing_with_triton, "TARGET_PROGRAMS", programs)
    torch.manual_seed(1)
    # a slice of wider rows, and a width that fills no whole tile
    x = small_integers(num_tokens, 230)[:, :200].to(dtype)
    router = small_integers(num_experts, 200) / 64
    bias = small_integers(num_experts) / 4
    router[1], bias[1] = router[0], bias[0]  # a tie in every row
    run = experts().route_tokens
    for _ in range(2):  # the counters must be as they were
        ids, weights = run(x, router, bias, top_k)
        expected_ids, expected_weights = reference.route_tokens(x, router, bias, top_k)
        # logits are exact; sigmoids differ in the last bit, which decides no tie of equal logits
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected_weights, rtol=1e-6, atol=0.0)
    assert ids.dtype == torch.int32


def test_equal_scores_go_to_the_lower_expert_and_zero_has_no_sign() -> None:
    bias = torch.tensor([-0.0, 0.0, -0.0, 0.0, -1.0], device=DEVICE) - 0.5
    x, router = torch.ones(3, 32, device=DEVICE), torch.zeros(5, 32, device=DEVICE)
    ids, weights = experts().route_tokens(x, router, bias, 3)
    assert ids.tolist() == [[0, 1, 2]] * 3
    assert torch.allclose(weights, torch.full_like(weights, 1 / 3))


@pytest.mark.parametrize("poisoned", ["router", "bias", "token"])
def test_nan_ranks_as_in_the_reference(poisoned: str) -> None:
    torch.manual_seed(2)
    x, router, bias = small_integers(6, 64), small_integers(7, 64) / 16, small_integers(7) / 8
    target = {"router": router[5], "bias": bias[5:6], "token": x[3]}[poisoned]
    target[0] = float("nan")
    ids, weights = experts().route_tokens(x, router, bias, 3)
    expected_ids, expected_weights = reference.route_tokens(x, router, bias, 3)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-6, atol=0.0, equal_nan=True)


def test_no_tokens_are_routed_and_run_to_nothing() -> None:
    run, x = experts(), torch.zeros(0, 32, device=DEVICE)
    ids, weights = run.route_tokens(x, torch.zeros(4, 32, device=DEVICE), torch.zeros(4), 2)
    assert ids.shape == weights.shape == (0, 2)
    gate_up, down = torch.zeros(4, 64, 32, device=DEVICE), torch.zeros(4, 32, 32, device=DEVICE)
    assert run.run_experts(x, gate_up, down, ids, weights, ALPHA, LIMIT).shape == (0, 32)


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.lists(st.integers(-1, 6), min_size=2, max_size=2), min_size=1, max_size=60),
    st.sampled_from([1, 4, 16]),
)
def test_every_pair_stands_in_one_block_of_its_expert(choices: list[list[int]], rows: int) -> None:
    ids = torch.tensor(choices, dtype=torch.int32, device=DEVICE)
    blocks = group_pairs(ids, 7, rows)
    num_pairs = ids.numel()
    assert blocks.max_blocks == most_blocks(num_pairs, 7, rows)
    used = [expert for expert in blocks.experts.tolist() if expert >= 0]
    assert blocks.experts.tolist() == used + [-1] * (blocks.max_blocks - len(used))
    assert used == sorted(used)
    flat = ids.flatten().tolist()
    for expert in range(7):
        own = [block for block, owner in enumerate(used) if owner == expert]
        pairs = [blocks.pairs[block * rows : (block + 1) * rows].tolist() for block in own]
        joined = [pair for block in pairs for pair in block]
        expected = [pair for pair, chosen in enumerate(flat) if chosen == expert]
        assert joined == expected + [num_pairs] * (len(joined) - len(expected))
        assert len(own) == -(-len(expected) // rows)


def test_pairs_beyond_one_load_are_grouped_too() -> None:
    torch.manual_seed(3)
    ids = torch.randint(0, 3, (1100, 2), dtype=torch.int32, device=DEVICE)
    blocks = group_pairs(ids, 3, 128)
    held = blocks.pairs[: int((blocks.experts >= 0).sum()) * 128]
    held = held[held < ids.numel()]
    expected = ids.flatten().argsort(stable=True)
    assert torch.equal(held.long(), expected)


def routings(name: str, num_tokens: int, num_experts: int, top_k: int) -> Tensor:
    """Expert ids [T, k] of the shapes that matter."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :top_k]
    if name == "skewed":
        ids[:, 0] = 2
        ids[:, 1:] = torch.where(ids[:, 1:] == 2, 0, ids[:, 1:])
    if name == "one expert":
        ids = torch.full((num_tokens, top_k), num_experts - 1)
    if name == "some dropped":
        ids[::2, 0] = -1
        ids[1] = -1
    return ids.to(torch.int32).to(DEVICE)


def decoded(weight: Weight) -> Tensor:
    if isinstance(weight, Mxfp8Weight):
        return mxfp8.decode(weight, torch.float64)
    return weight.double()


def exact_and_bound(
    x: Tensor, gate_up: Weight, down: Weight, ids: Tensor, weights: Tensor, limit: float = LIMIT
) -> tuple[Tensor, Tensor]:
    """fp64 result, and how far fp32 sums with a hidden value rounded to the dtype may be off.

    A sum of n products errs by at most n 2^-24 of the sum of their sizes. The activation's slopes
    are at most 7 in `up` (|g sigmoid(1.702 g)| <= 7) and 9 in `gate` ((|u| + 1) 1.1 <= 8.8).
    """
    half_unit = torch.finfo(x.dtype).eps / 2
    if ON_CPU and x.dtype == torch.bfloat16:
        half_unit *= 2  # the interpreter cuts to bf16 instead of rounding
    unit32, (tokens, top_k) = 2.0**-24, ids.shape
    wide, up_all, down_all = x.double(), decoded(gate_up), decoded(down)
    width, inner = x.shape[1], down_all.shape[2]
    out = torch.zeros_like(wide)
    bound = torch.zeros_like(wide)
    for token in range(tokens):
        for choice in range(top_k):
            expert = int(ids[token, choice])
            if expert < 0:
                continue
            share = weights[token, choice].double()
            gate, up = (up_all[expert] @ wide[token]).chunk(2)
            slack = width * unit32 * (up_all[expert].abs() @ wide[token].abs())
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            acted = (up + 1) * gate * torch.sigmoid(ALPHA * gate)
            gate_slack, up_slack = slack.chunk(2)
            # and a few roundings of the activation itself, in fp32, exp by its fast form
            acted_slack = 9 * gate_slack + 7 * up_slack + (half_unit + 2**-20) * acted.abs()
            sizes = down_all[expert].abs()
            out[token] += share * (down_all[expert] @ acted)
            bound[token] += share * (sizes @ (acted_slack + inner * unit32 * acted.abs()))
    return out, bound * 1.01 + (half_unit + top_k * unit32) * out.abs() + 1e-30


@pytest.mark.parametrize("routing", ["even", "skewed", "one expert", "some dropped"])
@pytest.mark.parametrize("form", ["fp32", "bf16", "fp16", "mxfp8"])
def test_experts_stay_within_the_error_of_their_sums(form: str, routing: str) -> None:
    torch.manual_seed(5)
    num_experts, width, inner, tokens, top_k = 6, 96, 64, 19, 3
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(form, torch.bfloat16)
    # a slice of wider rows; gates and ups of about 5, so that the clamp acts on some
    x = torch.randn(tokens, width + 32, device=DEVICE).to(dtype)[:, :width]
    gate_up = torch.randn(num_experts, 2 * inner, width, device=DEVICE) * 0.5
    down = torch.randn(num_experts, width, inner, device=DEVICE)
    matrices: tuple[Weight, Weight] = (gate_up.to(dtype), down.to(dtype))
    if form == "mxfp8":
        matrices = (mxfp8.encode(gate_up), mxfp8.encode(down))
    ids = routings(routing, tokens, num_experts, top_k)
    weights = torch.rand(tokens, top_k, device=DEVICE)
    out = experts(SMALL).run_experts(x, *matrices, ids, weights, ALPHA, LIMIT)
    exact, bound = exact_and_bound(x, *matrices, ids, weights)
    assert out.dtype == dtype
    assert ((out.double() - exact).abs() <= bound).all()
    # the bound means something, and the clamp acts
    assert bound.norm() < 0.05 * exact.norm() or not ids.ge(0).any()
    unclamped, _ = exact_and_bound(x, *matrices, ids, weights, limit=1e9)
    assert (unclamped - exact).norm() > 0.05 * exact.norm()
    assert not out[(ids < 0).all(1)].any()


@pytest.mark.parametrize("form", ["fp32", "mxfp8"])
def test_the_shared_expert_is_added_once_and_the_factor_spares_it(form: str) -> None:
    torch.manual_seed(8)
    dtype = torch.float32 if form == "fp32" else torch.bfloat16
    x = torch.randn(9, 96, device=DEVICE).to(dtype)
    plain = [torch.randn(4, 128, 96) * 0.3, torch.randn(4, 96, 64)]
    own = [torch.randn(128, 96) * 0.3, torch.randn(96, 64)]
    encode = mxfp8.encode if form == "mxfp8" else lambda one: one
    gate_up, down, own_gate_up, own_down = (encode(one.to(DEVICE)) for one in (*plain, *own))
    ids, weights = routings("some dropped", 9, 4, 2), torch.rand(9, 2, device=DEVICE)
    inputs = (x, gate_up, down, ids, weights, ALPHA, LIMIT)
    shared = SharedExpert(own_gate_up, own_down)
    out = experts(SMALL).run_experts(*inputs, shared=shared, factor=2.0).double()
    parts = reference.run_experts(x.double(), *inputs[1:]) * 2
    alone = reference.run_experts(
        x.double(),
        *(Mxfp8Weight(w.elements[None], w.scales[None]) if isinstance(w, Mxfp8Weight) else w[None]
          for w in (own_gate_up, own_down)),
        torch.zeros(9, 1, dtype=torch.int32, device=DEVICE),
        torch.ones(9, 1, device=DEVICE),
        ALPHA,
        LIMIT,
    )  # fmt: skip
    # one rounding of the hidden values and one of the sum, which the interpreter cuts instead
    close = 1e-5 if form == "fp32" else 2e-2
    for actual in (out, reference.run_experts(*inputs, shared=shared, factor=2.0).double()):
        assert (actual - parts - alone).norm() <= close * (parts + alone).norm()
        assert (actual - parts).norm() > 0.1 * alone.norm()


@pytest.mark.parametrize("tiles", [FEW, SOME, MANY], ids=["few", "some", "many"])
@pytest.mark.parametrize("is_quantised", [False, True])
def test_every_tile_size_gives_the_same_sums(tiles: Tiles, is_quantised: bool) -> None:
    torch.manual_seed(6)
    x = torch.randn(21, 160, device=DEVICE).to(torch.bfloat16)
    gate_up, down = torch.randn(3, 128, 160, device=DEVICE), torch.randn(3, 160, 64, device=DEVICE)
    matrices: tuple[Weight, Weight] = (gate_up.bfloat16() * 0.2, down.bfloat16())
    if is_quantised:
        matrices = (mxfp8.encode(gate_up * 0.2), mxfp8.encode(down))
    ids, weights = routings("even", 21, 3, 2), torch.rand(21, 2, device=DEVICE)
    out = experts(tiles).run_experts(x, *matrices, ids, weights, ALPHA, LIMIT)
    exact, bound = exact_and_bound(x, *matrices, ids, weights)
    assert ((out.double() - exact).abs() <= bound).all()


def test_bad_values_stay_with_their_tokens() -> None:
    torch.manual_seed(7)
    x = torch.randn(4, 64, device=DEVICE)
    gate_up, down = torch.randn(5, 64, 64, device=DEVICE), torch.randn(5, 64, 32, device=DEVICE)
    ids = torch.tensor([[0, 1], [2, 1], [0, 3], [-1, -1]], dtype=torch.int32, device=DEVICE)
    weights = torch.rand(4, 2, device=DEVICE)
    clean = experts(SMALL).run_experts(x, gate_up, down, ids, weights, ALPHA, LIMIT)
    x[1, 5] = float("nan")
    gate_up[4] = float("nan")
    out = experts(SMALL).run_experts(x, gate_up, down, ids, weights, ALPHA, LIMIT)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2, 3]], clean[[0, 2, 3]])
    # the clamp keeps NaN instead of turning it into a limit
    down[3] = float("nan")
    out = experts(SMALL).run_experts(x, gate_up, down, ids, weights, ALPHA, LIMIT)
    assert out[2].isnan().all()


@pytest.mark.parametrize("byte", [0, 1, 127, 246])
def test_extreme_scales_decode_as_they_should(byte: int) -> None:
    codes = torch.randint(0, 120, (2, 64, 32), dtype=torch.uint8)
    scales = torch.full((2, 64, 1), 127, dtype=torch.uint8)
    scales[0, 3] = byte
    gate_up = Mxfp8Weight(codes.view(torch.float8_e4m3fn).to(DEVICE), scales.to(DEVICE))
    down = mxfp8.encode(torch.eye(32, device=DEVICE).repeat(2, 1, 1))
    ids = torch.tensor([[0]], dtype=torch.int32, device=DEVICE)
    x = torch.ones(1, 32, dtype=torch.bfloat16, device=DEVICE)
    one = torch.ones(1, 1, device=DEVICE)
    out = experts(SMALL).run_experts(x, gate_up, down, ids, one, ALPHA, LIMIT)
    expected = reference.run_experts(x, gate_up, down, ids, one, ALPHA, LIMIT)
    # a unit of bf16, which the interpreter cuts to
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=0.0)
    assert (out[0, 3] < 1e-30) == (byte < 2)


@pytest.mark.parametrize("tiles", [None, SMALL, SOME], ids=["chosen", "small", "some"])
@pytest.mark.parametrize("shape", [(1,), (3, 7), (0,)])
def test_dense_linears_in_mxfp8_are_the_reference_s(
    shape: tuple[int, ...], tiles: Tiles | None
) -> None:
    torch.manual_seed(8)
    weight = mxfp8.encode(torch.randn(70, 224, device=DEVICE))
    x = torch.randn(*shape, 256, device=DEVICE).to(torch.bfloat16)[..., :224]
    out = linear_mxfp8(x, weight, widen=ON_CPU, tiles=tiles)
    values = mxfp8.decode(weight, torch.float64)
    exact = x.double() @ values.T
    sums = 224 * 2.0**-24 * (x.double().abs() @ values.abs().T)
    unit = 2.0**-8 * (2 if ON_CPU else 1)
    assert out.shape == (*shape, 70)
    assert out.dtype == torch.bfloat16
    assert ((out.double() - exact).abs() <= unit * exact.abs() + 2 * sums).all()
    if out.numel():
        theirs = reference_linear(x, weight).double()
        assert ((out.double() - theirs).abs() <= 2 * unit * exact.abs() + 2 * sums).all()


def test_tiles_follow_from_sizes_alone() -> None:
    chosen = [choose_tiles(4 * tokens / 128) for tokens in (1, 8, 64, 256, 1024, 2048, 8192)]
    assert chosen == [FEW, FEW, FEW, FEW, SOME, MANY, MANY]


# run apart: the interpreter of the other tests is chosen when a kernel is declared
COMPILED = """
import json, re, subprocess, triton
from pathlib import Path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from m3stack.kernels.moe import grouping_with_triton as grouping
from m3stack.kernels.moe import routing_with_triton as routing, with_triton as experts
from m3stack.kernels.quantised import with_triton as dense
KINDS = dict(x="*bf16", hidden="*bf16", out="*bf16", router="*fp32", bias="*fp32",
    weights="*fp32", partial="*fp32", results="*fp32", alpha="fp32", limit="fp32")
KINDS |= dict.fromkeys(("ids", "pairs", "experts", "arrived"), "*i32")
PLAIN, MXFP8 = dict(elements="*bf16", scales="*bf16"), dict(elements="*fp8e4nv", scales="*u8")
def product(kernel, tiles, kinds):
    sizes = dict(PAIRS=tiles.pairs, OUTPUTS=tiles.outputs, INPUTS=tiles.inputs,
        SHARED=tiles.shared_blocks, WIDTH=6144, INNER=3072, GROUP=32, WIDEN=False,
        MXFP8=kinds is MXFP8, CHOSEN=4)
    sizes = {name: size for name, size in sizes.items() if name in kernel.arg_names}
    return kernel, sizes, kinds, tiles.num_warps, tiles.num_stages
KERNELS = {
    f"up {name} {form}": product(experts._up_kernel, tiles, kinds)
    for name, tiles in (("few", experts.FEW), ("many", experts.MANY))
    for form, kinds in (("bf16", PLAIN), ("mxfp8", MXFP8))
    # the second product is the first with one sum less
}
tiles = experts.FEW
KERNELS["linear few mxfp8"] = (dense._linear_kernel, dict(WIDTH=6144, TOKENS=tiles.pairs,
    OUTPUTS=tiles.outputs, INPUTS=tiles.inputs, GROUP=32, WIDEN=False), MXFP8, 4, 4)
GROUPED = dict(EXPERTS=128, BINS=128, ROWS=16, AT_ONCE=1024)
KERNELS["group"] = (grouping._group_kernel, GROUPED, {}, 4, 3)
ROUTED = dict(WIDTH=6144, EXPERTS=128, TILE_E=128, CHOSEN=4, TILE_K=4, COLUMNS=64)
KERNELS["route few"] = (routing._route_kernel, dict(ROUTED, TOKENS=16, SPLITS=96), {}, 4, 3)
tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
report = {}
for name, (function, constants, kinds, warps, stages) in KERNELS.items():
    signature = {argument: "constexpr" if argument in constants
        else kinds.get(argument) or KINDS.get(argument, "i32") for argument in function.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, (argument, kind) in
        enumerate(signature.items()) if kind.startswith("*") or argument == "x_row"}
    built = triton.compile(ASTSource(function, signature, constants, aligned),
        target=GPUTarget("cuda", 90, 32), options=dict(num_warps=warps, num_stages=stages))
    Path("cubin").write_bytes(built.asm["cubin"])
    code = subprocess.run([tool, "-sass", "cubin"], capture_output=True, text=True).stdout
    report[name] = dict(warpgroup=len(re.findall("HGMMA", code)),
        spills=len(re.findall(r"\\b(LDL|STL)\\b", code)), shared=built.metadata.shared)
print(json.dumps(report))
"""


def test_kernels_compile_for_hopper_without_spills(tmp_path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", COMPILED],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert len(report) == 7
    for name, kernel in report.items():
        assert kernel["spills"] == 0, (name, report)
        # what an sm_90 block may have
        assert kernel["shared"] <= 227 * 1024, (name, report)
        is_product = name.startswith(("up", "linear"))
        assert (kernel["warpgroup"] > 0) == is_product, (name, report)
