"""Memory of the paged cache: K, V and index-K tensors of every layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from m3stack.batch import LayerCache
from m3stack.kernels.interface import LayerPages
from m3stack.kernels.msa.index_copy import page_bytes


@dataclass(frozen=True, slots=True)
class PageShape:
    """What one page holds on this rank.

    Attributes:
        sparse_layers: one entry a layer; True where there is an index key.
        num_kv_heads: KV groups G.
        head_dim, index_dim: widths of a K or V head and of the index key.
        page_tokens: tokens B of a page.
        dtype: of all three, except where `kv_dtype` says otherwise.
        index_rank, index_ranks: which part of the index keys stands here: those of every
            `index_ranks`-th page, beginning with page `index_rank`.
        index_copy: whether the index keys have their int8 copy beside them.
        kv_dtype: of K and V on sparse layers; None: `dtype`.
    """

    sparse_layers: tuple[bool, ...]
    num_kv_heads: int
    head_dim: int
    index_dim: int
    page_tokens: int
    dtype: torch.dtype
    index_rank: int = 0
    index_ranks: int = 1
    index_copy: bool = False
    kv_dtype: torch.dtype | None = None

    def layer_dtype(self, is_sparse: bool) -> torch.dtype:
        """What K and V of a layer are kept in."""
        return self.kv_dtype if is_sparse and self.kv_dtype is not None else self.dtype

    @property
    def bytes_per_page(self) -> int:
        """Bytes that one page takes over all layers; of index keys held in parts, the mean."""
        return self._bytes(self.index_ranks)

    @property
    def whole_bytes_per_page(self) -> int:
        """The same with all index keys of the page."""
        return self._bytes(1)

    def _bytes(self, index_ranks: int) -> int:
        values = 2 * self.num_kv_heads * self.head_dim
        keys_values = values * sum(map(self._item_bytes, self.sparse_layers))
        index_values = -(-self.index_dim * sum(self.sparse_layers) // index_ranks)
        token_bytes = keys_values + index_values * self.dtype.itemsize
        return token_bytes * self.page_tokens + self.copy_bytes_per_page * sum(self.sparse_layers)

    def _item_bytes(self, is_sparse: bool) -> int:
        return self.layer_dtype(is_sparse).itemsize

    @property
    def copy_bytes_per_page(self) -> int:
        """Bytes of one layer's copy of a page's index keys."""
        return page_bytes(self.page_tokens, self.index_dim) if self.index_copy else 0

    def index_page(self, page: int) -> int | None:
        """Row of the index-key tensors that belongs to a page; None where another rank has it."""
        row, rank = divmod(page, self.index_ranks)
        return row if rank == self.index_rank else None

    def num_index_pages(self, num_pages: int) -> int:
        """Rows of the index-key tensors; held in parts, they end in one that belongs to no page."""
        if self.index_ranks == 1:
            return num_pages
        return -(-num_pages // self.index_ranks) + 1


class KvPool:
    """The pages of all layers; page p is row p of every tensor.

    Of index keys held in parts, `PageShape.index_page` says the row, and the last row is all NaN,
    so that whatever reads it finds nothing worth choosing.

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
    index_k_PBD = index_copy_PX = None
    if is_sparse:
        index_size = (shape.num_index_pages(num_pages), shape.page_tokens, shape.index_dim)
        index_k_PBD = torch.empty(index_size, dtype=shape.dtype, device=device)
        if shape.index_ranks > 1:
            index_k_PBD[-1] = float("nan")
        if shape.index_copy:
            copy_size = (index_size[0], shape.copy_bytes_per_page)
            index_copy_PX = torch.empty(copy_size, dtype=torch.uint8, device=device)
    kv_dtype = shape.layer_dtype(is_sparse)
    return LayerPages(
        k_PGBD=torch.empty(kv_size, dtype=kv_dtype, device=device),
        v_PGBD=torch.empty(kv_size, dtype=kv_dtype, device=device),
        index_k_PBD=index_k_PBD,
        index_copy_PX=index_copy_PX,
    )
