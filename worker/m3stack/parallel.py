"""Ranks that split every layer, and what they do together; knows no model and no schedule."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# longest that one rank may load after another one has
LOADING = timedelta(hours=2)


class Mesh(Protocol):
    """One rank's view. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks; `x` may be overwritten."""
        ...

    def all_gather_columns(self, x: Tensor) -> Tensor:
        """The ranks' [..., n] side by side: [..., size * n]."""
        ...

    def all_to_all(self, x: Tensor) -> Tensor:
        """Of [size * n, ...], the r-th n rows go to rank r; what came, in the order of ranks."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's `x`, on every rank; what the others give is overwritten."""
        ...


class Alone:
    """The mesh of a single rank."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather_columns(self, x: Tensor) -> Tensor:
        return x

    def all_to_all(self, x: Tensor) -> Tensor:
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        return x


ALONE = Alone()


class LeadersWord:
    """What rank 0 decides, and what all ranks have in common, on every rank.

    Args:
        group: of all ranks, over gloo.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def await_all(self) -> None:
        """Returns on every rank once all of them have come here, which may take as long as loading.

        Raises:
            RuntimeError: one of them is gone.
        """
        dist.monitored_barrier(self._group, timeout=LOADING)

    def goes_on(self, own: bool) -> bool:
        """Whether the leading rank goes on; `own` counts on that rank alone."""
        word_1 = torch.tensor([own])
        dist.broadcast(word_1, group=self._group, group_src=0)
        return bool(word_1.item())

    def least(self, own: int) -> int:
        """The smallest of all ranks' numbers, on every rank.

        Raises:
            RuntimeError: one of them is gone.
        """
        number_1 = torch.tensor([own])
        dist.all_reduce(number_1, op=dist.ReduceOp.MIN, group=self._group)
        return int(number_1.item())

    def most(self, own: int | None) -> int | None:
        """The largest of all ranks' numbers, on every rank; None if one of them has none.

        Args:
            own: not negative.

        Raises:
            RuntimeError: one of them is gone.
        """
        least_2 = torch.tensor([own is not None, -(own or 0)], dtype=torch.int64)
        dist.all_reduce(least_2, op=dist.ReduceOp.MIN, group=self._group)
        all_have_one, most = least_2.tolist()
        return -most if all_have_one else None


class ProcessMesh:
    """Ranks in processes of their own, one each, over a torch.distributed group.

    Every operation is a collective of fixed shapes without a sync, so that NCCL's can be captured
    in CUDA graphs.

    Args:
        group: of all ranks; its back end must fit where the tensors are.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self._group)
        return x

    def all_gather_columns(self, x: Tensor) -> Tensor:
        # one call with one output, which a CUDA graph can hold: rank after rank, then side by side
        gathered = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=self._group)
        return gathered.view(self.size, *x.shape).movedim(0, -2).flatten(-2)

    def all_to_all(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous(), group=self._group)
        return out

    def broadcast(self, x: Tensor) -> Tensor:
        dist.broadcast(x, group=self._group, group_src=0)
        return x
