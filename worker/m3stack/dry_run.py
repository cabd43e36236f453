"""What the largest step takes beside weights and pages: run once, before pages get the rest."""

from __future__ import annotations

import logging
from itertools import accumulate

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
    """A step of `num_tokens` of prompts at the end of a context, over far too few pages.

    One prompt's where a context holds as many; else whole prompts, of a context each but the last,
    all of which choose a token. Every page number is one of the `num_pages`; what the step computes
    is noise.
    """
    device, page_tokens = model.embedding.device, model.config.block_tokens
    assert num_tokens > 0
    assert context_tokens > 0
    whole, rest = divmod(num_tokens, context_tokens)
    counts = [context_tokens] * whole + [rest] * (rest > 0)
    # a prompt alone has all of the context before it, one behind others nothing
    lengths = [context_tokens] if len(counts) == 1 else counts
    width = -(-max(lengths) // page_tokens)
    positions_T = torch.cat(
        [
            torch.arange(length - count, length, device=device)
            for count, length in zip(counts, lengths, strict=True)
        ]
    )
    table_J = (torch.arange(width, device=device) % num_pages).to(torch.int32)
    pages_T = table_J[positions_T // page_tokens].to(torch.int64)
    starts_S1 = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    return DeviceBatch(
        token_ids_T=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions_T=positions_T,
        slots_T=pages_T * page_tokens + positions_T % page_tokens,
        rows=PagedRows(
            query_start_S1=starts_S1.to(device),
            seq_lens_S=torch.tensor(lengths, dtype=torch.int32, device=device),
            page_table_SJ=table_J.repeat(len(counts), 1),
            max_query_len=max(counts),
            max_seq_len=max(lengths),
        ),
        sample_rows_S=starts_S1[1:].to(device, torch.int64) - 1,
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
