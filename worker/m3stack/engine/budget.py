"""How many tokens of a step each running sequence gets."""

from __future__ import annotations

from collections.abc import Sequence as ReadOnlySequence
from dataclasses import dataclass

from m3stack.engine.pace import Pace
from m3stack.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a step.

    Attributes:
        max_batch_tokens: tokens of a step; more than `max_sequences`, so that prompts advance.
        max_sequences: sequences that run at once.
        max_encode_patches: vision patches of a step; one part of an item may exceed it alone.
        max_mixed_tokens: tokens of a step in which some sequence waits for its next token, which
            bounds that wait; 0 sets no bound of its own. More than `max_sequences`.
        growth_prefix_tokens: where nobody waits for a token, the step of a prompt grows by
            `max_batch_tokens` for every so many of its tokens that are computed already: there,
            attention to those tokens outweighs what the new ones add. 0 turns growth off.
        max_growth: the most a step grows to, in multiples of `max_batch_tokens`.
        max_running_per_tenant: sequences of one tenant that run at once; 0 sets no limit.
        max_restored_pages: pages brought back from host memory in a step.
        prefill_first: while there are prompts, nobody gets a next token; for comparison only.
    """

    max_batch_tokens: int
    max_sequences: int
    max_encode_patches: int
    max_mixed_tokens: int = 0
    growth_prefix_tokens: int = 0
    max_growth: int = 2
    max_running_per_tenant: int = 0
    max_restored_pages: int = 64
    prefill_first: bool = False

    def __post_init__(self) -> None:
        assert self.max_batch_tokens > self.max_sequences > 0
        assert not self.max_mixed_tokens or self.max_mixed_tokens > self.max_sequences
        assert self.max_growth >= 1
        assert self.max_restored_pages >= 1

    @property
    def most_tokens(self) -> int:
        """Of any step."""
        return self.max_batch_tokens * (self.max_growth if self.growth_prefix_tokens else 1)

    def most_tokens_within(self, context_tokens: int) -> int:
        """Of any step while no sequence is longer than a context."""
        return self.step_tokens(num_decoding=0, prefix_tokens=context_tokens - 1)

    def largest_step_tokens(self, context_tokens: int) -> int:
        """Of a step whose sequences are each no longer than a context, however many they are."""
        return min(self.most_tokens_within(context_tokens), self.max_sequences * context_tokens)

    def step_tokens(self, *, num_decoding: int, prefix_tokens: int) -> int:
        """Most tokens of a step.

        Args:
            num_decoding: sequences that wait for their next token.
            prefix_tokens: computed tokens of the prompt that goes first.
        """
        if num_decoding:
            return min(self.max_batch_tokens, self.max_mixed_tokens or self.max_batch_tokens)
        if not self.growth_prefix_tokens:
            return self.max_batch_tokens
        factor = 1 + prefix_tokens // self.growth_prefix_tokens
        return self.max_batch_tokens * min(factor, self.max_growth)


def split_budget(
    running: ReadOnlySequence[Sequence], limits: SchedulerLimits, pace: Pace | None = None
) -> dict[int, int]:
    """Tokens each sequence may compute in this step, by handle.

    A sequence that waits for its next token gets it. Of the rest at least half goes to the first
    prompt, what is left to the shortest others.

    Args:
        running: sequences in order, without those whose pages are still on their way.
        limits: of the step.
        pace: bounds the prompt tokens beside requests that wait for their next token.
    """
    shares = {s.handle: 1 for s in running}
    prompts = [s for s in running if s.num_uncomputed > 1]
    if not prompts:
        return shares
    if limits.prefill_first:
        shares |= {s.handle: 0 for s in running if s.num_uncomputed == 1}
        running = prompts
    first, num_decoding = prompts[0], len(running) - len(prompts)
    left = limits.step_tokens(num_decoding=num_decoding, prefix_tokens=first.num_computed)
    left -= num_decoding
    if num_decoding and pace is not None:
        most = pace.prompt_tokens(num_decoding, prefix_tokens=first.num_computed)
        left = left if most is None else min(left, most)
    reserved = min(first.num_uncomputed, -(-left // 2))
    left -= reserved
    # sorted is stable: equal lengths keep their order
    for sequence in sorted(prompts[1:], key=lambda s: s.num_uncomputed):
        shares[sequence.handle] = min(sequence.num_uncomputed, left)
        left -= shares[sequence.handle]
    shares[first.handle] = min(first.num_uncomputed, reserved + left)
    return shares
