"""MSA for prefill: many query rows a sequence, selections per row, tiles or blocks outermost.

`CudaPrefill` holds the sm_90a kernels; the two functions are the portable Triton form with the
same signatures.
"""

from m3stack.kernels.msa.prefill.with_triton import block_attention as block_attention_prefill
from m3stack.kernels.msa.prefill.with_triton import choose_blocks as choose_blocks_prefill

__all__ = ["block_attention_prefill", "choose_blocks_prefill"]
