"""One MoE layer to be timed: its weights, its tokens and their routing, its bytes and its check."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from m3stack.bench.kernels.harness import CheckError, require_close
from m3stack.kernels.interface import Mxfp8Weight, RouteTokens, RunExperts, SharedExpert, Weight
from m3stack.kernels.moe import reference
from m3stack.kernels.quantised import mxfp8

ALPHA, LIMIT, FACTOR = 1.702, 7.0, 2.0
# hidden values, each result and their sum are rounded to bf16, a relative 2^-9 / sqrt(3) each
OUTPUT_LIMIT = 4e-3
# fp32 sums of 6144 products in another order, and two fast exponentials
SCORE_SLACK = 1e-5
CHECKED_TOKENS = 48
# experts drawn; the others repeat them at places of their own, for drawing takes longer than timing
DRAWN_EXPERTS = 16


class MoeKernels(Protocol):
    """What a layer is computed with."""

    @property
    def route_tokens(self) -> RouteTokens: ...

    @property
    def run_experts(self) -> RunExperts: ...


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Tokens and sizes of a layer; those of the released model unless given.

    Attributes:
        is_skewed: experts are used about as 1, 1/2, 1/3 ... instead of evenly.
    """

    tokens: int
    is_skewed: bool = False
    experts: int = 128
    top_k: int = 4
    width: int = 6144
    inner: int = 3072

    def describe(self, form: str) -> str:
        skew = ", skewed" if self.is_skewed else ""
        return (
            f"MoE layer, {self.tokens} tokens{skew}, {self.experts} experts top {self.top_k} and "
            f"a shared one, {self.width} x {self.inner}, {form}"
        )

    @property
    def expert_values(self) -> int:
        return 3 * self.width * self.inner

    def flops(self, *, with_shared: bool = True) -> float:
        """Of all products a token takes part in, the router's left out."""
        return 2.0 * self.expert_values * self.tokens * (self.top_k + with_shared)

    def least_bytes(self, used_experts: float, bytes_per_value: float) -> float:
        """Weights of the used experts and the shared one, router, tokens in and out, once each."""
        weights = (used_experts + 1) * self.expert_values * bytes_per_value
        return weights + 4 * self.experts * self.width + 4 * self.tokens * self.width


BYTES_PER_VALUE = {"bf16": 2.0, "mxfp8": 1.0 + 1 / mxfp8.GROUP_VALUES}


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """Weights of a layer."""

    shape: MoeShape
    router_EM: Tensor
    bias_E: Tensor
    gate_up_EfM: Weight
    down_EMF: Weight
    shared: SharedExpert

    def run(self, kernels: MoeKernels, x_TM: Tensor) -> Tensor:
        """The whole layer as the model runs it."""
        routing = kernels.route_tokens(x_TM, self.router_EM, self.bias_E, self.shape.top_k)
        return self.experts(kernels.run_experts, x_TM, *routing)

    def experts(
        self, run_experts: RunExperts, x_TM: Tensor, ids_Tk: Tensor, weights_Tk: Tensor
    ) -> Tensor:
        """The layer behind its router."""
        return run_experts(
            x_TM, self.gate_up_EfM, self.down_EMF, ids_Tk, weights_Tk, ALPHA, LIMIT,
            shared=self.shared, factor=FACTOR,
        )  # fmt: skip

    def routed_as(self, shape: MoeShape) -> MoeLayer:
        """The same weights for other tokens."""
        bias_E = torch.zeros_like(self.bias_E)
        if shape.is_skewed:
            bias_E = 0.25 / torch.arange(1, shape.experts + 1, device=bias_E.device)
        return replace(self, shape=shape, bias_E=bias_E)


def make_layer(shape: MoeShape, form: str, device: torch.device) -> MoeLayer:
    """Random weights of about the size of trained ones, made where they stay.

    Args:
        form: `bf16` or `mxfp8`.
    """
    generator = torch.Generator(device=device).manual_seed(0)
    normal = partial(torch.randn, generator=generator, device=device, dtype=torch.bfloat16)

    def weight(count: int, rows: int, columns: int) -> Weight:
        drawn = min(count, DRAWN_EXPERTS)
        repeats = (-(-count // drawn), 1, 1)
        plain = (normal(rows, columns).mul_(columns**-0.5) for _ in range(drawn))
        if form == "bf16":
            return torch.stack(list(plain)).repeat(repeats)[:count]
        # expert by expert, for encoding takes several times an expert's bytes
        parts = [mxfp8.encode(one) for one in plain]
        elements = torch.stack([part.elements.view(torch.uint8) for part in parts])
        scales = torch.stack([part.scales for part in parts])
        return Mxfp8Weight(
            elements.repeat(repeats)[:count].view(torch.float8_e4m3fn),
            scales.repeat(repeats)[:count],
        )

    def one(rows: int, columns: int) -> Weight:
        stack = weight(1, rows, columns)
        if isinstance(stack, Mxfp8Weight):
            return Mxfp8Weight(stack.elements[0], stack.scales[0])
        return stack[0]

    width, inner = shape.width, shape.inner
    layer = MoeLayer(
        shape=shape,
        router_EM=normal(shape.experts, width).float() * width**-0.5,
        bias_E=torch.zeros(shape.experts, device=device),
        gate_up_EfM=weight(shape.experts, 2 * inner, width),
        down_EMF=weight(shape.experts, width, inner),
        shared=SharedExpert(one(2 * inner, width), one(width, inner)),
    )
    return layer.routed_as(shape)


def make_tokens(shape: MoeShape, device: torch.device, seed: int) -> Tensor:
    """bf16 [T, M] of unit size, as a norm leaves them."""
    generator = torch.Generator(device=device).manual_seed(seed)
    size = (shape.tokens, shape.width)
    return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)


def used_experts(layer: MoeLayer, x_TM: Tensor) -> int:
    """Experts that the routing of these tokens touches."""
    ids_Tk, _ = reference.route_tokens(x_TM, layer.router_EM, layer.bias_E, layer.shape.top_k)
    return len(ids_Tk.unique())


class LayerCheck:
    """Holds kernels to one layer and one set of tokens: routing to fp64 scores, output to fp32.

    The reference of some tokens takes longer than a timing, so it is kept for kernels that choose
    the same experts.
    """

    def __init__(self, layer: MoeLayer, x_TM: Tensor) -> None:
        self._layer, self._x_TM = layer, x_TM
        step = math.ceil(layer.shape.tokens / CHECKED_TOKENS)
        self._some = torch.arange(0, layer.shape.tokens, step, device=x_TM.device)
        self._kept: tuple[Tensor, Tensor] | None = None

    def __call__(self, kernels: MoeKernels) -> None:
        """Checks these kernels.

        Raises:
            CheckError: names what is off and by how much.
        """
        layer, x_TM, some = self._layer, self._x_TM, self._some
        ids_Tk, weights_Tk = kernels.route_tokens(
            x_TM, layer.router_EM, layer.bias_E, layer.shape.top_k
        )
        check_routing(layer, x_TM, ids_Tk, weights_Tk)
        # weights of the same experts differ by what `check_routing` allows, far below the limit
        if self._kept is None or not torch.equal(self._kept[0], ids_Tk):
            inputs = (x_TM[some].float(), ids_Tk[some], weights_Tk[some])
            self._kept = ids_Tk, layer.experts(reference.run_experts, *inputs)
        actual = layer.run(kernels, x_TM)
        if not bool(actual.isfinite().all()):
            raise CheckError("MoE layer output holds a NaN or an infinity")
        require_close(actual[some], self._kept[1], limit=OUTPUT_LIMIT, what="MoE layer output")


def check_routing(layer: MoeLayer, x_TM: Tensor, ids_Tk: Tensor, weights_Tk: Tensor) -> None:
    """Chosen experts are the best by fp64 score, as far as fp32 can tell; weights are theirs.

    Raises:
        CheckError: names the token.
    """
    scores = (x_TM.double() @ layer.router_EM.double().T).sigmoid()
    biased = scores + layer.bias_E.double()
    taken = torch.zeros_like(biased, dtype=torch.bool).scatter_(1, ids_Tk.long(), True)
    worst = biased.masked_fill(~taken, math.inf).amin(1)
    best = biased.masked_fill(taken, -math.inf).amax(1)
    wrong = (worst < best - SCORE_SLACK) | (taken.sum(1) != layer.shape.top_k)
    if bool(wrong.any()):
        token = int(wrong.nonzero()[0])
        raise CheckError(
            f"token {token}: experts {ids_Tk[token].tolist()} are not the best; least of them "
            f"{worst[token]:.7f}, best of the others {best[token]:.7f}"
        )
    expected = scores.gather(1, ids_Tk.long())
    expected /= expected.sum(1, keepdim=True)
    require_close(weights_Tk, expected, limit=SCORE_SLACK, what="routing weights")


def grouped_peer(layer: MoeLayer, x_TM: Tensor) -> Callable[[], object]:
    """PyTorch's grouped products over tokens that are already sorted: no routing, no shared expert.

    The activation between them is left out too, to time what the library does and nothing else.
    """
    gate_up, down, shape = layer.gate_up_EfM, layer.down_EMF, layer.shape
    assert isinstance(gate_up, Tensor), "the peer takes bf16 weights"
    assert isinstance(down, Tensor), "the peer takes bf16 weights"
    ids_Tk, _ = reference.route_tokens(x_TM, layer.router_EM, layer.bias_E, shape.top_k)
    ids, order = ids_Tk.flatten().sort(stable=True)
    offsets = torch.bincount(ids, minlength=shape.experts).cumsum(0).to(torch.int32)
    rows = x_TM[order // shape.top_k]
    hidden = rows[:, : shape.inner].contiguous()

    def run() -> None:
        functional.grouped_mm(rows, gate_up.transpose(1, 2), offs=offsets)
        functional.grouped_mm(hidden, down.transpose(1, 2), offs=offsets)

    return run
