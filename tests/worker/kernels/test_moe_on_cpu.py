"""The CUDA sources of many tokens' experts, run on a CPU: any order of threads gives the reference.

What the emulator cannot tell: whether a PTX wrapper says what its name says, and anything of time.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path as FilePath

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from m3stack.kernels.interface import SharedExpert, Weight
from m3stack.kernels.moe import reference
from m3stack.kernels.moe.cuda_library import SOME_TOKENS, Mode, RingArgs
from m3stack.kernels.moe.cuda_sizes import Path, choose_path
from m3stack.kernels.moe.with_cuda import CudaExperts
from m3stack.kernels.moe.with_triton import TritonExperts
from m3stack.kernels.quantised import mxfp8
from m3stack.kernels.quantised.reference import linear_mxfp8 as reference_linear
from tests.worker.kernels.cuda_on_cpu.moe import EmulatedExperts, build

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    # numpy warns about how the interpreter of triton 3.6 reads scalars, and about NaN in products
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

CPU = torch.device("cpu")
ALPHA, LIMIT = 1.702, 7.0
EXPERTS = 4
# hidden values, results and their sum are rounded to bf16, a relative 2^-9 / sqrt(3) each; more
# for the few values here
CLOSE = 5e-3


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> FilePath:
    return build(tmp_path_factory.mktemp("moe_on_cpu"), "moe_harness.cpp")


@pytest.fixture(scope="module")
def built_route(tmp_path_factory: pytest.TempPathFactory) -> FilePath:
    return build(tmp_path_factory.mktemp("route_on_cpu"), "route_harness.cpp")


def kernels(built: FilePath, path: Path | None = None, *, seed: int = 1) -> CudaExperts:
    torch.set_num_threads(1)
    library = EmulatedExperts(built, processors=4, seed=seed)
    return CudaExperts(CPU, path=path, library=library, portable=TritonExperts(CPU, widen=True))


def matrices(form: str, width: int, inner: int) -> list[Weight]:
    sizes = [(EXPERTS, 2 * inner, width), (EXPERTS, width, inner), (2 * inner, width)]
    plain = [torch.randn(size) * 2 * size[-1] ** -0.5 for size in [*sizes, (width, inner)]]
    return [mxfp8.encode(one) if form == "mxfp8" else one.bfloat16() for one in plain]


@pytest.mark.parametrize(
    ("form", "path", "tokens", "routing", "has_shared", "width", "inner"),
    [
        # one tile of rows, an odd number of them, more stages than a ring has, blocks of every kind
        ("bf16", Path.MANY, 5, "even", True, 128, 64),
        ("bf16", Path.MANY, 30, "some dropped", True, 128, 192),
        ("bf16", Path.MANY, 150, "one expert", False, 128, 64),
        ("bf16", Path.MANY, 12, "even", False, 128, 384),
        ("mxfp8", Path.MANY, 5, "some dropped", True, 128, 128),
        ("mxfp8", Path.MANY, 150, "one expert", False, 128, 128),
        ("mxfp8", Path.MANY, 12, "even", True, 128, 384),
        ("mxfp8", Path.SOME, 1, "even", True, 128, 128),
        ("mxfp8", Path.SOME, 30, "one expert", True, 256, 128),
        ("mxfp8", Path.SOME, 40, "one expert", True, 256, 128),
        ("mxfp8", Path.SOME, 20, "some dropped", False, 128, 256),
    ],
)
def test_experts_are_the_reference_s(
    built: FilePath, form: str, path: Path, tokens: int, routing: str, has_shared: bool,
    width: int, inner: int,
) -> None:  # fmt: skip
    torch.manual_seed(tokens)
    gate_up, down, *own = matrices(form, width, inner)
    shared = SharedExpert(*own) if has_shared else None
    # a slice of wider rows, and tokens so large that the clamp acts
    x = 2 * torch.randn(tokens, width + 64).bfloat16()[:, :width]
    ids = torch.rand(tokens, EXPERTS).argsort(1)[:, :2].to(torch.int32)
    if routing == "one expert":
        ids[:] = EXPERTS - 1
    if routing == "some dropped":
        ids[::3, 0] = -1
        ids[tokens // 2] = -1
    inputs = (gate_up, down, ids, torch.rand(tokens, 2), ALPHA, LIMIT)
    expected = reference.run_experts(x.float(), *inputs, shared=shared, factor=2.0)
    run = kernels(built, path, seed=tokens).run_experts
    out = run(x, *inputs, shared=shared, factor=2.0).float()
    assert (out - expected).norm() / expected.norm() < CLOSE
    # each token by itself, so that no wrong row hides among right ones
    each = (out - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-6)
    assert each.max() < 3 * CLOSE, (each.argmax(), each.max())


def test_linears_of_many_tokens_are_the_reference_s(built: FilePath) -> None:
    torch.manual_seed(1)
    weight = mxfp8.encode(torch.randn(128, 256))
    x = torch.randn(130, 256).bfloat16()
    out = kernels(built).linear_mxfp8(x, weight)
    expected = reference_linear(x.float(), weight)
    assert (out.float() - expected).norm() / expected.norm() < CLOSE


class WatchedExperts(EmulatedExperts):
    """Notes the blocks that its rings are made for."""

    def __init__(self, path: FilePath) -> None:
        super().__init__(path, processors=4, seed=1)
        self.blocks: list[int] = []

    def ring(self, arguments: RingArgs, maps: list[bytes], mode: Mode, most: int) -> None:
        self.blocks.append(most)
        super().ring(arguments, maps, mode, most)


@pytest.fixture
def nan_where_nothing_was_written() -> Iterator[None]:
    """New tensors hold NaN and the largest integers."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nan_where_nothing_was_written")
def test_pairs_of_other_ranks_neither_count_as_own_nor_are_copied(built: FilePath) -> None:
    torch.manual_seed(1)
    gate_up, down, *own = matrices("mxfp8", 128, 128)
    x = torch.randn(65, 128).bfloat16()
    # this rank has half of the experts: 65 pairs for each of them would be for larger blocks
    ids = torch.rand(65, 2 * EXPERTS).argsort(1)[:, :EXPERTS].to(torch.int32)
    ids[ids >= EXPERTS] = -1
    inputs = (gate_up, down, ids, torch.rand(65, EXPERTS), ALPHA, LIMIT)
    library = WatchedExperts(built)
    portable = TritonExperts(CPU, widen=True)
    experts = CudaExperts(CPU, experts=2 * EXPERTS, library=library, portable=portable)
    out = experts.run_experts(x, *inputs, shared=SharedExpert(*own)).float()
    # 32 pairs an expert of all ranks, and none of them for a block of many
    assert set(library.blocks) == {SOME_TOKENS[-1]}
    expected = reference.run_experts(x.float(), *inputs, shared=SharedExpert(*own))
    assert (out - expected).norm() / expected.norm() < CLOSE
    order = library.sort(ids, EXPERTS, SOME_TOKENS[-1])
    copied = library.gather(x, order.places, is_coded=False, with_tokens=True)
    assert torch.equal(copied[ids.numel() :], x)
    copied = copied[: ids.numel()]
    is_own = order.pairs >= 0
    assert is_own.sum() == (ids >= 0).sum()
    assert torch.equal(copied[is_own], x[order.pairs[is_own].long() // EXPERTS])
    assert copied[~is_own].isnan().all()


@settings(max_examples=5, deadline=None)
@given(
    choices=st.lists(st.lists(st.integers(-1, 6), min_size=2, max_size=2), min_size=1, max_size=60),
    most=st.sampled_from([16, 32, 48]),
)
def test_sorted_pairs_have_no_gaps_and_blocks_of_one_expert(
    built: FilePath, choices: list[list[int]], most: int
) -> None:
    ids = torch.tensor(choices, dtype=torch.int32)
    flat = ids.flatten().tolist()
    library = EmulatedExperts(built, processors=4, seed=1)
    order = library.sort(ids, 7, most)
    chosen = sorted((expert, pair) for pair, expert in enumerate(flat) if expert >= 0)
    padding = [-1] * (len(flat) - len(chosen))
    assert order.pairs.tolist() == [pair for _, pair in chosen] + padding
    places = {pair: place for place, (_, pair) in enumerate(chosen)}
    assert order.places.flatten().tolist() == [places.get(pair, -1) for pair in range(len(flat))]
    used = [expert for expert in order.experts.tolist() if expert >= 0]
    assert order.experts.tolist() == used + [-1] * (order.max_blocks - len(used))
    spans = list(zip(used, order.firsts.tolist(), order.counts.tolist(), strict=False))
    covered = [(expert, first + i) for expert, first, count in spans for i in range(count)]
    assert covered == [(expert, place) for place, (expert, _) in enumerate(chosen)]
    assert all(1 <= count <= most for _, _, count in spans)
    assert len(used) == sum(-(-flat.count(expert) // most) for expert in range(7))


@pytest.mark.parametrize("processors", [1, 5])
def test_routing_of_many_tokens_is_the_reference_s(built_route: FilePath, processors: int) -> None:
    library = EmulatedExperts(built_route, processors=processors, seed=1)
    route = CudaExperts(CPU, library=library, portable=TritonExperts(CPU, widen=True)).route_tokens
    for experts, width, tokens in ((128, 512, 20), (7, 320, 130)):
        torch.manual_seed(tokens)
        # sums of small integers are exact in any order, so choices must be equal
        x = torch.randint(-2, 3, (tokens, width + 64)).bfloat16()[:, :width]
        router = torch.randint(-2, 3, (experts, width)).float() / 64
        bias = torch.randint(-2, 3, (experts,)).float() / 4
        router[1], bias[1] = router[0], bias[0]  # a tie in every row
        router[-1, 5] = float("nan")
        ids, weights = route(x, router, bias, 4)
        expected_ids, expected = reference.route_tokens(x, router, bias, 4)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=0.0, equal_nan=True)
        # fp32 weights whose every bit counts: shares as exact as fp32 sums give them
        x, router = torch.randn(tokens, width).bfloat16(), torch.randn(experts, width)
        router *= width**-0.5
        ids, weights = route(x, router, bias, 4)
        scores = (x.double() @ router.double().T).sigmoid().gather(1, ids.long())
        assert (weights - scores / scores.sum(1, keepdim=True)).abs().max() < 3e-7


@pytest.mark.parametrize("is_mxfp8", [False, True])
def test_more_tokens_never_go_to_a_path_of_fewer(is_mxfp8: bool) -> None:
    order = [Path.FEW, Path.SOME, Path.TRITON, Path.MANY]
    # a lone token, which needs no sorting, aside
    paths = [choose_path(t, 4 * t, 128, is_mxfp8=is_mxfp8) for t in (2, 4, 5, 64, 1000, 8192)]
    ranks = [order.index(path) for path in paths]
    assert ranks == sorted(ranks)
    assert paths[-1] is Path.MANY
