"""Dense causal prefill over the same pages, to compare with: FlashInfer FA3, else SDPA."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from m3stack.bench.kernels.batches import BLOCK_TOKENS, HEAD_DIM, MsaBatch
from m3stack.bench.kernels.harness import Call

WORKSPACE_BYTES = 256 << 20


def dense_prefill_calls(batch: MsaBatch, scale: float) -> tuple[Sequence[Call], str]:
    """Dense attention of a batch of one sequence, and a note that names who computes it."""
    if importlib.util.find_spec("flashinfer") is not None:
        return [_flashinfer(batch, scale)], "dense: FlashInfer FA3, paged"
    return [_sdpa(batch, scale)], "dense: torch SDPA flash, contiguous keys (no FlashInfer here)"


def _flashinfer(batch: MsaBatch, scale: float) -> Call:
    wrapper = importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"), "HND", backend="fa3"
    )
    rows, pages = batch.rows, batch.pages
    num_pages = -(-rows.max_seq_len // BLOCK_TOKENS)
    wrapper.plan(
        rows.query_start_S1,
        torch.tensor([0, num_pages], dtype=torch.int32, device="cuda"),
        rows.page_table_SJ[0, :num_pages].contiguous(),
        torch.tensor([(rows.max_seq_len - 1) % BLOCK_TOKENS + 1], dtype=torch.int32),
        batch.q_THD.shape[1],
        batch.groups,
        HEAD_DIM,
        BLOCK_TOKENS,
        causal=True,
        sm_scale=scale,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    return partial(wrapper.run, batch.q_THD, (pages.k_PGBD, pages.v_PGBD))


def _sdpa(batch: MsaBatch, scale: float) -> Call:
    rows = batch.rows
    table_J = rows.page_table_SJ[0, : -(-rows.max_seq_len // BLOCK_TOKENS)].long()

    def contiguous(pool_PGBD: Tensor) -> Tensor:
        return pool_PGBD[table_J].transpose(0, 1).flatten(1, 2)[None, :, : rows.max_seq_len]

    q, k, v = (
        batch.q_THD.transpose(0, 1)[None],
        contiguous(batch.pages.k_PGBD),
        contiguous(batch.pages.v_PGBD),
    )
    mask = causal_lower_right(q.shape[2], k.shape[2])

    def run() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)

    return run
