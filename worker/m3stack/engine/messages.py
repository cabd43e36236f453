"""What other threads post to the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from m3stack.cache.media import MediaLedger
from m3stack.cache.prefix import PrefixCache
from m3stack.engine.account import Account
from m3stack.engine.runner import Runner
from m3stack.types import Request


@dataclass(frozen=True, slots=True)
class Submit:
    handle: int
    request: Request
    submitted_at: float
    upload_s: float


@dataclass(frozen=True, slots=True)
class Cancel:
    handle: int


@dataclass(frozen=True, slots=True)
class ForgetPrefixes:
    done: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Explain:
    request_id: str
    done: Callable[[Account | None], None]


@dataclass(frozen=True, slots=True)
class Hand:
    """What work between two steps may touch, while it runs.

    Attributes:
        is_settled: whether no step is under way.
    """

    pages: PrefixCache
    media: MediaLedger
    runner: Runner
    is_settled: bool


@dataclass(frozen=True, slots=True)
class Between:
    """Work for the engine thread between two steps; it is given None if there is none any more."""

    work: Callable[[Hand | None], None]


@dataclass(frozen=True, slots=True)
class Abort:
    failure: BaseException


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Message = Submit | Cancel | ForgetPrefixes | Explain | Between | Abort | Stop
