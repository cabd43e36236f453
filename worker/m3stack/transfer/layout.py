"""The form in which computed state travels: a page with all heads, whatever the number of ranks.

A page on the wire is one run of bytes, layer by layer: K of every head, V of every head, then, on
sparse layers, the index keys and their copy where there is one. Each rank reads and writes the
parts that it holds.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from m3stack.cache.pool import PageShape
from m3stack.models.minimax_m3.config import M3Config

SAMPLE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Part:
    """A run of bytes of a page on the wire."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class LayerForm:
    """Where a layer stands in a page on the wire.

    Attributes:
        first: of its bytes.
        head_bytes: of K or of V of one head.
        index_bytes, copy_bytes: of the index keys and of their copy; 0 where there are none.
    """

    first: int
    head_bytes: int
    index_bytes: int
    copy_bytes: int


@dataclass(frozen=True, slots=True)
class PageForm:
    """A page on the wire.

    Attributes:
        num_heads: KV heads of the whole model.
        layers: in order.
    """

    num_heads: int
    layers: tuple[LayerForm, ...]

    @property
    def num_bytes(self) -> int:
        if not self.layers:
            return 0
        last = self.layers[-1]
        return (
            last.first + 2 * self.num_heads * last.head_bytes + last.index_bytes + last.copy_bytes
        )

    def parts(self, heads: range, *, with_index: bool) -> tuple[Part, ...]:
        """The parts that a rank with these heads holds, in order: K, V, index keys, their copy.

        Args:
            with_index: whether it holds the index keys of the page.
        """
        found: list[Part] = []
        for layer in self.layers:
            values = self.num_heads * layer.head_bytes
            own = Part(layer.first + heads.start * layer.head_bytes, len(heads) * layer.head_bytes)
            found += [own, Part(own.offset + values, own.length)]
            if with_index and layer.index_bytes:
                found.append(Part(layer.first + 2 * values, layer.index_bytes))
            if with_index and layer.copy_bytes:
                offset = layer.first + 2 * values + layer.index_bytes
                found.append(Part(offset, layer.copy_bytes))
        return tuple(found)


def page_form(shape: PageShape, num_heads: int) -> PageForm:
    """The form of the pages of a pool on any rank.

    Args:
        shape: of that rank's pages.
        num_heads: KV heads of the whole model.
    """
    layers: list[LayerForm] = []
    first = 0
    for is_sparse in shape.sparse_layers:
        values = shape.page_tokens * shape.head_dim
        index = shape.page_tokens * shape.index_dim * shape.dtype.itemsize if is_sparse else 0
        layer = LayerForm(
            first=first,
            head_bytes=values * shape.layer_dtype(is_sparse).itemsize,
            index_bytes=index,
            copy_bytes=shape.copy_bytes_per_page if is_sparse else 0,
        )
        layers.append(layer)
        first += 2 * num_heads * layer.head_bytes + layer.index_bytes + layer.copy_bytes
    return PageForm(num_heads, tuple(layers))


def page_layout(shape: PageShape, model: M3Config, weights: str) -> str:
    """What two workers must have in common to share pages, in words."""
    sparse = "".join("s" if is_sparse else "d" for is_sparse in shape.sparse_layers)
    return (
        f"page v1 {_model(model, weights)} layers={sparse} heads={model.num_kv_heads} "
        f"head_dim={shape.head_dim} index_dim={shape.index_dim} tokens={shape.page_tokens} "
        f"dtype={_name(shape.dtype)} kv_dtype={_name(shape.layer_dtype(True))} "
        f"index_copy={'int8' if shape.index_copy else 'none'}"
    )


def feature_layout(model: M3Config, dtype: torch.dtype, weights: str) -> str:
    """What two workers must have in common to share media features, in words."""
    return f"features v1 {_model(model, weights)} width={model.hidden_size} dtype={_name(dtype)}"


def weights_id(path: Path) -> str:
    """Tells checkpoints of equal shapes apart: a hash over samples of all their files."""
    digest = hashlib.sha256()
    for file in sorted([path / "config.json", *path.glob("*.safetensors")]):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            # headers name every tensor; of the weights themselves a few places are enough
            for offset in sorted({0, size // 3, 2 * size // 3, max(0, size - SAMPLE_BYTES)}):
                stream.seek(offset)
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _model(model: M3Config, weights: str) -> str:
    return f"facts={model.facts().fingerprint().hex()[:16]} weights={weights}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
