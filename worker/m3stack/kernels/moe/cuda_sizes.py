"""Which sm_90a kernel serves how many tokens, and in blocks of how many: by sizes alone.

What was fastest was measured: `docs/bench/moe-h200.md`.
"""

from __future__ import annotations

from enum import StrEnum

from m3stack.kernels.moe.cuda_library import FEW_TOKENS, MANY_TOKENS, SOME_TOKENS

# tokens of the ring's blocks are cut in these steps
TOKEN_STEP = 16


class Path(StrEnum):
    """What computes a layer's experts."""

    FEW = "few"
    SOME = "some"
    MANY = "many"
    TRITON = "triton"


def choose_path(num_tokens: int, num_pairs: int, num_experts: int, *, is_mxfp8: bool) -> Path:
    """What was fastest, by the pairs an expert of any rank has on average: by sizes alone."""
    average = num_pairs / num_experts
    if is_mxfp8:
        # a lone token needs no sorting, and blocks of eight are the smallest that tokens need
        if average <= 0.25 and num_tokens > 1:
            return Path.FEW
        return Path.SOME if average <= 40 else Path.MANY
    if num_tokens <= 4:
        return Path.FEW
    # Triton reads bf16 weights at the memory's full speed, and one step of it serves any number
    return Path.TRITON if average <= 24 else Path.MANY


def few_block_tokens(num_pairs: int, num_experts: int) -> int:
    """Tokens of a block of few by the pairs an expert of any rank has on average.

    A block more of an expert reads its weights again, so blocks hold about the average and two
    deviations of random routing.
    """
    average = num_pairs / num_experts
    return next((tokens for most, tokens in ((3, 8), (9, 16)) if average <= most), 32)


def some_block_tokens(num_pairs: int, num_experts: int) -> int:
    """Tokens of a block of some, likewise: blocks of 32 leave a processor room for two."""
    return SOME_TOKENS[num_pairs > 16 * num_experts]


def box_tokens(average: float, most: int) -> int:
    """Tokens of one copy into a block of the ring: few where blocks hold fewer than they could."""
    if most != MANY_TOKENS:
        return 8 if average <= 12 else 16
    return 144 if average > 192 else 48


def block_of(num_tokens: int) -> int:
    """The smallest block that holds them, or the largest there is."""
    return next((size for size in FEW_TOKENS if size >= num_tokens), FEW_TOKENS[-1])


def own_block(num_tokens: int, most: int) -> int:
    """Tokens of a block of the shared expert: none above `most`, all about as many."""
    blocks = -(-num_tokens // most)
    size = -(-num_tokens // blocks)
    return -(-size // TOKEN_STEP) * TOKEN_STEP
