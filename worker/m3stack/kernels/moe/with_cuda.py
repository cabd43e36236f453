"""Experts and MXFP8 linears by the sm_90a kernels; what those do not serve goes through Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from m3stack.kernels.interface import Mxfp8Weight, SharedExpert, Weight
from m3stack.kernels.moe.cuda_library import FEW_TOKENS, ExpertLibrary, FewArgs, Mode
from m3stack.kernels.moe.grouping_with_triton import group_pairs
from m3stack.kernels.moe.with_triton import TritonExperts, combine
from m3stack.kernels.quantised import with_triton as triton_linears

# columns that the kernels of few tokens read at once
PLAIN_COLUMNS, MXFP8_COLUMNS = 32, 128
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
        tokens = few_block_tokens(num_pairs, num_experts) if num_pairs else None
        if tokens is None or not _serves(x_TM, gate_up_EfM, down_EMF):
            return self._triton.run_experts(
                x_TM, gate_up_EfM, down_EMF, ids_Tk, weights_Tk, alpha, limit,
                shared=shared, factor=factor,
            )  # fmt: skip
        few = _Few(self._library, x_TM, ids_Tk.contiguous(), weights_Tk.float().contiguous())
        routed = _Matrices(gate_up_EfM, down_EMF)
        return few.run(routed, shared, tokens, alpha=alpha, limit=limit, factor=factor)

    def linear_mxfp8(self, x: Tensor, weight: Mxfp8Weight) -> Tensor:
        """See `interface.LinearMxfp8`."""
        num_outputs, width = weight.elements.shape
        rows = x.reshape(-1, width)
        num_tokens = rows.shape[0]
        if not 0 < num_tokens <= MAX_LINEAR_TOKENS or width % MXFP8_COLUMNS or not _aligned(rows):
            return triton_linears.linear_mxfp8(x, weight)
        assert weight.elements.is_contiguous(), "rows of the weight must stand back to back"
        assert weight.scales.is_contiguous(), "so must their scales"
        assert x.dtype == torch.bfloat16, f"MXFP8 wants bf16, got {x.dtype}"
        out = torch.empty(*x.shape[:-1], num_outputs, dtype=x.dtype, device=x.device)
        tokens = _block_of(num_tokens)
        arguments = FewArgs(
            x=rows.data_ptr(),
            shared_elements=weight.elements.data_ptr(),
            shared_scales=weight.scales.data_ptr(),
            scales=weight.scales.data_ptr(),
            out=out.data_ptr(),
            x_row=rows.stride(0),
            num_tokens=num_tokens,
            top_k=1,
            width=width,
            outputs=num_outputs,
            shared_blocks=-(-num_tokens // tokens),
            num_blocks=-(-num_tokens // tokens),
        )
        self._library.few(arguments, tokens, Mode.LINEAR)
        return out


@dataclass(frozen=True, slots=True)
class _Matrices:
    gate_up: Weight
    down: Weight


class _Few:
    """One call of few tokens: their pairs, hidden rows and results."""

    def __init__(
        self, library: ExpertLibrary, x_TM: Tensor, ids_Tk: Tensor, weights_Tk: Tensor
    ) -> None:
        self._library = library
        self._x, self._ids, self._weights = x_TM, ids_Tk, weights_Tk

    def run(
        self,
        routed: _Matrices,
        shared: SharedExpert | None,
        tokens: int,
        *,
        alpha: float,
        limit: float,
        factor: float,
    ) -> Tensor:
        (num_tokens, top_k), width = self._ids.shape, self._x.shape[1]
        num_experts, twice_inner, _ = _elements(routed.gate_up).shape
        inner, num_pairs = twice_inner // 2, num_tokens * top_k
        blocks = group_pairs(self._ids, num_experts, tokens)
        rows = num_pairs + num_tokens * (shared is not None)
        device = self._x.device
        hidden = torch.empty(rows, inner, dtype=self._x.dtype, device=device)
        results = torch.empty(rows, width, dtype=torch.float32, device=device)
        out = torch.empty_like(self._x, memory_format=torch.contiguous_format)
        own = None if shared is None else _Matrices(shared.gate_up_fM, shared.down_MF)
        # the shared expert rides in the routed ones' launches while it is no more blocks than two
        own_tokens = tokens if num_tokens <= 2 * tokens else _block_of(num_tokens)
        common = FewArgs(
            pairs=blocks.pairs.data_ptr(),
            experts=blocks.experts.data_ptr(),
            weights=self._weights.data_ptr(),
            alpha=alpha,
            limit=limit,
            factor=factor,
            num_pairs=num_pairs,
            num_tokens=num_tokens if own is not None else 0,
            top_k=top_k,
        )
        own_blocks = 0 if own is None else -(-num_tokens // own_tokens)
        launches = [(blocks.max_blocks, own_blocks, tokens)]
        if own is not None and own_tokens != tokens:
            launches = [(0, own_blocks, own_tokens), (blocks.max_blocks, 0, tokens)]
        for mode in (Mode.UP, Mode.DOWN):
            is_up = mode is Mode.UP
            source, target = (self._x, hidden) if is_up else (hidden, results)
            common.x, common.x_row = source.data_ptr(), source.stride(0)
            common.out, common.width = target.data_ptr(), source.shape[1]
            common.outputs = target.shape[1]
            common.elements, common.scales = _pointers(routed.gate_up if is_up else routed.down)
            if own is not None:
                pointers = _pointers(own.gate_up if is_up else own.down)
                common.shared_elements, common.shared_scales = pointers
            for routed_blocks, shared_blocks, block_tokens in launches:
                common.shared_blocks = shared_blocks
                common.num_blocks = shared_blocks + routed_blocks
                self._library.few(common, block_tokens, mode)
        combine(results, self._ids, out, has_shared=own is not None)
        return out


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


def _serves(x_TM: Tensor, gate_up: Weight, down: Weight) -> bool:
    columns = MXFP8_COLUMNS if isinstance(gate_up, Mxfp8Weight) else PLAIN_COLUMNS
    widths = (_elements(gate_up).shape[-1], _elements(down).shape[-1])
    return (
        x_TM.dtype == torch.bfloat16
        and _aligned(x_TM)
        and isinstance(gate_up, Mxfp8Weight) == isinstance(down, Mxfp8Weight)
        and not any(width % columns for width in widths)
    )
