"""The table of kernels that training runs the model with: every operation differentiable.

The model is the worker's own (`M3Model`); its rows are one batch of equally long sequences, and
its pages are fresh tensors of one step, written once, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional

from m3stack.batch import LayerCache
from m3stack.kernels.interface import (
    HeadNorms,
    Kernels,
    LayerPages,
    PagedRows,
    SharedExpert,
    Weight,
)
from m3stack.kernels.pointwise.reference import swiglu_oai
from m3stack.kernels.reference_table import reference_kernels
from m3stack.models.minimax_m3.config import M3Config
from m3stack.train import hints, sparse
from m3stack.train.pointwise import Pointwise, SparseKernels, plain_pointwise
from m3stack.train.sparse import Support

MASKED_TOKENS = 2048
"""Up to this length sparse attention is a mask over dense scores; beyond, blocks are gathered."""


class Selection(Enum):
    """How a sparse layer chooses its blocks."""

    ALL = "dense warm-up: full attention, and the index loss over all visible keys"
    OWN = "every group its own top-k"
    SHARED = "one top-k for all groups"
    RANDOM = "any blocks"


@dataclass(frozen=True, slots=True)
class Layout:
    """One step's rows: sequences of equal length, back to back.

    Attributes:
        loss_positions_RS: int64, rows whose index loss is computed; None for no index loss.
        has_hints: whether some heads are told where to look, where the batch knows it.
        probe: told (layer's q [R,L,H,D], k [R,G,L,D], index q [R,L,G,D], index k [R,L,D]) of
            every sparse layer in turn.
    """

    num_rows: int
    num_tokens: int
    selection: Selection
    loss_positions_RS: Tensor | None = None
    has_hints: bool = False
    probe: Callable[[Tensor, Tensor, Tensor, Tensor], None] | None = None
    generator: torch.Generator | None = None


@dataclass(slots=True)
class Tape:
    """What the layers of one step leave behind.

    Attributes:
        index_losses: one a sparse layer.
        hint_losses: of the heads that are told where to look.
        loads: tokens that each expert got, [E], one a layer of experts.
    """

    index_losses: list[Tensor] = field(default_factory=list)
    hint_losses: list[Tensor] = field(default_factory=list)
    loads: list[Tensor] = field(default_factory=list)


class Operations:
    """Owns the step that the layers are in.

    Args:
        config: of the model.
        dtype: of keys and values.
        pointwise, kernels: faster ones than the plain.
    """

    def __init__(
        self,
        config: M3Config,
        *,
        dtype: torch.dtype,
        pointwise: Pointwise | None = None,
        kernels: SparseKernels | None = None,
    ) -> None:
        self._config, self._dtype = config, dtype
        self._scale, self._block = config.head_dim**-0.5, config.block_tokens
        self._layout = Layout(0, 0, Selection.ALL)
        self._index_q: Tensor | None = None
        self.tape = Tape()

        self._pointwise = pointwise or plain_pointwise()
        self._kernels = kernels
        self._told: hints.Hints | None = None
        self._sparse_layer = 0

    def begin(
        self, layout: Layout, device: torch.device, told: hints.Hints | None = None
    ) -> tuple[PagedRows, LayerCache]:
        """Starts a step; gives its rows and empty pages for every layer."""
        self._layout, self.tape = layout, Tape()
        self._told, self._sparse_layer = told, 0
        config, block = self._config, self._block
        rows, length = layout.num_rows, layout.num_tokens
        pages = rows * length // block
        paged = PagedRows(
            query_start_S1=torch.arange(rows + 1, device=device, dtype=torch.int32) * length,
            seq_lens_S=torch.full((rows,), length, device=device, dtype=torch.int32),
            page_table_SJ=torch.arange(pages, device=device, dtype=torch.int32).view(rows, -1),
            max_query_len=length,
            max_seq_len=length,
        )
        shape = (pages, config.num_kv_heads, block, config.head_dim)

        def empty(*sizes: int) -> Tensor:
            return torch.empty(sizes, device=device, dtype=self._dtype)

        caches = tuple(
            LayerPages(
                empty(*shape),
                empty(*shape),
                empty(pages, block, config.index_dim) if is_sparse else None,
            )
            for is_sparse in config.sparse_layers
        )
        return paged, caches

    def take_losses(self) -> tuple[list[Tensor], list[Tensor]]:
        """The step's index and hint losses; nothing of its autograd graph is held any more.

        What still held it would tie the next step's gradients to this step's stream.
        """
        losses = self.tape.index_losses, self.tape.hint_losses
        self.tape.index_losses, self.tape.hint_losses, self._index_q = [], [], None
        return losses

    def table(self) -> Kernels:
        """The kernels to build the model with."""
        return replace(
            reference_kernels(),
            name="training",
            gemma_norm=self._pointwise.norm,
            swiglu_oai=swiglu_oai,
            attention_prologue=self._prologue,
            varlen_attention=self._equal_segments,
            paged_attention=self._dense_attention,
            choose_blocks=self._choose_blocks,
            block_attention=self._block_attention,
            route_tokens=self._route_tokens,
            run_experts=self._run_experts,
        )

    def _prologue(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        index_q_TGD: Tensor | None,
        index_k_TD: Tensor | None,
        norms: HeadNorms,
        cos: Tensor,
        sin: Tensor,
        slots_T: Tensor,
        pages: LayerPages,
        index_slots_T: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        block = self._block

        def paged(x_TGD: Tensor) -> Tensor:
            return x_TGD.view(-1, block, *x_TGD.shape[1:]).transpose(1, 2)

        pages.k_PGBD.copy_(paged(self._pointwise.turn(k_TGD, norms.k, norms.eps, cos, sin)))
        pages.v_PGBD.copy_(paged(v_TGD))
        q_THD = self._pointwise.turn(q_THD, norms.q, norms.eps, cos, sin)
        if index_q_TGD is None:
            return q_THD, None
        assert index_k_TD is not None
        assert pages.index_k_PBD is not None
        assert norms.index_q is not None
        assert norms.index_k is not None
        index_k_TD = self._pointwise.turn(index_k_TD[:, None], norms.index_k, norms.eps, cos, sin)[
            :, 0
        ]
        pages.index_k_PBD.copy_(index_k_TD.view(-1, block, index_k_TD.shape[-1]))
        return q_THD, self._pointwise.turn(index_q_TGD, norms.index_q, norms.eps, cos, sin)

    def _equal_segments(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_len: int, scale: float
    ) -> Tensor:
        """All segments of a call have the same length; `model.encode_media` sees to it."""
        q, k, v = (x.view(-1, max_len, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, scale=scale)
        return mixed.transpose(1, 2).flatten(0, 1)

    def _dense_attention(
        self, q_THD: Tensor, pages: LayerPages, rows: PagedRows, scale: float
    ) -> Tensor:
        q, k, v = self._sequences(q_THD), self._keys(pages.k_PGBD), self._keys(pages.v_PGBD)
        if self._told is not None and self._told.has_lags:
            self.tape.hint_losses += hints.lag_losses(q, k, scale)
        return self._attend(q, k, v, None)

    def _choose_blocks(
        self,
        index_q_TGD: Tensor,
        index_k_PBD: Tensor,
        rows: PagedRows,
        num_blocks: int,
        num_local_blocks: int,
    ) -> Tensor:
        """Chosen blocks int64 [R, G, L, K]; an empty K where every block is seen."""
        layout = self._layout
        self._index_q = self._sequences(index_q_TGD)
        index_q, index_k = self._index_q.detach(), self._index_keys(index_k_PBD).detach()
        if layout.selection is Selection.ALL:
            return index_q.new_empty((0,), dtype=torch.int64)
        assert num_local_blocks == 1, num_local_blocks
        with torch.no_grad():
            return sparse.choose(
                index_q,
                index_k,
                block=self._block,
                num_blocks=num_blocks,
                is_shared=layout.selection is Selection.SHARED,
                generator=layout.generator if layout.selection is Selection.RANDOM else None,
                scores=None if self._kernels is None else self._kernels.block_scores,
            )

    def _block_attention(
        self,
        q_THD: Tensor,
        pages: LayerPages,
        blocks_RGLK: Tensor,
        rows: PagedRows,
        scale: float,
    ) -> Tensor:
        layout = self._layout
        q, k, v = self._sequences(q_THD), self._keys(pages.k_PGBD), self._keys(pages.v_PGBD)
        assert self._index_q is not None
        assert pages.index_k_PBD is not None
        index_k = self._index_keys(pages.index_k_PBD)
        if layout.probe is not None:
            layout.probe(q, k, self._index_q, index_k)
        self._sparse_layer += 1
        if self._told is not None and self._sparse_layer <= hints.SPARSE_LAYERS:
            self.tape.hint_losses.append(hints.source_loss(self._told, q, k, scale))
        sees_all = blocks_RGLK.numel() == 0
        if layout.loss_positions_RS is not None:
            self._add_index_loss(q, k, index_k, None if sees_all else blocks_RGLK)
        if sees_all:
            return self._attend(q, k, v, None)
        if self._kernels is not None:
            mixed = self._kernels.block_attention(
                q.to(k.dtype), k, v, blocks_RGLK, scale, self._block
            )
            return mixed.flatten(0, 1)
        if layout.num_tokens <= MASKED_TOKENS:
            return self._attend(q, k, v, self._mask(blocks_RGLK))
        mixed = sparse.block_attention(q.to(k.dtype), k, v, blocks_RGLK, scale, self._block)
        return mixed.flatten(0, 1)

    def _add_index_loss(
        self, q_RLHD: Tensor, k_RGLD: Tensor, index_k_RLD: Tensor, blocks: Tensor | None
    ) -> None:
        positions = self._layout.loss_positions_RS
        assert positions is not None
        assert self._index_q is not None
        pick = torch.arange(positions.shape[0], device=positions.device)[:, None]
        if blocks is not None:
            blocks = blocks.transpose(1, 2)[pick, positions].transpose(1, 2)
        loss = sparse.index_loss(
            self._index_q[pick, positions],
            index_k_RLD,
            q_RLHD.detach()[pick, positions],
            k_RGLD.detach(),
            Support(positions, blocks),
            scale=self._scale,
            block=self._block,
        )
        self.tape.index_losses.append(loss)

    def _attend(
        self, q_RLHD: Tensor, k_RGLD: Tensor, v_RGLD: Tensor, mask: Tensor | None
    ) -> Tensor:
        repeat = q_RLHD.shape[2] // k_RGLD.shape[1]
        k, v = (x.repeat_interleave(repeat, 1) for x in (k_RGLD, v_RGLD))
        q = q_RLHD.transpose(1, 2).to(k.dtype)
        mixed = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self._scale
        )
        return mixed.transpose(1, 2).flatten(0, 1)

    def _mask(self, blocks_RGLK: Tensor) -> Tensor:
        """bool [R, H, L, L]."""
        rows, groups, length, _ = blocks_RGLK.shape
        count = length // self._block
        chosen = blocks_RGLK.new_zeros((rows, groups, length, count + 1), dtype=torch.bool)
        chosen.scatter_(-1, blocks_RGLK.masked_fill(blocks_RGLK < 0, count), True)
        at = torch.arange(length, device=blocks_RGLK.device)
        seen = chosen[..., :count].repeat_interleave(self._block, -1) & (at <= at[:, None])
        return seen.repeat_interleave(self._config.num_heads // groups, 1)

    def _route_tokens(
        self, x_TM: Tensor, router_EM: Tensor, bias_E: Tensor, top_k: int
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(x_TM.device.type, enabled=False):
            scores_TE = functional.linear(x_TM.to(router_EM.dtype), router_EM).sigmoid()
            ids_Tk = (scores_TE + bias_E).topk(top_k, dim=-1).indices
            weights_Tk = scores_TE.gather(-1, ids_Tk)
            weights_Tk = weights_Tk / weights_Tk.sum(-1, keepdim=True)
        with torch.no_grad():
            chosen = ids_Tk.flatten()
            load_E = torch.zeros_like(bias_E).index_add_(
                0, chosen, torch.ones_like(chosen, dtype=bias_E.dtype)
            )
            self.tape.loads.append(load_E)
        return ids_Tk, weights_Tk

    def _run_experts(
        self,
        x_TM: Tensor,
        gate_up_EfM: Weight,
        down_EMF: Weight,
        ids_Tk: Tensor,
        weights_Tk: Tensor,
        alpha: float,
        limit: float,
        *,
        shared: SharedExpert | None = None,
        factor: float = 1.0,
    ) -> Tensor:
        """All experts for all tokens in two products; what was not chosen has weight zero."""
        assert isinstance(gate_up_EfM, Tensor)
        assert isinstance(down_EMF, Tensor)
        experts, double, width = gate_up_EfM.shape
        weights_TE = torch.zeros(
            (x_TM.shape[0], experts), device=x_TM.device, dtype=weights_Tk.dtype
        ).scatter(-1, ids_Tk, weights_Tk * factor)
        gate_up, down = gate_up_EfM.reshape(-1, width), down_EMF.transpose(0, 1).flatten(1)
        if shared is not None:
            assert isinstance(shared.gate_up_fM, Tensor)
            assert isinstance(shared.down_MF, Tensor)
            gate_up = torch.cat([gate_up, shared.gate_up_fM])
            down = torch.cat([down, shared.down_MF], dim=1)
            weights_TE = functional.pad(weights_TE, (0, 1), value=1.0)
        hidden = functional.linear(x_TM, gate_up).view(x_TM.shape[0], -1, double)
        acted = self._pointwise.weighted_swiglu(hidden, weights_TE, alpha, limit)
        return functional.linear(acted.flatten(1), down)

    def _sequences(self, x_THD: Tensor) -> Tensor:
        return x_THD.view(self._layout.num_rows, self._layout.num_tokens, *x_THD.shape[1:])

    def _keys(self, pages_PGBD: Tensor) -> Tensor:
        """[R, G, L, D]."""
        _, groups, block, dim = pages_PGBD.shape
        by_row = pages_PGBD.view(self._layout.num_rows, -1, groups, block, dim)
        return by_row.transpose(1, 2).reshape(self._layout.num_rows, groups, -1, dim)

    def _index_keys(self, pages_PBD: Tensor) -> Tensor:
        return pages_PBD.view(self._layout.num_rows, self._layout.num_tokens, -1)
