"""One call of a layer's experts: the launches of the sm_90a kernels in their order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from m3stack.kernels.interface import Mxfp8Weight, Weight
from m3stack.kernels.moe.cuda_library import (
    SOME_TOKENS,
    ExpertLibrary,
    FewArgs,
    Mode,
    RingArgs,
)
from m3stack.kernels.moe.cuda_sizes import block_of, box_tokens, own_block
from m3stack.kernels.moe.grouping_with_triton import group_pairs
from m3stack.kernels.moe.tensor_maps import coded_map, down_map, token_map, up_map, wide_coded_map
from m3stack.kernels.moe.with_triton import combine


@dataclass(frozen=True, slots=True)
class Matrices:
    """Both weights of all experts, or of the shared one."""

    gate_up: Weight
    down: Weight

    @property
    def is_mxfp8(self) -> bool:
        return isinstance(self.gate_up, Mxfp8Weight)

    def at(self, mode: Mode) -> Weight:
        return self.gate_up if mode is Mode.UP else self.down


@dataclass(frozen=True, slots=True)
class ExpertCall:
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

    def run_few(self, routed: Matrices, own: Matrices | None, tokens: int) -> Tensor:
        """Blocks of `tokens` pairs; hidden rows and results stand by pair."""
        (num_tokens, top_k), num_pairs = self.ids_Tk.shape, self.ids_Tk.numel()
        hidden, results = self._buffers(routed, own, torch.float32)
        num_experts = elements_of(routed.gate_up).shape[0]
        if num_tokens == 1:
            # one token's experts are all different: each is a block by itself
            pairs, experts, max_blocks = None, self.ids_Tk, num_pairs
        else:
            blocks = group_pairs(self.ids_Tk, num_experts, tokens)
            pairs, experts, max_blocks = blocks.pairs, blocks.experts, blocks.max_blocks
        # the shared expert rides in the routed ones' launches while it is no more blocks than two
        own_tokens = tokens if num_tokens <= 2 * tokens else block_of(num_tokens)
        own_blocks = 0 if own is None else -(-num_tokens // own_tokens)
        launches = [(max_blocks, own_blocks, tokens)]
        if own is not None and own_tokens != tokens:
            launches = [(0, own_blocks, own_tokens), (max_blocks, 0, tokens)]
        for mode, source, target in (
            (Mode.UP, self.x_TM, hidden),
            (Mode.DOWN, hidden, results),
        ):
            elements, scales = pointers_of(routed.at(mode))
            own_elements, own_scales = (None, None) if own is None else pointers_of(own.at(mode))
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

    def run_ring(self, routed: Matrices, own: Matrices | None, most: int) -> Tensor:
        """Pairs sorted by expert, in blocks of `most`; results are added up in bf16."""
        num_tokens, num_pairs = len(self.ids_Tk), self.ids_Tk.numel()
        is_coded = routed.is_mxfp8
        if num_tokens == 1:
            order = self.library.lone(self.ids_Tk)
        else:
            order = self.library.sort(self.ids_Tk, elements_of(routed.gate_up).shape[0], most)
        hidden, results = self._buffers(routed, own, torch.bfloat16)
        ordered = self.library.gather(
            self.x_TM, order.places, is_coded=is_coded, with_tokens=is_coded and own is not None
        )
        box = box_tokens(num_pairs / self.num_experts, most)
        own_x_TM = ordered[num_pairs:] if is_coded else self.x_TM
        for mode, source, own_source, target in (
            (Mode.UP, ordered[:num_pairs], own_x_TM, hidden),
            (Mode.DOWN, hidden[:num_pairs], hidden[num_pairs:], results),
        ):
            matrix = routed.at(mode)
            own_matrix = matrix if own is None else own.at(mode)
            arguments = RingArgs(
                scales=pointers_of(matrix)[1], own_scales=pointers_of(own_matrix)[1],
                experts=order.experts.data_ptr(), firsts=order.firsts.data_ptr(),
                counts=order.counts.data_ptr(), pairs=order.pairs.data_ptr(),
                pair_weights=self.weights_Tk.data_ptr(),
                next_tile=self.library.next_tiles[mode:].data_ptr(), out=target.data_ptr(),
                alpha=self.alpha, limit=self.limit, factor=self.factor, num_pairs=num_pairs,
                num_tokens=0 if own is None else num_tokens, width=source.shape[1],
                outputs=target.shape[1], max_blocks=order.max_blocks,
                own_block=own_block(num_tokens, most), box_tokens=box,
            )  # fmt: skip
            maps = [
                self.library.tensor_map(rows, token_map(rows, box))
                for rows in (source, source if own is None else own_source)
            ]
            maps += [weight_map(self.library, one, mode, most) for one in (matrix, own_matrix)]
            self.library.ring(arguments, maps, mode, most)
        return self._combined(results, None if own is None else results[num_pairs:])

    def _buffers(
        self, routed: Matrices, own: Matrices | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Hidden rows bf16, and results: of all pairs, then of the shared expert's tokens."""
        _, width, inner = elements_of(routed.down).shape
        rows = self.ids_Tk.numel() + len(self.ids_Tk) * (own is not None)
        device = self.x_TM.device
        hidden = torch.empty(rows, inner, dtype=torch.bfloat16, device=device)
        return hidden, torch.empty(rows, width, dtype=dtype, device=device)

    def _combined(self, results: Tensor, own_TM: Tensor | None) -> Tensor:
        out_TM = torch.empty_like(self.x_TM, memory_format=torch.contiguous_format)
        combine(results, self.ids_Tk, out_TM, own_TM)
        return out_TM


def elements_of(weight: Weight) -> Tensor:
    """The elements, whatever the format."""
    return weight.elements if isinstance(weight, Mxfp8Weight) else weight


def pointers_of(weight: Weight) -> tuple[int, int | None]:
    """Addresses of elements and scales; of these, None in bf16."""
    if isinstance(weight, Mxfp8Weight):
        assert weight.elements.is_contiguous(), "experts must stand back to back"
        assert weight.scales.is_contiguous(), "so must their scales"
        return weight.elements.data_ptr(), weight.scales.data_ptr()
    assert weight.is_contiguous(), "experts must stand back to back"
    return weight.data_ptr(), None


def weight_map(library: ExpertLibrary, weight: Weight, mode: Mode, most: int) -> bytes:
    """The encoded map by which blocks of `most` tokens copy a weight."""
    elements = elements_of(weight)
    stack = elements if elements.dim() == 3 else elements[None]
    if isinstance(weight, Mxfp8Weight):
        is_wide = most in SOME_TOKENS
        return library.tensor_map(stack, wide_coded_map(stack) if is_wide else coded_map(stack))
    return library.tensor_map(stack, up_map(stack) if mode is Mode.UP else down_map(stack))
