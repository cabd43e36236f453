"""Which tokens a constrained request may take next, worked out while the GPU is busy.

A mask follows from the tokens generated so far and nothing else, so it is begun as soon as the
last of them is known and is ready, as a rule, long before the step's logits are. It outlives
preemption: it belongs to the output, not to the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from m3stack.engine.grammar import Grammar, GrammarCompiler, Vocabulary
from m3stack.errors import WorkerError
from m3stack.types import Constraint, Sampling

if TYPE_CHECKING:
    from llguidance import LLMatcher

MASK_THREADS = 4


@dataclass(frozen=True, slots=True)
class DeadEnd:
    """No token may come next; `message` says why, fit for the request's sender."""

    message: str
    param: str


Mask = np.ndarray
"""int32 [W]: bit i of word w stands for id 32 * w + i; set: it may be sampled."""


@dataclass(slots=True)
class _Walk:
    """One request on its way through its constraint.

    Attributes:
        permitted: what the sampling settings leave, ends included.
        ends: ids that end the request.
        matcher_end: the end in the matcher's eyes, whether it ends this request or not.
        matcher: None until the constraint begins.
        grammar: what it will be copied from.
        next: the mask of the next output token.
    """

    constraint: Constraint
    min_tokens: int
    permitted: Mask
    ends: Mask
    end_ids: frozenset[int]
    matcher_end: Mask
    grammar: Future[Grammar]
    matcher: LLMatcher | None = None
    next: Future[Mask | DeadEnd] | None = None

    def before_it(self) -> Mask | DeadEnd:
        """The mask until the constraint begins: there can be no complete output before."""
        return self._checked(self.permitted & ~self.ends)

    def enter(self, output_index: int) -> Mask | DeadEnd:
        """Begins the constraint with that output token."""
        try:
            self.matcher = self.grammar.result().matcher()
        except WorkerError as error:
            return DeadEnd(f"{self.constraint.param} {error.message}", self.constraint.param)
        return self._mask(self.matcher, output_index)

    def advance(self, token_id: int, output_index: int) -> Mask | DeadEnd:
        """Goes on behind a token, to output token `output_index`."""
        matcher = self.matcher
        assert matcher is not None
        if not matcher.consume_token(token_id):
            return self._lost(matcher)
        return self._mask(matcher, output_index)

    def _mask(self, matcher: LLMatcher, output_index: int) -> Mask | DeadEnd:
        raw = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)
        if matcher.is_error():
            return self._lost(matcher)
        allowed = raw[: len(self.permitted)]
        going_on = allowed & self.permitted & ~(self.ends | self.matcher_end)
        if not matcher.is_accepting():
            return self._checked(going_on)
        if output_index < self.min_tokens and going_on.any():
            return going_on
        # complete: it may end, and must where nothing else can come, whatever `min_tokens` says
        return self._checked(going_on | (self.ends & self.permitted))

    def _checked(self, mask: Mask) -> Mask | DeadEnd:
        if mask.any():
            return mask
        return DeadEnd(
            f"no token fits both {self.constraint.param} and the sampling settings "
            "(stop, allowed and banned ids)",
            self.constraint.param,
        )

    def _lost(self, matcher: LLMatcher) -> DeadEnd:
        reason = " ".join(matcher.get_error().split())[:200]
        return DeadEnd(
            f"{self.constraint.param} became too complex to follow: {reason}",
            self.constraint.param,
        )


class ConstraintBook:
    """All constrained requests of a sampler; its thread makes every call.

    Args:
        compiler: shared with whoever refuses bad constraints; closed with the book.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self.compiler = compiler
        self._vocabulary = compiler.vocabulary
        self._walks: dict[int, _Walk] = {}
        self._executor = ThreadPoolExecutor(MASK_THREADS, "m3stack-masks")

    def begin(
        self, handle: int, constraint: Constraint, sampling: Sampling, *, end_ids: frozenset[int]
    ) -> None:
        """Follows a request from its first output token on; `end_ids` are those that end it."""
        vocabulary = self._vocabulary
        walk = _Walk(
            constraint,
            sampling.min_tokens,
            permitted=_permitted(sampling, vocabulary),
            ends=_bits(sorted(end_ids), vocabulary),
            end_ids=end_ids,
            matcher_end=_bits([vocabulary.eos_token_id], vocabulary),
            grammar=self.compiler.submit(constraint),
        )
        self._walks[handle] = walk
        if constraint.after_token_id is None:
            walk.next = self._executor.submit(walk.enter, 0)
        else:
            walk.next = _done(walk.before_it())

    def forget(self, handle: int) -> None:
        """Drops what `begin` made."""
        self._walks.pop(handle, None)

    def masks(self, handles: Sequence[int]) -> dict[int, Mask | DeadEnd]:
        """What each of these requests may take next, those without a constraint left out.

        Waits for masks that are not ready.
        """
        if not self._walks:
            return {}
        found = ((handle, self._walks.get(handle)) for handle in handles)
        waiting = {handle: walk.next for handle, walk in found if walk is not None}
        return {handle: mask.result() for handle, mask in waiting.items() if mask is not None}

    def took(self, handle: int, token_id: int, output_index: int) -> None:
        """A request has got a token, as number `output_index` of its output."""
        walk = self._walks.get(handle)
        if walk is None or token_id in walk.end_ids:
            return
        if walk.matcher is not None:
            walk.next = self._executor.submit(walk.advance, token_id, output_index + 1)
        elif token_id == walk.constraint.after_token_id:
            walk.next = self._executor.submit(walk.enter, output_index + 1)

    def close(self) -> None:
        """Ends the threads, the compiler's as well."""
        self.compiler.close()
        self._executor.shutdown(wait=True, cancel_futures=True)


def _permitted(sampling: Sampling, vocabulary: Vocabulary) -> Mask:
    banned = _bits(sorted(sampling.banned_token_ids), vocabulary)
    if sampling.allowed_token_ids:
        return _bits(sorted(sampling.allowed_token_ids), vocabulary) & ~banned
    return _bits(range(vocabulary.vocab_size), vocabulary) & ~banned


def _bits(token_ids: Sequence[int], vocabulary: Vocabulary) -> Mask:
    bits = np.zeros(vocabulary.mask_words * 32, dtype=np.uint8)
    bits[np.asarray(token_ids, dtype=np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _done(mask: Mask | DeadEnd) -> Future[Mask | DeadEnd]:
    future: Future[Mask | DeadEnd] = Future()
    future.set_result(mask)
    return future
