"""Routing, experts and MXFP8 linears by the sm_90a kernels, where these beat Triton's; else those.

Which serves what was measured: `docs/bench/moe-h200.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from m3stack.kernels.interface import Mxfp8Weight, SharedExpert, Weight
from m3stack.kernels.moe.cuda_library import (
    FEW_TOKENS,
    MANY_ROUTE_EXPERTS,
    MANY_TOKENS,
    ROUTE_CHOSEN,
    ROUTE_COLUMNS,
    ROUTE_EXPERTS,
    ROUTE_TILE,
    ROUTE_TOKENS,
    ROUTER_PARTS,
    SOME_TOKENS,
    ExpertLibrary,
    FewArgs,
    Mode,
    RingArgs,
    RouteArgs,
    RouteManyArgs,
)
from m3stack.kernels.moe.grouping_with_triton import group_pairs
from m3stack.kernels.moe.tensor_maps import coded_map, down_map, token_map, up_map, wide_coded_map
from m3stack.kernels.moe.with_triton import TritonExperts, combine
from m3stack.kernels.quantised import with_triton as triton_linears

# columns that kernels read at once
PLAIN_COLUMNS, RING_COLUMNS, MXFP8_COLUMNS = 32, 64, 128
# rows of a weight tile of the ring's down product
TILE_ROWS = 128
MAX_LINEAR_TOKENS = 128
# tokens of the ring's blocks are cut in these steps
TOKEN_STEP = 16


class Path(StrEnum):
    """What computes a layer's experts."""

    FEW = "few"
    SOME = "some"
    MANY = "many"
    TRITON = "triton"


def choose_path(num_tokens: int, num_pairs: int, num_experts: int, *, is_mxfp8: bool) -> Path:
    """What was fastest, by the pairs an expert of any rank has on average: by sizes alone."""
    average = num_pairs / num_experts
    if is_mxfp8:
        if average <= 0.25 or num_tokens == 1:
            return Path.FEW
        return Path.SOME if average <= 40 else Path.MANY
    if num_tokens <= 4:
        return Path.FEW
    # Triton reads bf16 weights at the memory's full speed, and one step of it serves any number
    return Path.TRITON if average <= 24 else Path.MANY


class CudaExperts:
    """Experts for one device; one stream at a time.

    Args:
        device: of the weights.
        experts: of a layer, those of all ranks, whose pairs are in every call, with negative ids;
            those whose weights are given where None.
        path: what computes experts, where the choice by size is not wanted.
        library: the built kernels, where they are not this device's.
        portable: what serves the rest.

    Raises:
        KernelUnavailableError: another GPU, or no compiler.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        experts: int | None = None,
        path: Path | None = None,
        library: ExpertLibrary | None = None,
        portable: TritonExperts | None = None,
    ) -> None:
        self._library = library or ExpertLibrary()
        self._triton = portable or TritonExperts(device, experts=experts)
        self._arrived = torch.zeros(1, dtype=torch.int32, device=device)
        self._path, self._experts = path, experts

    def route_tokens(
        self, x_TM: Tensor, router_EM: Tensor, bias_E: Tensor, top_k: int
    ) -> tuple[Tensor, Tensor]:
        """See `interface.RouteTokens`."""
        (num_tokens, width), num_experts = x_TM.shape, router_EM.shape[0]
        is_served = (
            num_tokens > 0
            and top_k <= ROUTE_CHOSEN
            and x_TM.dtype == torch.bfloat16
            and router_EM.dtype == torch.float32
            and _aligned(x_TM)
        )
        if is_served and num_tokens <= ROUTE_TOKENS:
            is_served = num_experts <= ROUTE_EXPERTS and width % 4 == 0
        elif is_served:
            is_served = num_experts <= MANY_ROUTE_EXPERTS and width % ROUTE_COLUMNS == 0
        if not is_served:
            return self._triton.route_tokens(x_TM, router_EM, bias_E, top_k)
        assert router_EM.is_contiguous(), "router rows must stand back to back"
        ids = torch.empty(num_tokens, top_k, dtype=torch.int32, device=x_TM.device)
        weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=x_TM.device)
        if num_tokens > ROUTE_TOKENS:
            self._route_many(x_TM, router_EM, bias_E, ids, weights)
            return ids, weights
        scores = torch.empty(num_tokens, num_experts, dtype=torch.float32, device=x_TM.device)
        arguments = RouteArgs(
            x=x_TM.data_ptr(), router=router_EM.data_ptr(), bias=bias_E.data_ptr(),
            scores=scores.data_ptr(), arrived=self._arrived.data_ptr(), ids=ids.data_ptr(),
            weights=weights.data_ptr(), x_row=x_TM.stride(0), num_tokens=num_tokens,
            num_experts=num_experts, top_k=top_k, width=width,
        )  # fmt: skip
        self._library.route(arguments)
        return ids, weights

    def _route_many(
        self, x_TM: Tensor, router_EM: Tensor, bias_E: Tensor, ids: Tensor, weights: Tensor
    ) -> None:
        (num_tokens, width), device = x_TM.shape, x_TM.device
        tiles = -(-num_tokens // ROUTE_TILE)
        # as many parts of the columns as fill the GPU, four steps at least
        splits = max(1, min(self._library.processors // tiles, width // ROUTE_COLUMNS // 4))
        rows = ROUTER_PARTS * MANY_ROUTE_EXPERTS
        parts = torch.empty(rows, width, dtype=torch.bfloat16, device=device)
        size = (splits, num_tokens, MANY_ROUTE_EXPERTS)
        partial = torch.empty(size, dtype=torch.float32, device=device)
        arguments = RouteManyArgs(
            router=router_EM.data_ptr(), parts=parts.data_ptr(), partial=partial.data_ptr(),
            bias=bias_E.data_ptr(), ids=ids.data_ptr(), weights=weights.data_ptr(),
            num_tokens=num_tokens, num_experts=router_EM.shape[0], top_k=ids.shape[1], width=width,
            splits=splits,
        )  # fmt: skip
        maps = [
            self._library.tensor_map(rows, token_map(rows, ROUTE_TILE)) for rows in (x_TM, parts)
        ]
        self._library.route_many(arguments, maps[0], maps[1])

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
        num_experts, num_pairs = self._experts or len(_elements(gate_up_EfM)), ids_Tk.numel()
        routed = _Matrices(gate_up_EfM, down_EMF)
        path = self._path or choose_path(
            len(x_TM), num_pairs, num_experts, is_mxfp8=routed.is_mxfp8
        )
        if num_pairs == 0 or path is Path.TRITON or not _serves(x_TM, routed, path):
            return self._triton.run_experts(
                x_TM, gate_up_EfM, down_EMF, ids_Tk, weights_Tk, alpha, limit,
                shared=shared, factor=factor,
            )  # fmt: skip
        call = _Call(
            self._library, x_TM, ids_Tk.contiguous(), weights_Tk.float().contiguous(),
            alpha, limit, factor, num_experts,
        )  # fmt: skip
        own = None if shared is None else _Matrices(shared.gate_up_fM, shared.down_MF)
        if path is Path.FEW:
            return call.run_few(routed, own, few_block_tokens(num_pairs, num_experts))
        if path is Path.MANY:
            return call.run_ring(routed, own, MANY_TOKENS)
        return call.run_ring(routed, own, some_block_tokens(num_pairs, num_experts))

    def linear_mxfp8(self, x: Tensor, weight: Mxfp8Weight) -> Tensor:
        """See `interface.LinearMxfp8`."""
        num_outputs, width = weight.elements.shape
        rows = x.reshape(-1, width)
        num_tokens, is_few = rows.shape[0], rows.shape[0] <= MAX_LINEAR_TOKENS
        is_served = not width % MXFP8_COLUMNS and (is_few or not num_outputs % TILE_ROWS)
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
        ordered = self._library.gather(rows, None, top_k=1, is_coded=True, with_tokens=True)
        box = box_tokens(num_tokens, MANY_TOKENS)
        # a down product of the shared expert alone is a linear
        arguments = RingArgs(
            own_scales=scales, out=out.data_ptr(), factor=1.0,
            num_tokens=num_tokens, width=width, outputs=num_outputs,
            own_block=_own_block(num_tokens, MANY_TOKENS), box_tokens=box,
        )  # fmt: skip
        tokens_map = self._library.tensor_map(ordered, token_map(ordered, box))
        weight_map = _weight_map(self._library, weight, Mode.DOWN, MANY_TOKENS)
        maps = [tokens_map, tokens_map, weight_map, weight_map]
        self._library.ring(arguments, maps, Mode.DOWN, MANY_TOKENS)
        return out


def few_block_tokens(num_pairs: int, num_experts: int) -> int:
    """Tokens of a block of few by the pairs an expert of any rank has on average.

    A block more of an expert reads its weights again, so blocks hold about the average and two
    deviations of random routing.
    """
    average = num_pairs / num_experts
    return next((tokens for most, tokens in ((3, 8), (9, 16)) if average <= most), 32)


def some_block_tokens(num_pairs: int, num_experts: int) -> int:
    """Tokens of a block of some, likewise: blocks of 32 leave a processor room for two."""
    return SOME_TOKENS[num_pairs > 4 * num_experts]


def box_tokens(average: float, most: int) -> int:
    """Tokens of one copy into a block of the ring: few where blocks hold fewer than they could."""
    if most != MANY_TOKENS:
        return 16
    return 144 if average > 192 else 48


@dataclass(frozen=True, slots=True)
class _Matrices:
    gate_up: Weight
    down: Weight

    @property
    def is_mxfp8(self) -> bool:
        return isinstance(self.gate_up, Mxfp8Weight)

    def at(self, mode: Mode) -> Weight:
        return self.gate_up if mode is Mode.UP else self.down


@dataclass(frozen=True, slots=True)
class _Call:
    """One call: what its kernels share.

    Attributes:
        num_experts: of all ranks, whose pairs are in `ids_Tk`.
    """

    library: ExpertLibrary
    x_TM: Tensor
    ids_Tk: Tensor
    weights_Tk: Tensor
    alpha: float
    limit: float
    factor: float
    num_experts: int

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
                    is_early=num_tokens == 1,
                )  # fmt: skip
                self.library.few(arguments, block_tokens, mode)
        return self._combined(results, None if own is None else results[num_pairs:])

    def run_ring(self, routed: _Matrices, own: _Matrices | None, most: int) -> Tensor:
        """Pairs sorted by expert, in blocks of `most`; results are added up in bf16."""
        (num_tokens, top_k), num_pairs = self.ids_Tk.shape, self.ids_Tk.numel()
        is_coded = routed.is_mxfp8
        order = self.library.sort(self.ids_Tk, _elements(routed.gate_up).shape[0], most)
        hidden, results = self._buffers(routed, own, torch.bfloat16)
        ordered = self.library.gather(
            self.x_TM, order.pairs, top_k=top_k, is_coded=is_coded,
            with_tokens=is_coded and own is not None,
        )  # fmt: skip
        box = box_tokens(num_pairs / self.num_experts, most)
        own_x_TM = ordered[num_pairs:] if is_coded else self.x_TM
        for mode, source, own_source, target in (
            (Mode.UP, ordered[:num_pairs], own_x_TM, hidden),
            (Mode.DOWN, hidden[:num_pairs], hidden[num_pairs:], results),
        ):
            matrix = routed.at(mode)
            own_matrix = matrix if own is None else own.at(mode)
            arguments = RingArgs(
                scales=_pointers(matrix)[1], own_scales=_pointers(own_matrix)[1],
                experts=order.experts.data_ptr(), firsts=order.firsts.data_ptr(),
                counts=order.counts.data_ptr(), pairs=order.pairs.data_ptr(),
                pair_weights=self.weights_Tk.data_ptr(), out=target.data_ptr(), alpha=self.alpha,
                limit=self.limit, factor=self.factor, num_pairs=num_pairs,
                num_tokens=0 if own is None else num_tokens, width=source.shape[1],
                outputs=target.shape[1], max_blocks=order.max_blocks,
                own_block=_own_block(num_tokens, most), box_tokens=box,
            )  # fmt: skip
            maps = [
                self.library.tensor_map(rows, token_map(rows, box))
                for rows in (source, source if own is None else own_source)
            ]
            maps += [_weight_map(self.library, one, mode, most) for one in (matrix, own_matrix)]
            self.library.ring(arguments, maps, mode, most)
        return self._combined(results, None if own is None else results[num_pairs:])

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


def _own_block(num_tokens: int, most: int) -> int:
    """Tokens of a block of the shared expert: none above `most`, all about as many."""
    blocks = -(-num_tokens // most)
    size = -(-num_tokens // blocks)
    return -(-size // TOKEN_STEP) * TOKEN_STEP


def _weight_map(library: ExpertLibrary, weight: Weight, mode: Mode, most: int) -> bytes:
    elements = _elements(weight)
    stack = elements if elements.dim() == 3 else elements[None]
    if isinstance(weight, Mxfp8Weight):
        is_wide = most in SOME_TOKENS
        return library.tensor_map(stack, wide_coded_map(stack) if is_wide else coded_map(stack))
    return library.tensor_map(stack, up_map(stack) if mode is Mode.UP else down_map(stack))


def _serves(x_TM: Tensor, routed: _Matrices, path: Path) -> bool:
    _, width, inner = _elements(routed.down).shape
    if routed.is_mxfp8:
        columns = MXFP8_COLUMNS
    else:
        columns = PLAIN_COLUMNS if path is Path.FEW else RING_COLUMNS
    return (
        x_TM.dtype == torch.bfloat16
        and _aligned(x_TM)
        and routed.is_mxfp8 == isinstance(routed.down, Mxfp8Weight)
        and (routed.is_mxfp8 or path is not Path.SOME)
        and not width % columns
        and not inner % columns
        and (path is Path.FEW or not width % TILE_ROWS)
    )
