"""Drives a model over token ids with a paged cache of plain tensors: no engine, no pool.

Unwritten slots hold NaN, pages are handed out in shuffled order, and page tables hold a far too
large number behind a sequence's end, so that whatever reads what it must not shows at once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from m3stack.batch import DeviceBatch, LayerCache, MediaRows
from m3stack.kernels.interface import Kernels, LayerPages, PagedRows
from m3stack.kernels.reference_table import reference_kernels
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.model import M3Model
from m3stack.models.minimax_m3.weights import load_model

NO_ADDRESS = 1 << 30

# models this small only lose time by sharing their operations between threads
torch.set_num_threads(1)


def load(path: Path, *, kernels: Kernels | None = None) -> M3Model:
    """The model of a checkpoint directory, fp32 on the CPU."""
    return load_model(
        path,
        config=M3Config.from_dir(path),
        kernels=kernels or reference_kernels(),
        device=torch.device("cpu"),
        dtype=torch.float32,
        progress=lambda done, total: None,
    )


@dataclass(slots=True)
class Choices:
    """What the layers of a model chose, in order of the calls.

    `blocks` int32 [G, T, K] and `experts` int32 [T, k]: one entry per step and sparse layer.
    """

    blocks: list[Tensor] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)


def recording(kernels: Kernels, choices: Choices) -> Kernels:
    """The same kernels, which also note what was chosen."""

    def choose_blocks(*arguments):
        choices.blocks.append(kernels.choose_blocks(*arguments))
        return choices.blocks[-1]

    def route_tokens(*arguments):
        ids, weights = kernels.route_tokens(*arguments)
        choices.experts.append(ids)
        choices.weights.append(weights)
        return ids, weights

    return replace(kernels, choose_blocks=choose_blocks, route_tokens=route_tokens)


def make_cache(model: M3Model, num_pages: int, *, fill: float = float("nan")) -> LayerCache:
    """Pages for every layer, in the model's dtype and where it lives."""
    config = model.config

    def pages(*shape: int) -> Tensor:
        return model.embedding.new_full((num_pages, *shape), fill, requires_grad=False)

    groups, block = config.num_kv_heads, config.block_tokens
    return tuple(
        LayerPages(
            k_PGBD=pages(groups, block, config.head_dim),
            v_PGBD=pages(groups, block, config.head_dim),
            index_k_PBD=pages(block, config.index_dim) if is_sparse else None,
        )
        for is_sparse in config.sparse_layers
    )


@dataclass(slots=True)
class Track:
    """One sequence: how far it is, its pages, and the features at some of its positions."""

    length: int = 0
    pages: list[int] = field(default_factory=list)
    media_positions_N: Tensor | None = None
    media_features_NM: Tensor | None = None


class PagedRunner:
    """Feeds tokens of any number of sequences, in any mixture, to a model."""

    def __init__(self, model: M3Model, *, num_pages: int = 64, seed: int = 0) -> None:
        self.model = model
        self.cache = make_cache(model, num_pages)
        self._free = list(range(num_pages))
        random.Random(seed).shuffle(self._free)

    def step(self, parts: Sequence[tuple[Track, Sequence[int]]]) -> list[Tensor]:
        """Feeds each track its tokens in one forward; gives each its logits [tokens, vocab]."""
        batch = self.batch(parts)
        with torch.inference_mode():
            logits = self.model(batch, self.cache)
        return list(logits.split([len(tokens) for _, tokens in parts]))

    def feed(self, track: Track, tokens: Sequence[int], chunk: int | None = None) -> Tensor:
        """Feeds one track alone, `chunk` tokens a step; gives the logits of every token."""
        size = chunk or len(tokens)
        pieces = [tokens[start : start + size] for start in range(0, len(tokens), size)]
        return torch.cat([self.step([(track, piece)])[0] for piece in pieces])

    def batch(self, parts: Sequence[tuple[Track, Sequence[int]]]) -> DeviceBatch:
        """Moves the tracks on, and gives the step that the model has to run."""
        block = self.model.config.block_tokens
        positions: list[int] = []
        slots: list[int] = []
        starts, media = [0], []
        for track, tokens in parts:
            first, track.length = track.length, track.length + len(tokens)
            while len(track.pages) * block < track.length:
                track.pages.append(self._free.pop())
            span = range(first, track.length)
            positions += span
            slots += [track.pages[at // block] * block + at % block for at in span]
            media += self._media(track, first, starts[-1])
            starts.append(len(positions))
        width = max(len(track.pages) for track, _ in parts)
        table = [track.pages + [NO_ADDRESS] * (width - len(track.pages)) for track, _ in parts]
        lengths = [track.length for track, _ in parts]
        rows = PagedRows(
            query_start_S1=self._tensor(starts, torch.int32),
            seq_lens_S=self._tensor(lengths, torch.int32),
            page_table_SJ=self._tensor(table, torch.int32),
            max_query_len=max(len(tokens) for _, tokens in parts),
            max_seq_len=max(lengths),
        )
        return DeviceBatch(
            token_ids_T=self._tensor([t for _, tokens in parts for t in tokens], torch.int64),
            positions_T=self._tensor(positions, torch.int64),
            slots_T=self._tensor(slots, torch.int64),
            rows=rows,
            sample_rows_S=self._tensor(list(range(len(positions))), torch.int64),
            media=tuple(media),
        )

    def _media(self, track: Track, first: int, first_row: int) -> list[MediaRows]:
        if track.media_positions_N is None or track.media_features_NM is None:
            return []
        here = (track.media_positions_N >= first) & (track.media_positions_N < track.length)
        rows = track.media_positions_N[here] - first + first_row
        return [MediaRows(rows, track.media_features_NM[here])]

    def _tensor(self, values: list, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.model.embedding.device)
