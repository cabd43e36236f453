"""Routing, experts and MXFP8 linears by the sm_90a kernels, where these beat Triton's; else those.

Which serves what was measured: `docs/bench/moe-h200.md`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from m3stack.kernels.interface import Mxfp8Weight, SharedExpert, Weight
from m3stack.kernels.moe.cuda_library import (
    FEW_TOKENS,
    MANY_TOKENS,
    ROUTE_CHOSEN,
    ROUTE_EXPERTS,
    ROUTE_TOKENS,
    ExpertLibrary,
    FewArgs,
    ManyArgs,
    Mode,
    RouteArgs,
)
from m3stack.kernels.moe.grouping_with_triton import group_pairs, sort_pairs
from m3stack.kernels.moe.with_triton import TritonExperts, combine
from m3stack.kernels.quantised import with_triton as triton_linears

# columns that kernels read at once
PLAIN_COLUMNS, MXFP8_COLUMNS = 32, 128
# of bf16 weights: from 8 on Triton reads memory as fast, and one step of it serves any number
PLAIN_TOKENS = 4
# rows of a weight tile of many tokens
MANY_ROWS = 128
MAX_LINEAR_TOKENS = 128


def few_block_tokens(num_pairs: int, num_experts: int) -> int | None:
    """Tokens of a block by the pairs an expert has on average; None where these are many.

    A block more of an expert reads its weights again, so blocks hold about the average and two
    deviations of random routing.
    """
    average = num_pairs / num_experts
    for most, tokens in ((3, 8), (9, 16), (20, 32)):
        if average <= most:
            return tokens
    return None


class CudaExperts:
    """Experts for one device; one stream at a time.

    Args:
        device: of the weights.

    Raises:
        KernelUnavailableError: another GPU, or no compiler.
    """

    def __init__(self, device: torch.device) -> None:
        self._library = ExpertLibrary()
        self._triton = TritonExperts(device)
        self._arrived = torch.zeros(1, dtype=torch.int32, device=device)

    def route_tokens(
        self, x_TM: Tensor, router_EM: Tensor, bias_E: Tensor, top_k: int
    ) -> tuple[Tensor, Tensor]:
        """See `interface.RouteTokens`; a single launch."""
        (num_tokens, width), num_experts = x_TM.shape, router_EM.shape[0]
        is_served = (
            0 < num_tokens <= ROUTE_TOKENS
            and num_experts <= ROUTE_EXPERTS
            and top_k <= ROUTE_CHOSEN
            and width % 4 == 0
            and x_TM.dtype == torch.bfloat16
            and _aligned(x_TM)
        )
        if not is_served:
            return self._triton.route_tokens(x_TM, router_EM, bias_E, top_k)
        assert router_EM.is_contiguous(), "router rows must stand back to back"
        ids = torch.empty(num_tokens, top_k, dtype=torch.int32, device=x_TM.device)
        weights, scores = (
            torch.empty(num_tokens, count, dtype=torch.float32, device=x_TM.device)
            for count in (top_k, num_experts)
        )
        arguments = RouteArgs(
            x=x_TM.data_ptr(), router=router_EM.data_ptr(), bias=bias_E.data_ptr(),
            scores=scores.data_ptr(), arrived=self._arrived.data_ptr(), ids=ids.data_ptr(),
            weights=weights.data_ptr(), x_row=x_TM.stride(0), num_tokens=num_tokens,
            num_experts=num_experts, top_k=top_k, width=width,
        )  # fmt: skip
        self._library.route(arguments)
        return ids, weights

    def run_experts(
        self,
        x_TM: Tensor,
        gate_up_EfM: Weight,
        down_EMF: Weight,
        ids_Tk: Tensor,
        weights_Tk: Tensor,
        alpha: float,
        limit: float,
        *,
        shared: SharedExpert | None = None,
        factor: float = 1.0,
    ) -> Tensor:
        """See `interface.RunExperts`."""
        num_experts, num_pairs = _elements(gate_up_EfM).shape[0], ids_Tk.numel()
        tokens = few_block_tokens(num_pairs, num_experts)
        routed = _Matrices(gate_up_EfM, down_EMF)
        if num_pairs == 0 or not _serves(x_TM, routed, is_few=tokens is not None):
            return self._triton.run_experts(
                x_TM, gate_up_EfM, down_EMF, ids_Tk, weights_Tk, alpha, limit,
                shared=shared, factor=factor,
            )  # fmt: skip
        call = _Call(
            self._library, x_TM, ids_Tk.contiguous(), weights_Tk.float().contiguous(),
            alpha, limit, factor,
        )  # fmt: skip
        own = None if shared is None else _Matrices(shared.gate_up_fM, shared.down_MF)
        if tokens is not None:
            return call.run_few(routed, own, tokens)
        return call.run_many(routed, own)

    def linear_mxfp8(self, x: Tensor, weight: Mxfp8Weight) -> Tensor:
        """See `interface.LinearMxfp8`."""
        num_outputs, width = weight.elements.shape
        rows = x.reshape(-1, width)
        num_tokens, is_few = rows.shape[0], rows.shape[0] <= MAX_LINEAR_TOKENS
        is_served = not width % MXFP8_COLUMNS and (is_few or not num_outputs % MANY_ROWS)
        if num_tokens == 0 or not is_served or not _aligned(rows):
            return triton_linears.linear_mxfp8(x, weight)
        assert x.dtype == torch.bfloat16, f"MXFP8 wants bf16, got {x.dtype}"
        out = torch.empty(*x.shape[:-1], num_outputs, dtype=x.dtype, device=x.device)
        elements, scales = _pointers(weight)
        if is_few:
            tokens = _block_of(num_tokens)
            arguments = FewArgs(
                x=rows.data_ptr(), shared_elements=elements, shared_scales=scales, scales=scales,
                out=out.data_ptr(), x_row=rows.stride(0), num_tokens=num_tokens, top_k=1,
                width=width, outputs=num_outputs, shared_blocks=-(-num_tokens // tokens),
                num_blocks=-(-num_tokens // tokens),
            )  # fmt: skip
            self._library.few(arguments, tokens, Mode.LINEAR)
            return out
        ordered = torch.empty(num_tokens, width, dtype=x.dtype, device=x.device)
        self._library.gather(rows, None, ordered, top_k=1)
        # a down product of the shared expert alone is a linear
        arguments = ManyArgs(
            shared_elements=elements, shared_scales=scales, scales=scales, out=out.data_ptr(),
            factor=1.0, num_tokens=num_tokens, width=width, outputs=num_outputs,
        )  # fmt: skip
        self._library.many(arguments, ordered, Mode.DOWN)
        return out


@dataclass(frozen=True, slots=True)
class _Matrices:
    gate_up: Weight
    down: Weight

    def at(self, mode: Mode) -> Weight:
        return self.gate_up if mode is Mode.UP else self.down


@dataclass(frozen=True, slots=True)
class _Call:
    """One call: what its kernels share."""

    library: ExpertLibrary
    x_TM: Tensor
    ids_Tk: Tensor
    weights_Tk: Tensor
    alpha: float
    limit: float
    factor: float

    def run_few(self, routed: _Matrices, own: _Matrices | None, tokens: int) -> Tensor:
        """Blocks of `tokens` pairs; hidden rows and results stand by pair."""
        (num_tokens, top_k), num_pairs = self.ids_Tk.shape, self.ids_Tk.numel()
        hidden, results = self._buffers(routed, own, torch.float32)
        num_experts = _elements(routed.gate_up).shape[0]
        if num_tokens == 1:
            # one token's experts are all different: each is a block by itself
            pairs, experts, max_blocks = None, self.ids_Tk, num_pairs
        else:
            blocks = group_pairs(self.ids_Tk, num_experts, tokens)
            pairs, experts, max_blocks = blocks.pairs, blocks.experts, blocks.max_blocks
        # the shared expert rides in the routed ones' launches while it is no more blocks than two
        own_tokens = tokens if num_tokens <= 2 * tokens else _block_of(num_tokens)
        own_blocks = 0 if own is None else -(-num_tokens // own_tokens)
        launches = [(max_blocks, own_blocks, tokens)]
        if own is not None and own_tokens != tokens:
            launches = [(0, own_blocks, own_tokens), (max_blocks, 0, tokens)]
        apart = None
        if own is not None and num_tokens > FEW_TOKENS[-1]:
            # more blocks of it would each read its weights again
            apart = self._own_of_many(own)
            launches = launches[1:]
        for mode, source, target in (
            (Mode.UP, self.x_TM, hidden),
            (Mode.DOWN, hidden, results),
        ):
            elements, scales = _pointers(routed.at(mode))
            own_elements, own_scales = (None, None) if own is None else _pointers(own.at(mode))
            for routed_blocks, shared_blocks, block_tokens in launches:
                arguments = FewArgs(
                    x=source.data_ptr(), elements=elements, scales=scales,
                    shared_elements=own_elements, shared_scales=own_scales,
                    pairs=None if pairs is None else pairs.data_ptr(),
                    experts=experts.data_ptr(),
                    weights=self.weights_Tk.data_ptr(), out=target.data_ptr(),
                    x_row=source.stride(0), alpha=self.alpha, limit=self.limit,
                    factor=self.factor, num_pairs=num_pairs,
                    num_tokens=0 if own is None else num_tokens, top_k=top_k,
                    width=source.shape[1], outputs=target.shape[1],
                    shared_blocks=shared_blocks, num_blocks=shared_blocks + routed_blocks,
                )  # fmt: skip
                self.library.few(arguments, block_tokens, mode)
        if own is None:
            return self._combined(results, None)
        return self._combined(results, results[num_pairs:] if apart is None else apart)

    def _own_of_many(self, own: _Matrices) -> Tensor:
        """The shared expert's results alone, by the kernels of many tokens: bf16 [T, M]."""
        (num_tokens, width), inner = self.x_TM.shape, _elements(own.down).shape[1]
        ordered, hidden, out = (
            torch.empty(num_tokens, count, dtype=torch.bfloat16, device=self.x_TM.device)
            for count in (width, inner, width)
        )
        self.library.gather(self.x_TM, None, ordered, top_k=1)
        for mode, source, target in ((Mode.UP, ordered, hidden), (Mode.DOWN, hidden, out)):
            elements, scales = _pointers(own.at(mode))
            arguments = ManyArgs(
                shared_elements=elements, shared_scales=scales, scales=scales,
                out=target.data_ptr(), alpha=self.alpha, limit=self.limit, factor=1.0,
                num_tokens=num_tokens, width=source.shape[1], outputs=target.shape[1],
            )  # fmt: skip
            self.library.many(arguments, source, mode)
        return out

    def run_many(self, routed: _Matrices, own: _Matrices | None) -> Tensor:
        """Pairs sorted by expert; results are rounded to bf16 before they are added up."""
        num_tokens, top_k = self.ids_Tk.shape
        order = sort_pairs(self.ids_Tk, _elements(routed.gate_up).shape[0], MANY_TOKENS)
        hidden, results = self._buffers(routed, own, torch.bfloat16)
        ordered = torch.empty(
            results.shape[0], self.x_TM.shape[1], dtype=torch.bfloat16, device=hidden.device
        )
        self.library.gather(self.x_TM, order.pairs, ordered, top_k=top_k)
        for mode, source, target in ((Mode.UP, ordered, hidden), (Mode.DOWN, hidden, results)):
            elements, scales = _pointers(routed.at(mode))
            own_elements, own_scales = (None, None) if own is None else _pointers(own.at(mode))
            arguments = ManyArgs(
                elements=elements, scales=scales, shared_elements=own_elements,
                shared_scales=own_scales, experts=order.experts.data_ptr(),
                firsts=order.firsts.data_ptr(), counts=order.counts.data_ptr(),
                pairs=order.pairs.data_ptr(), weights=self.weights_Tk.data_ptr(),
                out=target.data_ptr(), alpha=self.alpha, limit=self.limit, factor=self.factor,
                num_pairs=self.ids_Tk.numel(), num_tokens=0 if own is None else num_tokens,
                width=source.shape[1], outputs=target.shape[1], max_blocks=order.max_blocks,
            )  # fmt: skip
            self.library.many(arguments, source, mode)
        return self._combined(results, None if own is None else results[self.ids_Tk.numel() :])

    def _buffers(
        self, routed: _Matrices, own: _Matrices | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Hidden rows bf16, and results: of all pairs, then of the shared expert's tokens."""
        _, width, inner = _elements(routed.down).shape
        rows = self.ids_Tk.numel() + len(self.ids_Tk) * (own is not None)
        device = self.x_TM.device
        hidden = torch.empty(rows, inner, dtype=torch.bfloat16, device=device)
        return hidden, torch.empty(rows, width, dtype=dtype, device=device)

    def _combined(self, results: Tensor, own_TM: Tensor | None) -> Tensor:
        out_TM = torch.empty_like(self.x_TM, memory_format=torch.contiguous_format)
        combine(results, self.ids_Tk, out_TM, own_TM)
        return out_TM


def _block_of(num_tokens: int) -> int:
    """The smallest block that holds them, or the largest there is."""
    return next((size for size in FEW_TOKENS if size >= num_tokens), FEW_TOKENS[-1])


def _elements(weight: Weight) -> Tensor:
    return weight.elements if isinstance(weight, Mxfp8Weight) else weight


def _pointers(weight: Weight) -> tuple[int, int | None]:
    if isinstance(weight, Mxfp8Weight):
        assert weight.elements.is_contiguous(), "experts must stand back to back"
        assert weight.scales.is_contiguous(), "so must their scales"
        return weight.elements.data_ptr(), weight.scales.data_ptr()
    assert weight.is_contiguous(), "experts must stand back to back"
    return weight.data_ptr(), None


def _aligned(rows: Tensor) -> bool:
    """Whether rows can be read 16 bytes at a time."""
    return rows.stride(1) == 1 and rows.stride(0) % 8 == 0 and rows.data_ptr() % 16 == 0


def _serves(x_TM: Tensor, routed: _Matrices, *, is_few: bool) -> bool:
    is_mxfp8 = isinstance(routed.gate_up, Mxfp8Weight)
    _, width, inner = _elements(routed.down).shape
    columns = MXFP8_COLUMNS if is_mxfp8 else PLAIN_COLUMNS
    return (
        x_TM.dtype == torch.bfloat16
        and _aligned(x_TM)
        and is_mxfp8 == isinstance(routed.down, Mxfp8Weight)
        and (is_mxfp8 or (is_few and len(x_TM) <= PLAIN_TOKENS))
        and not width % columns
        and not inner % columns
        and (is_few or not width % MANY_ROWS)
    )
