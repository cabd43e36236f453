"""Logits to tokens and log-probabilities, each row by its own request's rules and seed.

A row's result depends on its logits, its request and its output index, never on the other rows:
every operation works along the vocabulary only, and randomness is a function of
(seed, output index).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from m3stack.engine.choosing import pick, rank_logits, uniform
from m3stack.engine.constraints import ConstraintBook, DeadEnd, Mask
from m3stack.engine.plan import Sampled
from m3stack.engine.transfer import HostCopy, to_device
from m3stack.errors import ErrorKind
from m3stack.types import Constraint, Failed, Sampling, TokenLogprob

_NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A row of logits to choose from: whose it is, and which output token it gives."""

    handle: int
    output_index: int


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Log-probabilities on their way to the host.

    Attributes:
        asked: which rows want them, A.
        ids_AK, values_AK: the best alternatives of each.
        own_A: that of the chosen token.
    """

    asked: list[int]
    ids_AK: HostCopy
    values_AK: HostCopy
    own_A: HostCopy


@dataclass(frozen=True, slots=True)
class Draw:
    """Tokens that are being chosen.

    Attributes:
        rows: whose.
        chosen_S: int64, on the device; negative where there is no choice.
    """

    rows: tuple[SampleRow, ...]
    chosen_S: Tensor
    _chosen: HostCopy
    _masks: Mapping[int, Mask | DeadEnd]
    _logprobs: _Logprobs | None
    _alternatives: list[int]


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

    def knows(self, handle: int) -> bool:
        """Whether a request has begun and is not forgotten."""
        return handle in self._rules

    def sample(
        self, logits_SV: Tensor, rows: Sequence[SampleRow]
    ) -> Mapping[int, Sampled | Failed]:
        """One token a row, by handle; Failed where logits or constraint allow no choice.

        Args:
            logits_SV: fp32 [S, V]; not changed.
            rows: one entry a row.
        """
        return self.collect(self.draw(logits_SV, rows))

    def draw(self, logits_SV: Tensor, rows: Sequence[SampleRow]) -> Draw:
        """Begins to choose one token a row; waits for constraints, not for the device.

        What the rows' requests chose before must have been collected.
        """
        rules = [self._rules[row.handle] for row in rows]
        masks: Mapping[int, Mask | DeadEnd] = {}
        if self._constraints is not None:
            masks = self._constraints.masks([row.handle for row in rows])
        adjusted_SV = self._adjust(logits_SV, rows, rules, masks)
        chosen_S = adjusted_SV.argmax(-1)
        random = [index for index, rule in enumerate(rules) if rule.sampling.temperature > 0]
        if random:
            is_all = len(random) == len(rows)
            index_R = to_device(random, self._device, torch.int64)
            picked = pick(
                adjusted_SV if is_all else adjusted_SV.index_select(0, index_R),
                [rules[index].sampling for index in random],
                [uniform(rules[i].sampling.seed, rows[i].output_index) for i in random],
            )
            chosen_S = chosen_S.index_copy(0, index_R, picked)
        best_S = adjusted_SV.amax(-1)  # NaN if any entry is
        chosen_S = torch.where(best_S.isfinite(), chosen_S, _NO_TOKEN)
        for index, rule in enumerate(rules):
            if rule.output_counts_V is not None:
                chosen_1 = chosen_S[index : index + 1].clamp(min=0)
                ones_1 = torch.ones(1, dtype=torch.float32, device=self._device)
                rule.output_counts_V.scatter_add_(0, chosen_1, ones_1)
        return Draw(
            tuple(rows),
            chosen_S,
            # the one copy to the host of a step, but for log-probabilities
            HostCopy(chosen_S),
            masks,
            self._logprobs(logits_SV, chosen_S, rules),
            [rule.sampling.top_logprobs for rule in rules],
        )

    def collect(self, draw: Draw) -> Mapping[int, Sampled | Failed]:
        """What was chosen, by handle, once it is; results of forgotten requests mean nothing."""
        logprobs = _read_logprobs(draw._logprobs, draw._alternatives)
        result: dict[int, Sampled | Failed] = {}
        token_ids: list[int] = draw._chosen.get().tolist()
        for row, token_id, logprob in zip(draw.rows, token_ids, logprobs, strict=True):
            mask = draw._masks.get(row.handle)
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
        words_RW = to_device(torch.from_numpy(np.stack(chosen)), self._device)
        bit_32 = torch.arange(32, dtype=torch.int32, device=self._device)
        allowed_RV = ((words_RW[:, :, None] >> bit_32) & 1).flatten(1)[:, : self._vocab_size]
        rows_R = to_device(indices, self._device, torch.int64)
        kept_RV = logits_SV.index_select(0, rows_R).masked_fill(allowed_RV == 0, float("-inf"))
        logits_SV.index_copy_(0, rows_R, kept_RV)

    def _logprobs(
        self, logits_SV: Tensor, chosen_S: Tensor, rules: Sequence[_Rules]
    ) -> _Logprobs | None:
        asked = [index for index, rule in enumerate(rules) if rule.sampling.logprobs]
        if not asked:
            return None
        index_A = to_device(asked, self._device, torch.int64)
        logprobs_AV = logits_SV.index_select(0, index_A).log_softmax(-1)
        width = max(rules[index].sampling.top_logprobs for index in asked)
        ids_AK, values_AK = rank_logits(logprobs_AV, width)
        chosen_A = chosen_S.index_select(0, index_A).clamp(min=0)
        own_A = logprobs_AV.gather(-1, chosen_A[:, None])[:, 0]
        return _Logprobs(asked, HostCopy(ids_AK), HostCopy(values_AK), HostCopy(own_A))


def _read_logprobs(
    logprobs: _Logprobs | None, alternatives: Sequence[int]
) -> list[TokenLogprob | None]:
    """One entry a row; `alternatives` says how many each asked for."""
    result: list[TokenLogprob | None] = [None] * len(alternatives)
    if logprobs is not None:
        parts = (logprobs.ids_AK, logprobs.values_AK, logprobs.own_A)
        ids, values, own = (part.get().tolist() for part in parts)
        for position, index in enumerate(logprobs.asked):
            count = alternatives[index]
            best = zip(ids[position][:count], values[position][:count], strict=True)
            result[index] = TokenLogprob(own[position], tuple(best))
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
