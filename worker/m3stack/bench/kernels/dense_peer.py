"""Dense attention over the whole context by a library, on the same inputs: the comparison."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from m3stack.bench.kernels.batches import MsaBatch
from m3stack.bench.kernels.harness import Call, require_close
from m3stack.kernels.attention.with_flashinfer import plan_decode, require_flashinfer
from m3stack.kernels.build import KernelUnavailableError

# a contiguous copy of the pools for the torch peer must stay affordable
MAX_TORCH_PEER_BYTES = 8 << 30


def dense_decode_calls(batches: Sequence[MsaBatch], scale: float) -> dict[str, list[Call]]:
    """Dense decode on every input set: FlashInfer as `dense`, or torch as `dense_torch_sdpa`.

    Args:
        batches: input sets with the same rows, one query row a sequence, equal lengths.
        scale: softmax scale.

    Raises:
        CheckError: the peer disagrees with a plain softmax on one sequence.
    """
    try:
        require_flashinfer("dense decode")
    except KernelUnavailableError:
        return _torch_calls(batches, scale)
    first = batches[0]
    decode = plan_decode(first.q_THD, first.pages, first.rows, scale)
    output = decode(first.q_THD, first.pages)
    require_close(
        output[:1], dense_output(first, scale), limit=1e-2, what="dense peer on sequence 0"
    )
    return {"dense": [partial(decode, batch.q_THD, batch.pages) for batch in batches]}


def dense_output(batch: MsaBatch, scale: float) -> Tensor:
    """fp32 softmax attention of the first row over its whole sequence: [1, H, D]."""
    length = int(batch.rows.seq_lens_S[0])
    k_GnD, v_GnD = (
        _contiguous(pool, batch.rows.page_table_SJ[0])[:, :length].float()
        for pool in (batch.pages.k_PGBD, batch.pages.v_PGBD)
    )
    q_GhD = batch.q_THD[0].float().view(k_GnD.shape[0], -1, k_GnD.shape[-1])
    weights = (q_GhD @ k_GnD.mT * scale).softmax(-1)
    return (weights @ v_GnD).view(1, -1, k_GnD.shape[-1])


def _contiguous(pool_PGBD: Tensor, table_J: Tensor) -> Tensor:
    return pool_PGBD[table_J.long()].transpose(0, 1).flatten(1, 2)


def _torch_calls(batches: Sequence[MsaBatch], scale: float) -> dict[str, list[Call]]:
    pools = sum(2 * batch.pages.k_PGBD.numel() * 2 for batch in batches)
    if pools > MAX_TORCH_PEER_BYTES:
        return {}
    calls = []
    for batch in batches:
        tables = batch.rows.page_table_SJ
        k_SGnD, v_SGnD = (
            torch.stack([_contiguous(pool, table) for table in tables])
            for pool in (batch.pages.k_PGBD, batch.pages.v_PGBD)
        )
        q_SH1D = batch.q_THD[:, :, None]
        calls.append(
            partial(
                scaled_dot_product_attention, q_SH1D, k_SGnD, v_SGnD, scale=scale, enable_gqa=True
            )
        )
    return {"dense_torch_sdpa": calls}
