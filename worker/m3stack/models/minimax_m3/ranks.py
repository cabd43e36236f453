"""Which part of every checkpoint tensor one rank of a group of GPUs holds.

Attention, dense and shared feed-forwards, embedding and head are split over the tensor-parallel
ranks. Routed experts are split by width over the same ranks, or, with expert parallelism, dealt
out whole. Norms, router, index keys and the vision side stand on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from m3stack.errors import StartupError


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank's place.

    Attributes:
        tp_rank, tp_size: among the ranks that split each layer.
        ep_rank, ep_size: among those that deal out whole experts; size 1 splits them by width.

    Raises:
        StartupError: a rank outside its size, or sizes under which an expert would stand twice.
    """

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1

    def __post_init__(self) -> None:
        for name, rank, size in (
            ("tensor", self.tp_rank, self.tp_size),
            ("expert", self.ep_rank, self.ep_size),
        ):
            if not 0 <= rank < size:
                raise StartupError(f"{name}-parallel rank is {rank}, expected 0 to {size - 1}")
        if self.ep_size > 1 and self.ep_size % self.tp_size:
            raise StartupError(
                f"{self.ep_size} expert-parallel ranks are no multiple of the {self.tp_size} "
                "tensor-parallel ones, so that some ranks would hold the same experts"
            )


WHOLE = Rank()


class Split(Enum):
    """How a tensor is divided among tensor-parallel ranks."""

    NONE = auto()
    ROWS = auto()
    COLUMNS = auto()
    KV_HEADS = auto()
    """By rows, one head at a time; with more ranks than heads, neighbours share one."""


@dataclass(frozen=True, slots=True)
class Span:
    """Part of one dim: `count` entries from `first`."""

    first: int
    count: int

    def divided(self, by: int) -> Span:
        """The same part where `by` entries are one; it must fall on whole ones."""
        assert self.first % by == 0, (self, by)
        assert self.count % by == 0, (self, by)
        return Span(self.first // by, self.count // by)


def even_span(what: str, size: int, rank: int, ranks: int, *, unit: int = 1) -> Span:
    """One rank's even share of a dim whose entries hang together in units.

    Raises:
        StartupError: the units do not divide evenly.
    """
    if size % (ranks * unit):
        units = f" in units of {unit}" if unit > 1 else ""
        raise StartupError(f"{what}: {size}{units} cannot be split evenly over {ranks} ranks")
    share = size // ranks
    return Span(rank * share, share)


def head_span(what: str, heads: int, head_rows: int, rank: Rank) -> Span:
    """Rows of the heads that a rank needs; ranks beyond one a head share theirs.

    Raises:
        StartupError: neither heads divide by ranks nor ranks by heads.
    """
    if heads % rank.tp_size == 0:
        return even_span(what, heads * head_rows, rank.tp_rank, rank.tp_size)
    if rank.tp_size % heads:
        raise StartupError(f"{what}: {heads} heads cannot be shared by {rank.tp_size} ranks")
    head = rank.tp_rank * heads // rank.tp_size
    return Span(head * head_rows, head_rows)


def local_expert(what: str, expert: int, num_experts: int, rank: Rank) -> int | None:
    """Place of an expert among a rank's own, or None where another rank holds it.

    Raises:
        StartupError: the experts do not divide evenly.
    """
    span = even_span(what, num_experts, rank.ep_rank, rank.ep_size)
    place = expert - span.first
    return place if 0 <= place < span.count else None
