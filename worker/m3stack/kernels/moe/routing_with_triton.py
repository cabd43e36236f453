"""Expert routing in one Triton kernel: fp32 logits, sigmoid, choice, normalised weights.

Few tokens are spread over the GPU by splitting the model width. The program that finishes a tile of
tokens last adds the parts up, in a fixed order, and chooses; so results do not depend on timing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# fewest tokens the matrix product takes at once, and most of a tile
MIN_TOKENS, MAX_TOKENS = 16, 32
COLUMNS = 64
# programs that fill a GPU of about 130 processors
TARGET_PROGRAMS = 132


@triton.jit
def _ordered(value):
    """int32 that orders as fp32 does, with -0 equal to +0 and NaN above all."""
    value = tl.where(value == 0.0, 0.0, value)
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(value != value, 0x7FFFFFFF, bits)


@triton.jit
def _choose(
    logits, bias, ids, weights, token, num_tokens,
    EXPERTS: tl.constexpr, TILE_E: tl.constexpr, CHOSEN: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Top experts of a tile of tokens [T, E], best first, ties to the lower id."""
    expert, place = tl.arange(0, TILE_E), tl.arange(0, TILE_K)
    score = tl.sigmoid(logits)
    biased = score + tl.load(bias + expert, mask=expert < EXPERTS, other=0.0)[None, :]
    # the lower id has the higher tail; experts that do not exist come last
    order = (_ordered(biased).to(tl.int64) << 32) + (TILE_E - expert)[None, :]
    order = tl.where((expert < EXPERTS)[None, :], order, -0x7FFFFFFFFFFFFFFF)
    picked = tl.zeros([token.shape[0], TILE_K], tl.int32)
    share = tl.zeros([token.shape[0], TILE_K], tl.float32)
    for rank in tl.static_range(CHOSEN):
        best = tl.max(order, 1)
        best_id = (TILE_E - (best & 0xFFFFFFFF)).to(tl.int32)
        is_best = expert[None, :] == best_id[:, None]
        value = tl.sum(tl.where(is_best, score, 0.0), 1)
        picked = tl.where(place[None, :] == rank, best_id[:, None], picked)
        share = tl.where(place[None, :] == rank, value[:, None], share)
        order = tl.where(is_best, -0x7FFFFFFFFFFFFFFF, order)
    share = share / tl.sum(share, 1)[:, None]
    to = token[:, None].to(tl.int64) * CHOSEN + place[None, :]
    keep = (token < num_tokens)[:, None] & (place < CHOSEN)[None, :]
    tl.store(ids + to, picked, mask=keep)
    tl.store(weights + to, share, mask=keep)


@triton.jit
def _route_kernel(
    x, router, bias, ids, weights, partial, arrived,
    num_tokens, x_row,
    WIDTH: tl.constexpr, EXPERTS: tl.constexpr, TILE_E: tl.constexpr, CHOSEN: tl.constexpr,
    TILE_K: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    token, expert = tile * TOKENS + tl.arange(0, TOKENS), tl.arange(0, TILE_E)
    is_token, is_expert = token < num_tokens, expert < EXPERTS
    span: tl.constexpr = tl.cdiv(tl.cdiv(WIDTH, COLUMNS), SPLITS) * COLUMNS
    logits = tl.zeros([TOKENS, TILE_E], tl.float32)
    for start in range(0, span, COLUMNS):
        column = split * span + start + tl.arange(0, COLUMNS)
        inside = column < WIDTH
        rows = tl.load(
            x + token[:, None].to(tl.int64) * x_row + column[None, :],
            mask=is_token[:, None] & inside[None, :],
            other=0.0,
        )
        gates = tl.load(
            router + expert[:, None] * WIDTH + column[None, :],
            mask=is_expert[:, None] & inside[None, :],
            other=0.0,
        )
        logits = tl.dot(rows.to(tl.float32), tl.trans(gates), logits, input_precision="ieee")
    if SPLITS == 1:
        _choose(logits, bias, ids, weights, token, num_tokens, EXPERTS, TILE_E, CHOSEN, TILE_K)
    else:
        line = (tile * TOKENS + tl.arange(0, TOKENS))[:, None] * TILE_E + expert[None, :]
        part = tl.num_programs(0) * TOKENS * TILE_E
        tl.store(partial + split * part + line, logits)
        # all of the tile is written before it is counted
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros([TOKENS, TILE_E], tl.float32)
            for other in range(SPLITS):
                # past L1, which may hold an older step's values
                total += tl.load(partial + other * part + line, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
            _choose(total, bias, ids, weights, token, num_tokens, EXPERTS, TILE_E, CHOSEN, TILE_K)


class TritonRouter:
    """Routing for one device; keeps the counters that programs of a launch meet at.

    Counters are zero between launches. Launches must not overlap: one stream at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._arrived = torch.zeros(TARGET_PROGRAMS, dtype=torch.int32, device=device)

    def route_tokens(
        self, x_TM: Tensor, router_EM: Tensor, bias_E: Tensor, top_k: int
    ) -> tuple[Tensor, Tensor]:
        """Chooses and weighs each token's experts; see `interface.RouteTokens`.

        NaN ranks as in the reference.
        """
        num_tokens, width = x_TM.shape
        num_experts = router_EM.shape[0]
        assert router_EM.is_contiguous(), "router rows must stand back to back"
        assert x_TM.stride(1) == 1, "token rows must be dense"
        ids = torch.empty(num_tokens, top_k, dtype=torch.int32, device=x_TM.device)
        weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=x_TM.device)
        if num_tokens == 0:
            return ids, weights
        tokens = MIN_TOKENS if num_tokens <= MIN_TOKENS * TARGET_PROGRAMS else MAX_TOKENS
        tiles = triton.cdiv(num_tokens, tokens)
        splits = max(1, min(TARGET_PROGRAMS // tiles, triton.cdiv(width, COLUMNS)))
        tile_e = max(MIN_TOKENS, triton.next_power_of_2(num_experts))
        partial = weights
        if splits > 1:
            size = (splits, tiles * tokens, tile_e)
            partial = torch.empty(size, dtype=torch.float32, device=x_TM.device)
        _route_kernel[(tiles, splits)](
            x_TM, router_EM, bias_E, ids, weights, partial, self._arrived,
            num_tokens, x_TM.stride(0),
            WIDTH=width, EXPERTS=num_experts, TILE_E=tile_e, CHOSEN=top_k,
            TILE_K=triton.next_power_of_2(top_k), TOKENS=tokens, COLUMNS=COLUMNS, SPLITS=splits,
            num_warps=4,
        )  # fmt: skip
        return ids, weights
