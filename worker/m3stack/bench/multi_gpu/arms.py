"""Ways to divide a model that are compared, and meshes that stand in for more GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from m3stack.kernels.msa.candidates import NO_CANDIDATE
from m3stack.models.minimax_m3.ranks import Rank, tensor_rank


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to divide the model.

    Attributes:
        ranks: that share it.
        expert_parallel: groups that experts are dealt out to.
        index_in_parts: whether each rank holds the index keys of its pages only.
    """

    ranks: int
    expert_parallel: int = 1
    index_in_parts: bool = False

    @property
    def name(self) -> str:
        experts = f" ep{self.expert_parallel}" if self.expert_parallel > 1 else ""
        return f"tp{self.ranks}{experts}{' parts' if self.index_in_parts else ''}"

    def place(self, rank: int) -> Rank:
        """What one of its ranks holds."""
        return tensor_rank(
            rank,
            self.ranks,
            expert_parallel=self.expert_parallel,
            index_in_parts=self.index_in_parts,
        )


def arms_of(world: int) -> tuple[Arm, ...]:
    """All arms for a machine of so many GPUs, the more telling ones first."""
    shapes = [
        Arm(ranks, index_in_parts=parts)
        for ranks in (2, 4, 8)
        if ranks > world
        for parts in (False, True)
    ]
    if world == 1:
        return (Arm(1), *shapes)
    dealt = [Arm(world, expert_parallel=world, index_in_parts=parts) for parts in (False, True)]
    real = (Arm(1), Arm(world), Arm(world, index_in_parts=True))
    return (*real, *shapes[:2], dealt[0], *shapes[2:], dealt[1])


class BenchMesh:
    """One rank of `size`, of which only as many exist as the group has.

    With fewer of them each collective runs over those there are, with the buffers of the whole:
    values mean nothing then, time and shapes do. A silent mesh leaves the collectives out. Where
    an exchange of candidates is not a true one, one more small kernel keeps a rank's own of them.

    Args:
        group: of the ranks that exist; None where this one is alone.
    """

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None) -> None:
        self.rank, self.size = rank, size
        self._group = group if size > 1 else None
        self._is_silent = False

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Leaves the collectives out, gathering included."""
        self._is_silent = True
        try:
            yield
        finally:
            self._is_silent = False

    @property
    def is_silent(self) -> bool:
        return self._is_silent

    @property
    def num_real(self) -> int:
        """Ranks that exist."""
        return 1 if self._group is None else dist.get_world_size(self._group)

    @property
    def _talks(self) -> bool:
        return self.num_real > 1 and not self._is_silent

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._talks:
            dist.all_reduce(x, group=self._group)
        return x

    def all_gather_columns(self, x: Tensor) -> Tensor:
        parts, copies = x[None], self.size
        if self._talks:
            copies = self.size // self.num_real
            gathered = x.new_empty(self.num_real * x.shape[0], *x.shape[1:])
            dist.all_gather_into_tensor(gathered, x.contiguous(), group=self._group)
            parts = gathered.view(self.num_real, *x.shape)
        return parts.repeat(copies, *[1] * x.dim()).movedim(0, -2).flatten(-2)

    def all_to_all(self, x: Tensor) -> Tensor:
        out = x
        if self._talks:
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
            dist.all_to_all_single(out, x.contiguous(), group=self._group)
            if self.num_real == self.size:
                return out
        if self.size > 1:
            # what came is not what the ranks of a whole would send: one block could stand twice
            x[len(x) // self.size :] = NO_CANDIDATE
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        if self._talks:
            dist.broadcast(x, group=self._group, group_src=0)
        return x

    def barrier(self) -> None:
        """Returns when all ranks that exist are here."""
        if self._group is not None:
            dist.barrier(self._group)
