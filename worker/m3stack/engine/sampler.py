"""Logits to tokens and log-probabilities, each row by its own request's rules and seed.

A row's result depends on its logits, its request and its output index, never on the other rows:
every operation works along the vocabulary only, and randomness is a function of
(seed, output index).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from m3stack.engine.constraints import ConstraintBook, DeadEnd, Mask
from m3stack.engine.plan import Sampled
from m3stack.errors import ErrorKind
from m3stack.types import Constraint, Failed, Sampling, TokenLogprob

_NO_TOKEN = -1
# the widest top-k for which picking the largest beats sorting the vocabulary
_NARROW_TOP_K = 256


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A row of logits to choose from: whose it is, and which output token it gives."""

    handle: int
    output_index: int


@dataclass(slots=True)
class _Rules:
    """What the sampler keeps of a request.

    Attributes:
        sampling: as asked.
        bias_V: fp32, added to the logits; None if nothing is added.
        banned_V: bool, ids that are never sampled; None if there are none.
        stop_V: ids that must not be sampled before `min_tokens`; None if there are none.
        prompt_seen_V: bool, ids of the prompt; None unless a repetition penalty needs it.
        output_counts_V: fp32, occurrences in the output; None unless a penalty needs it.
    """

    sampling: Sampling
    bias_V: Tensor | None
    banned_V: Tensor | None
    stop_V: Tensor | None
    prompt_seen_V: Tensor | None
    output_counts_V: Tensor | None

    @property
    def changes_logits(self) -> bool:
        parts = (self.bias_V, self.banned_V, self.stop_V, self.output_counts_V)
        return any(part is not None for part in parts)


class Sampler:
    """Chooses tokens; owned by the runner.

    Log-probabilities are those of the model: of the logits as they come, before bias, penalties,
    temperature and filters. Filters act in the order top-k, top-p, min-p on the distribution after
    temperature, each on what the one before left. At temperature 0, and among equal logits, the
    lower id wins.

    Args:
        vocab_size: width of the logits.
        device: where they are.
        constraints: follows requests with a constraint; None where there cannot be any.
    """

    def __init__(
        self, vocab_size: int, device: torch.device, constraints: ConstraintBook | None = None
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._constraints = constraints
        self._rules: dict[int, _Rules] = {}

    def begin(
        self,
        handle: int,
        sampling: Sampling,
        *,
        prompt_token_ids: Sequence[int],
        stop_ids: frozenset[int],
        constraint: Constraint | None = None,
    ) -> None:
        """Prepares for a request; `stop_ids` are those that really end it."""
        counts = prompt_seen = None
        has_repetition = sampling.repetition_penalty != 1.0
        if has_repetition or sampling.presence_penalty or sampling.frequency_penalty:
            counts = torch.zeros(self._vocab_size, dtype=torch.float32, device=self._device)
        if has_repetition:
            prompt_seen = self._mask(sorted(set(prompt_token_ids)))
        bias = None
        if sampling.logit_bias:
            bias = torch.zeros(self._vocab_size, dtype=torch.float32, device=self._device)
            bias[list(sampling.logit_bias)] = torch.tensor(
                list(sampling.logit_bias.values()), dtype=torch.float32, device=self._device
            )
        stop = banned = None
        if constraint is None:
            stop = self._mask(sorted(stop_ids)) if sampling.min_tokens and stop_ids else None
            banned = self._banned(sampling)
        else:
            # its masks know of ends and bans, and where one has to give way to another
            assert self._constraints is not None
            self._constraints.begin(handle, constraint, sampling, end_ids=stop_ids)
        self._rules[handle] = _Rules(sampling, bias, banned, stop, prompt_seen, counts)

    def forget(self, handle: int) -> None:
        """Drops what `begin` made."""
        self._rules.pop(handle, None)
        if self._constraints is not None:
            self._constraints.forget(handle)

    def sample(
        self, logits_SV: Tensor, rows: Sequence[SampleRow]
    ) -> Mapping[int, Sampled | Failed]:
        """One token a row, by handle; Failed where logits or constraint allow no choice.

        Args:
            logits_SV: fp32 [S, V]; not changed.
            rows: one entry a row.
        """
        rules = [self._rules[row.handle] for row in rows]
        masks = {}
        if self._constraints is not None:
            masks = self._constraints.masks([row.handle for row in rows])
        adjusted_SV = self._adjust(logits_SV, rows, rules, masks)
        chosen_S = adjusted_SV.argmax(-1)
        random = [index for index, rule in enumerate(rules) if rule.sampling.temperature > 0]
        if random:
            picked = _pick(
                adjusted_SV[random],
                [rules[index].sampling for index in random],
                [_uniform(rules[i].sampling.seed, rows[i].output_index) for i in random],
            )
            chosen_S = chosen_S.index_copy(0, torch.tensor(random, device=self._device), picked)
        best_S = adjusted_SV.amax(-1)  # NaN if any entry is
        chosen_S = torch.where(best_S.isfinite(), chosen_S, _NO_TOKEN)
        for index, rule in enumerate(rules):
            if rule.output_counts_V is not None:
                rule.output_counts_V[chosen_S[index].clamp(min=0)] += 1
        logprobs = self._logprobs(logits_SV, chosen_S, rules)
        # the one copy to the host of a step
        token_ids = chosen_S.tolist()
        result: dict[int, Sampled | Failed] = {}
        for row, token_id, logprob in zip(rows, token_ids, logprobs, strict=True):
            mask = masks.get(row.handle)
            if isinstance(mask, DeadEnd):
                result[row.handle] = Failed(ErrorKind.INVALID_REQUEST, mask.message, mask.param)
            elif token_id == _NO_TOKEN:
                result[row.handle] = Failed(ErrorKind.INTERNAL, "the model gave no finite logits")
            else:
                result[row.handle] = Sampled(token_id, logprob)
                if mask is not None:
                    assert self._constraints is not None
                    self._constraints.took(row.handle, token_id, row.output_index)
        return result

    def _banned(self, sampling: Sampling) -> Tensor | None:
        if not (sampling.allowed_token_ids or sampling.banned_token_ids):
            return None
        banned_V = self._mask(sorted(sampling.banned_token_ids))
        if sampling.allowed_token_ids:
            banned_V |= ~self._mask(sorted(sampling.allowed_token_ids))
        return banned_V

    def _mask(self, token_ids: Sequence[int]) -> Tensor:
        mask = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
        mask[torch.tensor(token_ids, dtype=torch.int64, device=self._device)] = True
        return mask

    def _adjust(
        self,
        logits_SV: Tensor,
        rows: Sequence[SampleRow],
        rules: Sequence[_Rules],
        masks: Mapping[int, Mask | DeadEnd],
    ) -> Tensor:
        if not masks and not any(rule.changes_logits for rule in rules):
            return logits_SV
        adjusted_SV = logits_SV.clone()
        for index, (row, rule) in enumerate(zip(rows, rules, strict=True)):
            logits_V, sampling = adjusted_SV[index], rule.sampling
            if rule.output_counts_V is not None:
                _penalise(logits_V, rule)
            if rule.bias_V is not None:
                logits_V += rule.bias_V
            if rule.banned_V is not None:
                logits_V.masked_fill_(rule.banned_V, float("-inf"))
            if rule.stop_V is not None and row.output_index < sampling.min_tokens:
                logits_V.masked_fill_(rule.stop_V, float("-inf"))
        if masks:
            self._constrain(adjusted_SV, rows, masks)
        return adjusted_SV

    def _constrain(
        self, logits_SV: Tensor, rows: Sequence[SampleRow], masks: Mapping[int, Mask | DeadEnd]
    ) -> None:
        """Takes away, in place, what the rows' masks do not allow."""
        indices: list[int] = []
        chosen: list[Mask] = []
        for index, row in enumerate(rows):
            mask = masks.get(row.handle)
            if mask is not None and not isinstance(mask, DeadEnd):
                indices.append(index)
                chosen.append(mask)
        if not indices:
            return
        words_RW = torch.from_numpy(np.stack(chosen))
        if self._device.type == "cuda":
            words_RW = words_RW.pin_memory().to(self._device, non_blocking=True)
        bit_32 = torch.arange(32, dtype=torch.int32, device=self._device)
        allowed_RV = ((words_RW[:, :, None] >> bit_32) & 1).flatten(1)[:, : self._vocab_size]
        rows_R = torch.tensor(indices, device=self._device)
        logits_SV[rows_R] = logits_SV[rows_R].masked_fill(allowed_RV == 0, float("-inf"))

    def _logprobs(
        self, logits_SV: Tensor, chosen_S: Tensor, rules: Sequence[_Rules]
    ) -> list[TokenLogprob | None]:
        asked = [index for index, rule in enumerate(rules) if rule.sampling.logprobs]
        result: list[TokenLogprob | None] = [None] * len(rules)
        if not asked:
            return result
        logprobs_SV = logits_SV[asked].log_softmax(-1)
        width = max(rules[index].sampling.top_logprobs for index in asked)
        ids_SK, values_SK = rank_logits(logprobs_SV, width)
        ids, values = ids_SK.tolist(), values_SK.tolist()
        own = logprobs_SV.gather(-1, chosen_S[asked].clamp(min=0)[:, None])[:, 0].tolist()
        for position, index in enumerate(asked):
            count = rules[index].sampling.top_logprobs
            alternatives = zip(ids[position][:count], values[position][:count], strict=True)
            result[index] = TokenLogprob(own[position], tuple(alternatives))
        return result


def _penalise(logits_V: Tensor, rule: _Rules) -> None:
    """Applies repetition, presence and frequency penalties in place."""
    assert rule.output_counts_V is not None
    sampling, counts_V = rule.sampling, rule.output_counts_V
    if rule.prompt_seen_V is not None:
        factor = sampling.repetition_penalty
        punished_V = torch.where(logits_V > 0, logits_V / factor, logits_V * factor)
        seen_V = rule.prompt_seen_V | (counts_V > 0)
        logits_V.copy_(torch.where(seen_V, punished_V, logits_V))
    logits_V -= sampling.presence_penalty * (counts_V > 0)
    logits_V -= sampling.frequency_penalty * counts_V


def _pick(logits_RV: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> Tensor:
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
        rows = torch.tensor(indices, device=logits_RV.device)
        rules = [samplings[index] for index in indices]
        largest = max(rule.top_k for rule in rules) if indices is narrow else None
        ids_RK, values_RK = rank_logits(logits_RV[rows], largest)
        place_R = _draw(values_RK, rules, [uniforms[index] for index in indices])
        picked_R[rows] = ids_RK.gather(-1, place_R[:, None])[:, 0]
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

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

    temperature = column([sampling.temperature for sampling in samplings])
    top_k = column([sampling.top_k or values_RK.shape[-1] for sampling in samplings])
    top_p = column([sampling.top_p for sampling in samplings])
    min_p = column([sampling.min_p for sampling in samplings])
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
    target = column(uniforms) * cumulative_RK[:, -1:]
    place_R = torch.searchsorted(cumulative_RK, target, right=True)
    # rounding can push the target to the very end: stay on the last token that has weight; a row
    # of NaN has none, and is refused by the caller
    last_R = ((weights_RK > 0).sum(-1, keepdim=True) - 1).clamp(min=0)
    return torch.minimum(place_R, last_R)[:, 0]


def _uniform(seed: int, output_index: int) -> float:
    """A number in [0, 1) that depends on seed and output index only, with 53 random bits."""
    counter = seed.to_bytes(8, "little") + output_index.to_bytes(8, "little")
    digest = hashlib.blake2b(counter, digest_size=8, person=b"m3stack sampler").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
