"""What other threads post to the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from m3stack.engine.account import Account
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
class Abort:
    failure: BaseException


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Message = Submit | Cancel | ForgetPrefixes | Explain | Abort | Stop
