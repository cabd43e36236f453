"""Memory of the paged cache: K, V and index-K tensors of every layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from m3stack.batch import LayerCache
from m3stack.kernels.interface import LayerPages


@dataclass(frozen=True, slots=True)
class PageShape:
    """What one page holds on this rank.

    Attributes:
        sparse_layers: one entry a layer; True where there is an index key.
        num_kv_heads: KV groups G.
        head_dim, index_dim: widths of a K or V head and of the index key.
        page_tokens: tokens B of a page.
        dtype: of all three.
    """

    sparse_layers: tuple[bool, ...]
    num_kv_heads: int
    head_dim: int
    index_dim: int
    page_tokens: int
    dtype: torch.dtype

    @property
    def bytes_per_page(self) -> int:
        """Bytes that one page takes over all layers."""
        kv_values = 2 * self.num_kv_heads * self.head_dim * len(self.sparse_layers)
        index_values = self.index_dim * sum(self.sparse_layers)
        return (kv_values + index_values) * self.page_tokens * self.dtype.itemsize


class KvPool:
    """The pages of all layers; page p is row p of every tensor.

    Content is undefined until written. Who uses which page is not known here.
    """

    def __init__(self, shape: PageShape, num_pages: int, device: torch.device) -> None:
        self.shape = shape
        self.num_pages = num_pages
        self.layers: LayerCache = tuple(
            _layer_pages(shape, num_pages, device, is_sparse) for is_sparse in shape.sparse_layers
        )

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.shape.bytes_per_page


def _layer_pages(
    shape: PageShape, num_pages: int, device: torch.device, is_sparse: bool
) -> LayerPages:
    kv_size = (num_pages, shape.num_kv_heads, shape.page_tokens, shape.head_dim)
    index_size = (num_pages, shape.page_tokens, shape.index_dim)
    return LayerPages(
        k_PGBD=torch.empty(kv_size, dtype=shape.dtype, device=device),
        v_PGBD=torch.empty(kv_size, dtype=shape.dtype, device=device),
        index_k_PBD=(
            torch.empty(index_size, dtype=shape.dtype, device=device) if is_sparse else None
        ),
    )
