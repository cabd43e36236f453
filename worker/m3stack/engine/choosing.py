"""Draws tokens from filtered distributions, each row by its own rules, in a total order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from m3stack.engine.transfer import to_device
from m3stack.types import Sampling

# the widest top-k for which picking the largest beats sorting the vocabulary
_NARROW_TOP_K = 256


def pick(logits_RV: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> Tensor:
    """Draws one id a row from the filtered distribution: int64 [R].

    Rows with a small top-k rank only that many tokens; the others need the whole order. Which of
    the two a row takes depends on itself alone, and so does its result.
    """
    narrow = [i for i, s in enumerate(samplings) if 0 < s.top_k <= _NARROW_TOP_K]
    wide = [i for i, s in enumerate(samplings) if not 0 < s.top_k <= _NARROW_TOP_K]
    picked_R = torch.empty(len(samplings), dtype=torch.int64, device=logits_RV.device)
    for indices in (narrow, wide):
        if not indices:
            continue
        rows = to_device(indices, logits_RV.device, torch.int64)
        rules = [samplings[index] for index in indices]
        largest = max(rule.top_k for rule in rules) if indices is narrow else None
        ids_RK, values_RK = rank_logits(logits_RV.index_select(0, rows), largest)
        place_R = _draw(values_RK, rules, [uniforms[index] for index in indices])
        picked_R.index_copy_(0, rows, ids_RK.gather(-1, place_R[:, None])[:, 0])
    return picked_R


def rank_logits(logits_RV: Tensor, count: int | None) -> tuple[Tensor, Tensor]:
    """The largest logits of each row, in a total order: descending, then by lower id.

    Args:
        logits_RV: fp32 [R, V].
        count: how many, K; None ranks all.

    Returns:
        Ids int64 [R, K] and logits fp32 [R, K].
    """
    width = logits_RV.shape[-1]
    if count is None or count >= width:
        order = logits_RV.sort(dim=-1, descending=True, stable=True)
        return order.indices, order.values
    # one integer key a token makes the order total: the float's bits as an ordered number above,
    # the reversed id below; adding 0 turns -0 into +0
    bits_RV = (logits_RV + 0.0).view(torch.int32)
    ordered_RV = torch.where(bits_RV < 0, bits_RV ^ 0x7FFFFFFF, bits_RV).to(torch.int64)
    reversed_V = torch.arange(width - 1, -1, -1, device=logits_RV.device)
    ids_RK = ((ordered_RV << 32) + reversed_V).topk(count, dim=-1).indices
    return ids_RK, logits_RV.gather(-1, ids_RK)


def _draw(values_RK: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> Tensor:
    """Draws a place in each row of descending logits: int64 [R]."""
    device = values_RK.device

    rules_5R = torch.tensor(
        [
            [sampling.temperature for sampling in samplings],
            [sampling.top_k or values_RK.shape[-1] for sampling in samplings],
            [sampling.top_p for sampling in samplings],
            [sampling.min_p for sampling in samplings],
            list(uniforms),
        ],
        dtype=torch.float64,
    )
    temperature, top_k, top_p, min_p, target = to_device(rules_5R, device)[:, :, None].unbind()
    exact_RK = values_RK.to(torch.float64)
    # shifted first, so that a tiny temperature cannot overflow
    weights_RK = ((exact_RK - exact_RK[:, :1]) / temperature).exp()
    rank_K = torch.arange(values_RK.shape[-1], device=device)
    weights_RK = weights_RK.masked_fill(rank_K >= top_k, 0)
    # a running sum, not `sum`: the zeros behind a row's own top-k must not change its rounding
    cumulative_RK = weights_RK.cumsum(-1)
    # a token stays if the mass before it is short of top_p; the first one always does
    mass_before_RK = (cumulative_RK - weights_RK) / cumulative_RK[:, -1:]
    # at top_p 1 rounding must not cut the tail
    is_cut_RK = (mass_before_RK >= top_p) & (rank_K > 0) & (top_p < 1)
    weights_RK = weights_RK.masked_fill(is_cut_RK, 0)
    weights_RK = weights_RK.masked_fill(weights_RK < min_p * weights_RK[:, :1], 0)
    cumulative_RK = weights_RK.cumsum(-1)
    target = target * cumulative_RK[:, -1:]
    place_R = torch.searchsorted(cumulative_RK, target, right=True)
    # rounding can push the target to the very end: stay on the last token that has weight; a row
    # of NaN has none, and is refused by the caller
    last_R = ((weights_RK > 0).sum(-1, keepdim=True) - 1).clamp(min=0)
    return torch.minimum(place_R, last_R)[:, 0]


def uniform(seed: int, output_index: int) -> float:
    """A number in [0, 1) that depends on seed and output index only, with 53 random bits."""
    counter = seed.to_bytes(8, "little") + output_index.to_bytes(8, "little")
    digest = hashlib.blake2b(counter, digest_size=8, person=b"m3stack sampler").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
