"""The operations of each back end that needs a GPU, by name; imports what they are made of."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from m3stack.kernels.attention import with_flashinfer, with_torch
from m3stack.kernels.build import KernelUnavailableError
from m3stack.kernels.interface import LayerPages, PagedAttention, PagedRows
from m3stack.kernels.paged_rows import split_single_rows
from m3stack.kernels.shape import KernelShape

try:
    from m3stack.kernels import triton_table
    from m3stack.kernels.moe.with_cuda import CudaExperts
    from m3stack.kernels.msa.candidates_with_cuda import CandidateLibrary, CudaCandidates
    from m3stack.kernels.msa.with_cuda import CudaMsa
except ModuleNotFoundError as missing:  # an optional dependency, and nothing but it
    if missing.name != "triton":
        raise
    triton_table = None


def flashinfer_operations(shape: KernelShape, device: torch.device) -> dict[str, Callable]:
    """Dense attention by FlashInfer, decode steps by Triton where that is installed.

    Raises:
        KernelUnavailableError: it is not installed, or does not serve this model.
    """
    with_flashinfer.refuse_other_models(shape)
    dense = with_flashinfer.FlashInferAttention(device)
    paged_attention = dense.paged_attention
    if triton_table is not None:
        paged_attention = decode_apart(triton_table.paged_attention, dense.paged_attention)
    return {"varlen_attention": dense.varlen_attention, "paged_attention": paged_attention}


def decode_apart(decode: PagedAttention, other: PagedAttention) -> PagedAttention:
    """One operation of two: `decode` for sequences of one row, `other` for longer ones.

    FlashInfer plans on the host, which cannot be part of a CUDA graph, and its tiles of 128 rows
    hold one row of such a sequence: behind long contexts those rows then take longer than the
    prompts beside them. They stand first in a step; where the host does not know its lengths, a
    step that has both is left to `other`.
    """
    # all layers of a step come with the same rows, and a plan belongs to the rows it was made for
    latest: tuple[PagedRows, tuple[int, PagedRows, PagedRows] | None] | None = None

    def paged_attention(q_THD: Tensor, pages: LayerPages, rows: PagedRows, scale: float) -> Tensor:
        nonlocal latest
        if rows.max_query_len == 1:
            return decode(q_THD, pages, rows, scale)
        if latest is None or latest[0] is not rows:
            latest = rows, split_single_rows(rows)
        if latest[1] is None:
            return other(q_THD, pages, rows, scale)
        count, single, longer = latest[1]
        return torch.cat(
            [
                decode(q_THD[:count], pages, single, scale),
                other(q_THD[count:], pages, longer, scale),
            ]
        )

    return paged_attention


def cuda_operations(shape: KernelShape, device: torch.device) -> dict[str, Callable]:
    """Sparse attention and experts by our own kernels, what those leave over by Triton.

    Raises:
        KernelUnavailableError: no compiler or Triton, or a model or device they are not for.
    """
    if triton_table is None:
        raise KernelUnavailableError("back end cuda needs triton beside it (pip install triton)")
    msa, experts = CudaMsa(shape), CudaExperts(device, experts=shape.experts)
    candidates = CudaCandidates(CandidateLibrary(), msa.decode, msa.prefill)
    return {
        "choose_blocks": msa.choose_blocks,
        "choose_candidates": candidates.choose_candidates,
        "merge_candidates": candidates.merge_candidates,
        "block_attention": msa.block_attention,
        "route_tokens": experts.route_tokens,
        "run_experts": experts.run_experts,
        "linear_mxfp8": experts.linear_mxfp8,
    }


def triton_operations(shape: KernelShape, device: torch.device) -> dict[str, Callable]:
    """What Triton serves; see `triton_table`.

    Raises:
        KernelUnavailableError: it is not installed.
    """
    if triton_table is None:
        raise KernelUnavailableError("back end triton is not installed (pip install triton)")
    return triton_table.triton_operations(shape, device)


def torch_operations() -> dict[str, Callable]:
    """Dense attention by torch's own fused kernels."""
    return {
        "varlen_attention": with_torch.varlen_attention,
        "paged_attention": with_torch.paged_attention,
    }
