"""Self-attention of one layer: dense, or sparse over the blocks its index branch chooses."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from m3stack.kernels.interface import HeadNorms, Kernels, LayerPages, PagedRows
from m3stack.layers import Place, TextLinear
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.index_parts import IndexParts, StepPart


@dataclass(frozen=True, slots=True)
class StepRows:
    """What every layer of a step needs to know about its rows.

    Attributes:
        rows: how they divide into sequences, and the pages of those.
        slots_T: int64, where each row's keys go.
        cos, sin: fp32 [T, R/2], rotary of each row.
        part: of the index keys, where ranks hold them in parts.
    """

    rows: PagedRows
    slots_T: Tensor
    cos: Tensor
    sin: Tensor
    part: StepPart | None = None


class SelfAttention(nn.Module):
    """Grouped-query attention with per-head norms and partial rotary.

    On sparse layers an index branch of one query head per KV group and a single key head chooses
    the blocks that each row attends to.

    Args:
        config: this rank's part of the model.
        index_heads: index queries that are computed here: one for each of the rank's KV groups, or
            those of all groups where ranks hold the index keys in parts.
        parts: how the ranks then choose.
    """

    def __init__(
        self,
        config: M3Config,
        layer: int,
        *,
        index_heads: int,
        parts: IndexParts | None,
        kernels: Kernels,
        place: Place,
    ) -> None:
        super().__init__()
        self._kernels, self._index_parts = kernels, parts
        self._index_heads = index_heads
        self._config = config
        self._is_sparse = config.sparse_layers[layer]
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        widths = [queries, keys, keys]
        self.q_norm = place.parameter(config.head_dim)
        self.k_norm = place.parameter(config.head_dim)
        self.index_q_norm = self.index_k_norm = None
        if self._is_sparse:
            widths += [index_heads * config.index_dim, config.index_dim]
            self.index_q_norm = place.parameter(config.index_dim)
            self.index_k_norm = place.parameter(config.index_dim)
        self._widths = widths
        # q, k, v and, on sparse layers, index q and index k: one product
        self.in_proj = TextLinear(kernels, place, config.hidden_size, sum(widths))
        self.out_proj = TextLinear(kernels, place, queries, config.hidden_size)

    @property
    def is_sparse(self) -> bool:
        """Whether it attends to chosen blocks only."""
        return self._is_sparse

    @property
    def num_groups(self) -> int:
        """KV heads of this rank."""
        return self._config.num_kv_heads

    @property
    def query_width(self) -> int:
        """Columns of the output projection."""
        return self._widths[0]

    @property
    def value_rows(self) -> slice:
        """The rows of `in_proj` that give the values, KV head by KV head."""
        first = self._widths[0] + self._widths[1]
        return slice(first, first + self._widths[2])

    def forward(self, x_TM: Tensor, step: StepRows, pages: LayerPages) -> Tensor:
        """Writes the rows' keys and values into the cache, then attends.

        Returns:
            [T, M].
        """
        config = self._config
        num_tokens = x_TM.shape[0]
        q, k, v, *index = self.in_proj(x_TM).split(self._widths, dim=-1)
        index_q_TGD = index_k_TD = None
        if self._is_sparse:
            index_q_TGD = index[0].view(num_tokens, self._index_heads, config.index_dim)
            index_k_TD = index[1]
        norms = HeadNorms(
            q=self.q_norm,
            k=self.k_norm,
            index_q=self.index_q_norm,
            index_k=self.index_k_norm,
            eps=config.rms_norm_eps,
        )
        q_THD, index_q_TGD = self._kernels.attention_prologue(
            q.view(num_tokens, config.num_heads, config.head_dim),
            k.view(num_tokens, config.num_kv_heads, config.head_dim),
            v.view(num_tokens, config.num_kv_heads, config.head_dim),
            index_q_TGD,
            index_k_TD,
            norms,
            step.cos,
            step.sin,
            step.slots_T,
            pages,
            None if step.part is None else step.part.slots_T,
        )
        out_THD = self._attend(q_THD, index_q_TGD, pages, step)
        return self.out_proj(out_THD.reshape(num_tokens, -1))

    def _attend(
        self, q_THD: Tensor, index_q_TGD: Tensor | None, pages: LayerPages, step: StepRows
    ) -> Tensor:
        rows, scale = step.rows, self._config.head_dim**-0.5
        if index_q_TGD is None:
            return self._kernels.paged_attention(q_THD, pages, rows, scale)
        blocks_GTK = self._choose(index_q_TGD, pages, step)
        return self._kernels.block_attention(q_THD, pages, blocks_GTK, rows, scale)

    def _choose(self, index_q_TGD: Tensor, pages: LayerPages, step: StepRows) -> Tensor:
        index_k_PBD = pages.index_k_PBD
        assert index_k_PBD is not None, "a sparse layer needs index-key pages"
        if self._index_parts is not None:
            assert step.part is not None
            return self._index_parts.choose_blocks(index_q_TGD, index_k_PBD, step.part, step.rows)
        copy = () if pages.index_copy_PX is None else (pages.index_copy_PX,)
        return self._kernels.choose_blocks(
            index_q_TGD,
            index_k_PBD,
            step.rows,
            self._config.topk_blocks,
            self._config.num_local_blocks,
            *copy,
        )
