"""The operations that Triton serves, by name; importing this needs Triton."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from m3stack.kernels.attention import with_triton as attention
from m3stack.kernels.interface import LayerPages, PagedRows
from m3stack.kernels.moe.with_triton import TritonExperts
from m3stack.kernels.msa.decode.fp8_pages import Fp8Pages
from m3stack.kernels.msa.decode.with_triton import TritonDecode
from m3stack.kernels.msa.prefill import with_triton as prefill
from m3stack.kernels.msa.prefill.widened_pages import block_attention_fp8, pays_to_widen
from m3stack.kernels.pointwise import with_triton as pointwise
from m3stack.kernels.quantised import with_triton as quantised
from m3stack.kernels.shape import KernelShape

# query rows of a sequence up to which one program takes all rows of a page
MAX_DECODE_ROWS = 8


class TritonMsa:
    """Block choice and block attention: the decode form for few rows a sequence, else prefill."""

    def __init__(self) -> None:
        self._decode = TritonDecode()

    def choose_blocks(
        self,
        index_q_TGD: Tensor,
        index_k_PBD: Tensor,
        rows: PagedRows,
        num_blocks: int,
        num_local_blocks: int,
        _index_copy_PX: Tensor | None = None,
    ) -> Tensor:
        """See `interface.ChooseBlocks`; reads no copy."""
        few = rows.max_query_len <= MAX_DECODE_ROWS
        run = self._decode.choose_blocks if few else prefill.choose_blocks
        return run(index_q_TGD.contiguous(), index_k_PBD, rows, num_blocks, num_local_blocks)

    def block_attention(
        self, q_THD: Tensor, pages: LayerPages, blocks_GTK: Tensor, rows: PagedRows, scale: float
    ) -> Tensor:
        """See `interface.BlockAttention`."""
        few = rows.max_query_len <= MAX_DECODE_ROWS
        run = self._decode.block_attention if few else prefill.block_attention
        q_THD = q_THD.contiguous()
        is_fp8 = pages.k_PGBD.dtype == torch.float8_e4m3fn
        if not is_fp8 or not pays_to_widen(rows, pages.k_PGBD.shape[2]):
            return run(q_THD, pages, blocks_GTK, rows, scale)
        fp8 = Fp8Pages(pages.k_PGBD, pages.v_PGBD, None, None)
        return block_attention_fp8(run, q_THD, fp8, blocks_GTK, rows, scale)


def paged_attention(q_THD: Tensor, pages: LayerPages, rows: PagedRows, scale: float) -> Tensor:
    """See `interface.PagedAttention`."""
    return attention.paged_attention(q_THD.contiguous(), pages, rows, scale)


def triton_operations(shape: KernelShape, device: torch.device) -> dict[str, Callable]:
    """Operation name of `interface.Kernels` to implementation."""
    msa, experts = TritonMsa(), TritonExperts(device, experts=shape.experts)
    return {
        "gemma_norm": pointwise.gemma_norm,
        "swiglu_oai": pointwise.swiglu_oai,
        "attention_prologue": pointwise.attention_prologue,
        "paged_attention": paged_attention,
        "choose_blocks": msa.choose_blocks,
        "block_attention": msa.block_attention,
        "route_tokens": experts.route_tokens,
        "run_experts": experts.run_experts,
        "linear_mxfp8": quantised.linear_mxfp8,
    }
