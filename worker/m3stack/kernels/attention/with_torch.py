"""Dense attention through torch's own fused kernels: what serves where FlashInfer is absent.

Reads lengths on the host, so it cannot be captured in a CUDA graph; `with_triton.py` can.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from m3stack.kernels.interface import LayerPages, PagedRows
from m3stack.kernels.paged_rows import sequences


def varlen_attention(
    q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, cu_seqlens: Tensor, max_len: int, scale: float
) -> Tensor:
    """Full attention within each packed row; see `interface.VarlenAttention`."""
    out_NHD = torch.empty_like(q_NHD)
    for first, last in pairwise(cu_seqlens.tolist()):
        if last > first:
            q, k, v = (x[None, first:last].transpose(1, 2) for x in (q_NHD, k_NHD, v_NHD))
            mixed = scaled_dot_product_attention(q, k, v, scale=scale)
            out_NHD[first:last] = mixed[0].transpose(0, 1)
    return out_NHD


def paged_attention(q_THD: Tensor, pages: LayerPages, rows: PagedRows, scale: float) -> Tensor:
    """Causal attention over every visible key; see `interface.PagedAttention`."""
    out_THD = torch.zeros_like(q_THD)
    for first, last, seq_len, table in sequences(rows, pages.k_PGBD.shape[2]):
        q_1HRD = q_THD[None, first:last].transpose(1, 2)
        k_1GnD, v_1GnD = (
            pool[table].transpose(0, 1).flatten(1, 2)[None, :, :seq_len]
            for pool in (pages.k_PGBD, pages.v_PGBD)
        )
        # the last row sees every key: the causal corner is the lower right one
        mask = None if last - first == 1 else causal_lower_right(last - first, seq_len)
        mixed = scaled_dot_product_attention(
            q_1HRD, k_1GnD, v_1GnD, attn_mask=mask, scale=scale, enable_gqa=True
        )
        out_THD[first:last] = mixed[0].transpose(0, 1)
    return out_THD
