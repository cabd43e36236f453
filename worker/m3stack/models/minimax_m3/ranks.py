"""Which part of every checkpoint tensor one rank of a group of GPUs holds.

Attention, dense and shared feed-forwards, embedding and head are split over the tensor-parallel
ranks. Routed experts are dealt out to the expert-parallel groups of ranks, and split by width over
the ranks of a group. Norms, router, the projection of index keys and the vision side stand on every
rank; so does that of all index queries where the cached index keys are held in parts.
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
        ep_rank, ep_size: among those that deal out experts. Fewer than tensor-parallel ranks: a
            group of neighbours splits its experts by width. More of them: copies of the
            tensor-parallel group share the experts, and each rank has its own whole.
        index_in_parts: each rank caches the index keys of some pages, and scores them for all.

    Raises:
        StartupError: a rank outside its size, or sizes under which an expert would stand twice.
    """

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    index_in_parts: bool = False

    def __post_init__(self) -> None:
        for name, rank, size in (
            ("tensor", self.tp_rank, self.tp_size),
            ("expert", self.ep_rank, self.ep_size),
        ):
            if not 0 <= rank < size:
                raise StartupError(f"{name}-parallel rank is {rank}, expected 0 to {size - 1}")
        if self.ep_size % self.tp_size and self.tp_size % self.ep_size:
            raise StartupError(
                f"{self.ep_size} expert-parallel and {self.tp_size} tensor-parallel ranks: neither "
                "number divides the other, so that some ranks would hold the same experts"
            )
        if self.ep_size < self.tp_size and self.ep_rank != self.tp_rank // self.width_ranks:
            raise StartupError(
                f"expert-parallel rank is {self.ep_rank}, expected "
                f"{self.tp_rank // self.width_ranks}, where tensor-parallel rank {self.tp_rank} is"
            )

    @property
    def width_ranks(self) -> int:
        """Ranks that split the experts they share by width."""
        return max(1, self.tp_size // self.ep_size)

    @property
    def width_rank(self) -> int:
        """Place among those."""
        return self.tp_rank % self.width_ranks


def tensor_rank(
    rank: int, size: int, *, expert_parallel: int = 1, index_in_parts: bool = False
) -> Rank:
    """The place of one of `size` ranks that split a model between them.

    Args:
        expert_parallel: groups that experts are dealt out to; divides `size`.

    Raises:
        StartupError: it does not.
    """
    if size % expert_parallel:
        raise StartupError(
            f"expert_parallel is {expert_parallel}, expected a divisor of tensor_parallel, {size}"
        )
    ep_rank = rank // (size // expert_parallel)
    return Rank(rank, size, ep_rank, expert_parallel, index_in_parts)


WHOLE = Rank()


class Split(Enum):
    """How a tensor is divided among tensor-parallel ranks."""

    NONE = auto()
    ROWS = auto()
    COLUMNS = auto()
    KV_HEADS = auto()
    """By rows, one head at a time; with more ranks than heads, neighbours share one."""
    INDEX_HEADS = auto()
    """As the KV heads they choose for; not at all where index keys are held in parts."""


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


def expert_span(num_experts: int, rank: Rank) -> Span:
    """The experts that a rank holds, or its share of their width.

    Raises:
        StartupError: the experts do not divide evenly.
    """
    return even_span("experts", num_experts, rank.ep_rank, rank.ep_size)
