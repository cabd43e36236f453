"""What the pages of a request are called, under any worker's cache epoch."""

from __future__ import annotations

from m3stack.cache.prefix import Salt, root_key
from m3stack.engine.sequence import Sequence
from m3stack.types import Request


def chain(request: Request, *, page_tokens: int, epoch: int) -> tuple[bytes, ...]:
    """Keys of the full pages before the last token of a prompt, which is always computed anew."""
    sequence = Sequence(
        0,
        request,
        page_tokens=page_tokens,
        stop_ids=frozenset(),
        max_context_tokens=len(request.prompt_token_ids) + 1,
    )
    sequence.root_key = root_key(Salt(request.tenant, request.cache_salt), epoch)
    return tuple(sequence.matchable_keys())
