"""Steps of many sizes, run before requests come: what is compiled at first use is compiled here.

Kernels are made for a step's size: how many rows, how long the longest sequence, whether a number
divides by sixteen. A size that is met for the first time costs seconds, once for each machine,
since compilers keep what they made.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from m3stack.batch import DeviceBatch
from m3stack.cache.pool import KvPool, PageShape
from m3stack.dry_run import STAND_IN_PAGES
from m3stack.kernels.interface import HostLengths, PagedRows
from m3stack.models.minimax_m3.model import M3Model

_log = logging.getLogger(__name__)

BUDGET_S = 120.0
DECODE_ROWS = (1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# tiles change between powers of two; numbers that divide by sixteen are compiled apart
PROMPT_TOKENS = tuple(
    size + offset
    for power in range(1, 15)
    for size in ((1 << power), 3 << (power - 1))
    for offset in (0, 1, 5, 16)
)
# of a prompt
ROWS_BESIDE = 300
CONTEXTS = (500, 2048, 8192, 65_536, 100_000, 1_048_576)


@dataclass(frozen=True, slots=True)
class StepSize:
    """A step: rows of each sequence, and the length of the longest."""

    rows: tuple[int, ...]
    context_tokens: int


def sizes(
    *, max_tokens: int, max_sequences: int, context_tokens: int, max_mixed_tokens: int = 0
) -> Iterator[StepSize]:
    """Sizes of steps as they occur, those first that are missed most where time ends before them.

    Args:
        max_tokens, max_mixed_tokens: of a step, and of one with a prompt beside others; 0: as many.
        max_sequences: that run at once.
        context_tokens: of the longest sequence.
    """
    contexts = sorted({min(context, context_tokens) for context in CONTEXTS})
    most = min(max_tokens, context_tokens)
    mixed = min(most, max_mixed_tokens or max_tokens)
    # everyone waits for a step of next tokens alone; prompts of any size come close to one of these
    for context in contexts:
        for count in (*(n for n in DECODE_ROWS if n < max_sequences), max_sequences):
            yield StepSize((1,) * count, context)
    longest = contexts[len(contexts) // 2]
    prompts = sorted({min(tokens, most) for tokens in (*PROMPT_TOKENS, most)})
    coarse = [tokens for tokens in prompts if tokens == most or tokens.bit_count() == 1]
    for tokens in (*coarse, *(tokens for tokens in prompts if tokens not in coarse)):
        # one token is decode, and came above
        if tokens == 1:
            continue
        # behind nothing, behind something cached, and beside two that decode
        yield StepSize((tokens,), tokens)
        longer = min(context_tokens, max(longest, 2 * tokens))
        if tokens < longer:
            yield StepSize((tokens,), longer)
        # three such rows are decode, and came above
        if 3 < tokens <= mixed and max_sequences > 2:
            yield StepSize((1, 1, tokens - 2), longer)
    # rows beside a prompt are divided by how many there are; two came above
    beside = min(ROWS_BESIDE, context_tokens)
    for count in DECODE_ROWS:
        if count != 2 and count < max_sequences and 1 < beside <= mixed - count:
            yield StepSize((*(1,) * count, beside), max(beside, longest))


def with_layers(model: M3Model, numbers: Sequence[int]) -> M3Model:
    """The same weights, only some of the layers."""
    config = model.config
    part = copy.copy(model)
    part._modules = dict(model._modules)
    part.layers = torch.nn.ModuleList(model.layers[number] for number in numbers)
    part.config = replace(
        config,
        num_layers=len(numbers),
        sparse_layers=tuple(config.sparse_layers[number] for number in numbers),
        moe_layers=tuple(config.moe_layers[number] for number in numbers),
    )
    return part


def one_of_each_kind(model: M3Model) -> M3Model:
    """The first layer of every kind: all others run the same kernels."""
    config = model.config
    kinds = list(zip(config.sparse_layers, config.moe_layers, strict=True))
    return with_layers(model, [kinds.index(kind) for kind in dict.fromkeys(kinds)])


def step_of(model: M3Model, size: StepSize, num_pages: int) -> DeviceBatch:
    """A step of a size over a few pages that stand for all; what it computes is noise."""
    device, page_tokens = model.embedding.device, model.config.block_tokens
    width = -(-size.context_tokens // page_tokens)
    table_J = (torch.arange(width, device=device) % num_pages).to(torch.int32)
    starts = [0]
    for count in size.rows:
        starts.append(starts[-1] + count)
    positions_T = torch.cat(
        [
            torch.arange(size.context_tokens - min(count, size.context_tokens), size.context_tokens)
            for count in size.rows
        ]
    ).to(device)
    pages_T = table_J[positions_T // page_tokens].to(torch.int64)
    count = len(size.rows)
    starts_S1 = torch.tensor(starts, dtype=torch.int32)
    lens_S = torch.full((count,), size.context_tokens, dtype=torch.int32)
    return DeviceBatch(
        token_ids_T=torch.zeros(starts[-1], dtype=torch.int64, device=device),
        positions_T=positions_T,
        slots_T=pages_T * page_tokens + positions_T % page_tokens,
        rows=PagedRows(
            query_start_S1=starts_S1.to(device),
            seq_lens_S=lens_S.to(device),
            page_table_SJ=table_J.repeat(count, 1),
            max_query_len=max(size.rows),
            max_seq_len=size.context_tokens,
            host=HostLengths(starts_S1, lens_S),
        ),
        sample_rows_S=torch.tensor(starts[1:], device=device) - 1,
        media=(),
    )


@dataclass(frozen=True, slots=True)
class Bounds:
    """When steps are not to be gone on with; asked before each of them.

    Attributes:
        budget_s: after that long no further size is begun.
        check: may raise to end them.
        agree: gives every rank the leading one's word on whether to go on; ranks run the same
            sizes, since their steps meet in collectives.
        clock: seconds, monotonic.
    """

    budget_s: float = BUDGET_S
    check: Callable[[], None] = lambda: None
    agree: Callable[[bool], bool] = lambda goes_on: goes_on
    clock: Callable[[], float] = time.monotonic


@torch.inference_mode()
def run_first_steps(
    model: M3Model, shape: PageShape, wanted: Sequence[StepSize], bounds: Bounds | None = None
) -> int:
    """Runs one step of each size through a layer of each kind, over pages that are given back.

    Args:
        shape: of the whole model's pages.

    What they took of the device's memory is free again, and held by the allocator.

    Returns:
        How many were run.
    """
    bounds = bounds or Bounds()
    clock = bounds.clock
    device, began_at, count = model.embedding.device, clock(), 0
    _log.info("first_steps_begun sizes=%d budget_s=%g", len(wanted), bounds.budget_s)
    model = one_of_each_kind(model)
    shape = replace(shape, sparse_layers=model.config.sparse_layers)
    pool = KvPool(shape, STAND_IN_PAGES, device)
    for layer in pool.layers:
        for tensor in (layer.k_PGBD, layer.v_PGBD, layer.index_k_PBD):
            if tensor is not None:
                tensor.zero_()
    for size in wanted:
        try:
            bounds.check()
        except BaseException:
            bounds.agree(False)
            raise
        if not bounds.agree(clock() - began_at <= bounds.budget_s):
            break
        model(step_of(model, size, STAND_IN_PAGES), pool.layers)
        if device.type == "cuda":
            # a size that does not fit is to be seen here
            torch.cuda.synchronize(device)
        count += 1
    seconds = clock() - began_at
    _log.info("first_steps sizes=%d of=%d seconds=%.1f", count, len(wanted), seconds)
    return count
