"""What the largest step takes beside weights and pages: run once, before pages get the rest."""

from __future__ import annotations

import logging

import torch

from m3stack.batch import DeviceBatch, PatchBatch
from m3stack.cache.pool import KvPool, PageShape
from m3stack.kernels.interface import PagedRows
from m3stack.models.minimax_m3.model import M3Model

_log = logging.getLogger(__name__)

# pages that stand for all of a long context: which one is read does not change what it takes
STAND_IN_PAGES = 8


def largest_step(
    model: M3Model, *, num_tokens: int, context_tokens: int, num_pages: int
) -> DeviceBatch:
    """A prompt's step of `num_tokens` at the end of a context, over far too few pages.

    Every page number of the context is one of the `num_pages`; what the step computes is noise.
    """
    device, page_tokens = model.embedding.device, model.config.block_tokens
    assert num_tokens <= context_tokens
    width = -(-context_tokens // page_tokens)
    positions_T = torch.arange(context_tokens - num_tokens, context_tokens, device=device)
    table_SJ = (torch.arange(width, device=device) % num_pages).to(torch.int32)[None]
    pages_T = table_SJ[0, positions_T // page_tokens].to(torch.int64)
    return DeviceBatch(
        token_ids_T=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions_T=positions_T,
        slots_T=pages_T * page_tokens + positions_T % page_tokens,
        rows=PagedRows(
            query_start_S1=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
            seq_lens_S=torch.tensor([context_tokens], dtype=torch.int32, device=device),
            page_table_SJ=table_SJ,
            max_query_len=num_tokens,
            max_seq_len=context_tokens,
        ),
        sample_rows_S=torch.tensor([num_tokens - 1], device=device),
        media=(),
    )


def largest_encode(model: M3Model, num_patches: int) -> PatchBatch:
    """One still of about that many patches."""
    vision = model.config.vision
    side = max(vision.merge_size, int(num_patches**0.5) // vision.merge_size * vision.merge_size)
    row_bytes = vision.num_channels * vision.patch_size**2
    patches = torch.zeros(
        (side * side, row_bytes), dtype=torch.uint8, device=model.embedding.device
    )
    mean = (0.5,) * vision.num_channels
    return PatchBatch((patches,), (1,), ((1, side, side),), mean, mean)


@torch.inference_mode()
def run_largest_step(
    model: M3Model,
    shape: PageShape,
    *,
    num_tokens: int,
    context_tokens: int,
    num_patches: int,
) -> int:
    """Runs it, and the largest encode, with pages that are given back.

    Returns:
        Bytes of GPU memory it took at its peak; 0 on a CPU, which says nothing about that.
    """
    device = model.embedding.device
    pool = KvPool(shape, STAND_IN_PAGES, device)
    for layer in pool.layers:
        for tensor in (layer.k_PGBD, layer.v_PGBD, layer.index_k_PBD):
            if tensor is not None:
                tensor.zero_()
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if is_cuda else 0
    batch = largest_step(
        model, num_tokens=num_tokens, context_tokens=context_tokens, num_pages=STAND_IN_PAGES
    )
    model(batch, pool.layers)
    model.encode_media(largest_encode(model, num_patches))
    if not is_cuda:
        return 0
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del pool, batch
    torch.cuda.empty_cache()
    _log.info(
        "dry_run step_tokens=%d context_tokens=%d patches=%d peak_bytes=%d",
        num_tokens,
        context_tokens,
        num_patches,
        peak,
    )
    return peak
