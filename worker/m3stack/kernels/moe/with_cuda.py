"""Routing, experts and MXFP8 linears by the sm_90a kernels where these win, else by Triton's."""

from __future__ import annotations

import torch
from torch import Tensor

from m3stack.kernels.interface import Mxfp8Weight, SharedExpert, Weight
from m3stack.kernels.moe.cuda_calls import (
    ExpertCall,
    Matrices,
    elements_of,
    pointers_of,
    weight_map,
)
from m3stack.kernels.moe.cuda_library import (
    MANY_ROUTE_EXPERTS,
    MANY_TOKENS,
    ROUTE_CHOSEN,
    ROUTE_COLUMNS,
    ROUTE_EXPERTS,
    ROUTE_TILE,
    ROUTE_TOKENS,
    ROUTER_PARTS,
    ExpertLibrary,
    FewArgs,
    Mode,
    RingArgs,
    RouteArgs,
    RouteManyArgs,
)
from m3stack.kernels.moe.cuda_sizes import (
    Path,
    block_of,
    box_tokens,
    choose_path,
    few_block_tokens,
    own_block,
    some_block_tokens,
)
from m3stack.kernels.moe.tensor_maps import token_map
from m3stack.kernels.moe.with_triton import TritonExperts
from m3stack.kernels.quantised import with_triton as triton_linears

# columns that kernels read at once
PLAIN_COLUMNS, RING_COLUMNS, MXFP8_COLUMNS = 32, 64, 128
# rows of a weight tile of the ring's down product
TILE_ROWS = 128
MAX_LINEAR_TOKENS = 128


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
        num_experts, num_pairs = self._experts or len(elements_of(gate_up_EfM)), ids_Tk.numel()
        routed = Matrices(gate_up_EfM, down_EMF)
        path = self._path or choose_path(
            len(x_TM), num_pairs, num_experts, is_mxfp8=routed.is_mxfp8
        )
        if num_pairs == 0 or path is Path.TRITON or not _serves(x_TM, routed, path):
            return self._triton.run_experts(
                x_TM, gate_up_EfM, down_EMF, ids_Tk, weights_Tk, alpha, limit,
                shared=shared, factor=factor,
            )  # fmt: skip
        call = ExpertCall(
            self._library, x_TM, ids_Tk.contiguous(), weights_Tk.float().contiguous(),
            alpha, limit, factor, num_experts,
        )  # fmt: skip
        own = None if shared is None else Matrices(shared.gate_up_fM, shared.down_MF)
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
        elements, scales = pointers_of(weight)
        if is_few:
            tokens = block_of(num_tokens)
            arguments = FewArgs(
                x=rows.data_ptr(), shared_elements=elements, shared_scales=scales, scales=scales,
                out=out.data_ptr(), x_row=rows.stride(0), num_tokens=num_tokens, top_k=1,
                width=width, outputs=num_outputs, shared_blocks=-(-num_tokens // tokens),
                num_blocks=-(-num_tokens // tokens),
            )  # fmt: skip
            self._library.few(arguments, tokens, Mode.LINEAR)
            return out
        ordered = self._library.gather(rows, None, is_coded=True, with_tokens=True)
        box = box_tokens(num_tokens, MANY_TOKENS)
        # a down product of the shared expert alone is a linear
        arguments = RingArgs(
            own_scales=scales, next_tile=self._library.next_tiles[Mode.DOWN :].data_ptr(),
            out=out.data_ptr(), factor=1.0, num_tokens=num_tokens, width=width,
            outputs=num_outputs, own_block=own_block(num_tokens, MANY_TOKENS), box_tokens=box,
        )  # fmt: skip
        tokens_map = self._library.tensor_map(ordered, token_map(ordered, box))
        rows_map = weight_map(self._library, weight, Mode.DOWN, MANY_TOKENS)
        maps = [tokens_map, tokens_map, rows_map, rows_map]
        self._library.ring(arguments, maps, Mode.DOWN, MANY_TOKENS)
        return out


def _aligned(rows: Tensor) -> bool:
    """Whether rows can be read 16 bytes at a time."""
    return rows.stride(1) == 1 and rows.stride(0) % 8 == 0 and rows.data_ptr() % 16 == 0


def _serves(x_TM: Tensor, routed: Matrices, path: Path) -> bool:
    _, width, inner = elements_of(routed.down).shape
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
