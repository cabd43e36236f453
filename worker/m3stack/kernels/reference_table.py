"""The `Kernels` table of plain torch: runs anywhere, and defines what the others must give."""

from __future__ import annotations

from m3stack.kernels.attention import reference as attention
from m3stack.kernels.interface import Kernels
from m3stack.kernels.moe import reference as moe
from m3stack.kernels.msa import candidates
from m3stack.kernels.msa import reference as msa
from m3stack.kernels.pointwise import reference as pointwise
from m3stack.kernels.quantised import reference as quantised


def reference_kernels() -> Kernels:
    """Every operation by its reference."""
    return Kernels(
        name="reference",
        gemma_norm=pointwise.gemma_norm,
        swiglu_oai=pointwise.swiglu_oai,
        attention_prologue=pointwise.attention_prologue,
        varlen_attention=attention.varlen_attention,
        paged_attention=attention.paged_attention,
        choose_blocks=msa.choose_blocks,
        choose_candidates=candidates.choose_candidates,
        merge_candidates=candidates.merge_candidates,
        block_attention=msa.block_attention,
        route_tokens=moe.route_tokens,
        run_experts=moe.run_experts,
        linear_mxfp8=quantised.linear_mxfp8,
    )
