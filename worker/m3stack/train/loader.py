"""Batches made ahead of time by other processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from m3stack.train.batches import Batch, BatchKind, BatchMaker
from m3stack.train.encode import Encoder
from m3stack.train.recipe import Recipe


class _Batches(Dataset[Batch]):
    """All batches of a kind, by number."""

    def __init__(self, tokenizer_json: Path, seed: int, kind: BatchKind) -> None:
        self._maker = BatchMaker(Encoder(tokenizer_json), seed)
        self._kind = kind

    def __getitem__(self, number: int) -> Batch:
        return self._maker.make(number, self._kind)


class Loader:
    """Gives each kind's batches in order, made by a few processes a kind.

    Start it before anything touches the GPU: its processes are forked.

    Args:
        num_processes: for all kinds together; a kind gets its share by weight, at least one.
    """

    def __init__(
        self,
        tokenizer_json: Path,
        recipe: Recipe,
        *,
        num_processes: int,
        pins: bool,
    ) -> None:
        weights: dict[BatchKind, float] = {}
        for phase in recipe.phases:
            for weight, kind in phase.kinds:
                weights[kind] = max(weights.get(kind, 0.0), weight)
        self._streams: dict[BatchKind, Iterator[Batch]] = {}
        for kind, weight in weights.items():
            share = max(1, round(num_processes * weight))
            loader = DataLoader(
                _Batches(tokenizer_json, recipe.seed, kind),
                batch_size=None,
                sampler=range(1 << 40),
                num_workers=share,
                prefetch_factor=4,
                pin_memory=pins,
                worker_init_fn=_one_thread,
            )
            self._streams[kind] = iter(loader)

    def __call__(self, number: int, kind: BatchKind) -> Batch:
        return next(self._streams[kind])

    def skip(self, used: Mapping[BatchKind, int]) -> None:
        """Leaves out the batches of each kind that an earlier run took."""
        for kind, count in used.items():
            for _ in range(count if kind in self._streams else 0):
                next(self._streams[kind])

    def close(self) -> None:
        """Ends the processes."""
        self._streams.clear()


def _one_thread(_worker: int) -> None:
    torch.set_num_threads(1)
