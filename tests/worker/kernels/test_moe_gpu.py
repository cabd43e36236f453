"""The sm_90a expert kernels against the reference, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from m3stack.kernels.interface import Mxfp8Weight, SharedExpert, Weight
from m3stack.kernels.moe import reference
from m3stack.kernels.moe.cuda_sizes import Path
from m3stack.kernels.moe.with_cuda import CudaExperts
from m3stack.kernels.quantised import mxfp8
from m3stack.kernels.quantised.reference import linear_mxfp8 as reference_linear

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
ALPHA, LIMIT = 1.702, 7.0
EXPERTS, WIDTH, INNER = 8, 512, 384
# hidden values, results and their sum are rounded to bf16, a relative 2^-9 / sqrt(3) each
CLOSE = 4e-3
# both sides of every change of block size and of what computes a layer
TOKENS = {
    Path.FEW: (1, 2, 5, 6, 7, 8, 9, 17, 18, 40, 64),
    Path.SOME: (1, 5, 8, 16, 17, 40, 64, 65, 130, 300),
    Path.MANY: (1, 16, 17, 64, 130, 300, 520, 700, 2100),
    None: (1, 4, 5, 86, 129, 2100),
}


@pytest.fixture(scope="module")
def kernels() -> CudaExperts:
    return CudaExperts(DEVICE)


def matrices(form: str) -> list[Weight]:
    torch.manual_seed(0)
    sizes = [(EXPERTS, 2 * INNER, WIDTH), (EXPERTS, WIDTH, INNER)]
    sizes += [(2 * INNER, WIDTH), (WIDTH, INNER)]
    plain = [torch.randn(size, device=DEVICE) * 2 * size[-1] ** -0.5 for size in sizes]
    if form == "mxfp8":
        return [mxfp8.encode(one) for one in plain]
    return [one.bfloat16() for one in plain]


def routing(name: str, tokens: int, top_k: int) -> tuple[Tensor, Tensor]:
    ids = torch.rand(tokens, EXPERTS, device=DEVICE).argsort(1)[:, :top_k].to(torch.int32)
    if name == "one expert":
        ids[:] = EXPERTS - 1
    if name == "some dropped":
        ids[::3, 0] = -1
        ids[tokens // 2] = -1
    return ids, torch.rand(tokens, top_k, device=DEVICE)


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("path", TOKENS)
@pytest.mark.parametrize("name", ["even", "one expert", "some dropped"])
@pytest.mark.parametrize("has_shared", [True, False])
@pytest.mark.parametrize("form", ["bf16", "mxfp8"])
def test_experts_are_the_reference_s_for_any_number_of_tokens(
    form: str, has_shared: bool, name: str, path: Path | None
) -> None:
    kernels = CudaExperts(DEVICE, path=path)
    gate_up, down, *own = matrices(form)
    shared = SharedExpert(*own) if has_shared else None
    for tokens in TOKENS[path]:
        torch.manual_seed(tokens)
        # a slice of wider rows, and tokens so large that the clamp acts
        x = 2 * torch.randn(tokens, WIDTH + 64, device=DEVICE).bfloat16()[:, :WIDTH]
        ids, weights = routing(name, tokens, 3)
        inputs = (x, gate_up, down, ids, weights, ALPHA, LIMIT)
        # what is allocated next holds NaN
        torch.full((1 << 23,), float("nan"), device=DEVICE)
        out = kernels.run_experts(*inputs, shared=shared, factor=2.0)
        expected = reference.run_experts(x.float(), *inputs[1:], shared=shared, factor=2.0)
        assert torch.isfinite(out).all(), tokens
        if expected.any():
            assert error(out, expected) < CLOSE, (tokens, error(out, expected))
        # each token by itself, so that no wrong row hides among right ones
        rows = expected.norm(dim=1) > 0
        each = (out.float() - expected).norm(dim=1)[rows] / expected.norm(dim=1)[rows]
        assert each.numel() == 0 or each.max() < 3 * CLOSE, (tokens, each.argmax(), each.max())
        again = kernels.run_experts(*inputs, shared=shared, factor=2.0)
        assert torch.equal(out, again), tokens


@pytest.mark.parametrize("outputs", [128, 384, 130])
def test_mxfp8_linears_are_the_reference_s(kernels: CudaExperts, outputs: int) -> None:
    torch.manual_seed(1)
    weight = mxfp8.encode(torch.randn(outputs, WIDTH, device=DEVICE))
    for tokens in (1, 7, 8, 9, 33, 64, 65, 128, 129, 200, 600):
        x = torch.randn(tokens, WIDTH, device=DEVICE).bfloat16()
        out = kernels.linear_mxfp8(x, weight)
        expected = reference_linear(x.float(), weight)
        assert error(out, expected) < CLOSE, tokens
        assert out.shape == (tokens, outputs)


def test_every_scale_and_element_is_decoded_exactly(kernels: CudaExperts) -> None:
    """One column at a time: a product with a unit vector is the decoded value itself."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    codes[(codes & 0x7F) == 0x7F] = 0
    elements = codes.repeat(128 * WIDTH // 256).view(128, WIDTH)
    scales = torch.arange(128 * WIDTH // 32, device=DEVICE).view(128, -1) % 130 + 5
    weight = Mxfp8Weight(elements.view(torch.float8_e4m3fn), scales.to(torch.uint8))
    unit = torch.eye(WIDTH, device=DEVICE).bfloat16()
    exact = mxfp8.decode(weight, torch.float32).T
    for part in (slice(0, 8), slice(100, 164), slice(0, WIDTH)):
        out = kernels.linear_mxfp8(unit[part], weight)
        assert torch.equal(out.float(), exact[part].bfloat16().float())


@pytest.mark.parametrize("experts", [8, 128, 200])
def test_routing_is_the_reference_s(kernels: CudaExperts, experts: int) -> None:
    torch.manual_seed(4)
    for tokens in (1, 3, 8, 9, 130, 700):
        x = torch.randint(-2, 3, (tokens, WIDTH + 64), device=DEVICE).bfloat16()[:, :WIDTH]
        router = torch.randint(-2, 3, (experts, WIDTH), device=DEVICE).float() / 64
        bias = torch.randint(-2, 3, (experts,), device=DEVICE).float() / 4
        router[1], bias[1] = router[0], bias[0]  # a tie in every row
        router[-1, 5] = float("nan")
        for _ in range(2):  # the counter must be as it was
            ids, weights = kernels.route_tokens(x, router, bias, 4)
            expected_ids, expected = reference.route_tokens(x, router, bias, 4)
            assert torch.equal(ids, expected_ids)
            torch.testing.assert_close(weights, expected, rtol=1e-5, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("tokens", [1, 8, 300])
def test_a_layer_can_be_captured_and_replayed(kernels: CudaExperts, tokens: int) -> None:
    gate_up, down, *own = matrices("mxfp8")
    torch.manual_seed(3)
    x = torch.randn(tokens, WIDTH, device=DEVICE).bfloat16()
    router = torch.randn(EXPERTS, WIDTH, device=DEVICE) * WIDTH**-0.5
    bias = torch.zeros(EXPERTS, device=DEVICE)

    def run() -> Tensor:
        ids, weights = kernels.route_tokens(x, router, bias, 3)
        return kernels.run_experts(
            x, gate_up, down, ids, weights, ALPHA, LIMIT, shared=SharedExpert(*own), factor=2.0
        )

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, run())
