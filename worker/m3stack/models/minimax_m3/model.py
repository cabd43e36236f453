"""The whole of MiniMax-M3: vision tower, text stack and head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from m3stack.batch import DeviceBatch, LayerCache, PatchBatch
from m3stack.kernels.interface import Kernels, LayerPages
from m3stack.layers import Linear, Place
from m3stack.models.minimax_m3.attention import SelfAttention, StepRows
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.index_parts import IndexParts, StepPart
from m3stack.models.minimax_m3.moe import FeedForward, MixtureOfExperts
from m3stack.models.minimax_m3.ranks import WHOLE, Rank, Span, expert_span
from m3stack.models.minimax_m3.vision import Projector, VisionTower
from m3stack.parallel import ALONE, Mesh


@dataclass(frozen=True, slots=True)
class RankParts:
    """What layers must know of the rank they stand on.

    Attributes:
        config: the sizes it computes with.
        experts: those whose weights it has.
        index_heads: index queries it computes.
        index: how ranks choose blocks whose index keys they hold in parts.
    """

    config: M3Config
    experts: Span
    index_heads: int
    index: IndexParts | None
    mesh: Mesh


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the stream."""

    def __init__(self, parts: RankParts, layer: int, *, kernels: Kernels, place: Place) -> None:
        super().__init__()
        config = parts.config
        self._mesh = parts.mesh
        self._norm, self._eps = kernels.gemma_norm, config.rms_norm_eps
        self.input_norm = place.parameter(config.hidden_size)
        self.attention = SelfAttention(
            config,
            layer,
            index_heads=parts.index_heads,
            parts=parts.index,
            kernels=kernels,
            place=place,
        )
        self.middle_norm = place.parameter(config.hidden_size)
        self.feed_forward = (
            MixtureOfExperts(config, parts.experts, kernels=kernels, place=place)
            if config.moe_layers[layer]
            else FeedForward(config, config.dense_size, kernels=kernels, place=place)
        )

    def forward(self, x_TM: Tensor, step: StepRows, pages: LayerPages) -> Tensor:
        # every rank's heads and inner channels give a part of the sum
        mixed_TM = self.attention(self._norm(x_TM, self.input_norm, self._eps), step, pages)
        x_TM = x_TM + self._mesh.all_reduce(mixed_TM)
        fed_TM = self.feed_forward(self._norm(x_TM, self.middle_norm, self._eps))
        return x_TM + self._mesh.all_reduce(fed_TM)


class M3Model(nn.Module):
    """MiniMax-M3, its parameters uninitialised until `weights.load_model` fills them.

    Args:
        config: of the checkpoint.
        kernels: what every layer computes with.
        place: device and dtype of the parameters; router and patch embedding stay fp32.
        mesh: the ranks that split the text layers, embedding and head.
        rank: what this one of them holds.
    """

    def __init__(
        self,
        config: M3Config,
        *,
        kernels: Kernels,
        place: Place,
        mesh: Mesh = ALONE,
        rank: Rank = WHOLE,
    ) -> None:
        super().__init__()
        assert (rank.tp_rank, rank.tp_size) == (mesh.rank, mesh.size), (rank, mesh.rank, mesh.size)
        self.config = config
        self._kernels = kernels
        self._mesh = mesh
        own = config.per_rank(mesh.size, width_ranks=rank.width_ranks)
        self._index_parts = None
        if rank.index_in_parts:
            self._index_parts = IndexParts(config, kernels=kernels, mesh=mesh, device=place.device)
        parts = RankParts(
            config=own,
            experts=expert_span(config.num_experts, rank),
            index_heads=(config if rank.index_in_parts else own).num_kv_heads,
            index=self._index_parts,
            mesh=mesh,
        )
        self.embedding = place.parameter(own.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(parts, layer, kernels=kernels, place=place)
            for layer in range(config.num_layers)
        )
        self.norm = place.parameter(config.hidden_size)
        self.head = Linear(place, config.hidden_size, own.vocab_size)
        self.vision = VisionTower(config.vision, kernels=kernels, place=place)
        self.projector = Projector(config.vision, config.hidden_size, place=place)
        self._frequencies = config.rope.frequencies(config.rotary_dim, place.device)

    @property
    def kernels(self) -> Kernels:
        """What it computes with."""
        return self._kernels

    def forward(self, batch: DeviceBatch, caches: LayerCache) -> Tensor:
        """Runs one step and writes its keys into the cache.

        Args:
            batch: the rows; see `DeviceBatch`.
            caches: one entry a layer, written in place.

        Returns:
            fp32 logits [len(sample_rows_S), vocab].
        """
        x_TM = self._embed(batch.token_ids_T)
        for media in batch.media:
            x_TM = x_TM.index_copy(0, media.rows_N, media.features_NM.to(x_TM.dtype))
        # positions are exact in fp32 up to 2^24
        angles = batch.positions_T[:, None].float() * self._frequencies
        factor = self.config.rope.attention_factor
        cos, sin = angles.cos() * factor, angles.sin() * factor
        step = StepRows(batch.rows, batch.slots_T, cos, sin, self._part(batch, caches))
        for layer, pages in zip(self.layers, caches, strict=True):
            x_TM = layer(x_TM, step, pages)
        x_SM = x_TM.index_select(0, batch.sample_rows_S)
        x_SM = self._kernels.gemma_norm(x_SM, self.norm, self.config.rms_norm_eps)
        return self._mesh.all_gather_columns(self.head(x_SM)).float()

    def _part(self, batch: DeviceBatch, caches: LayerCache) -> StepPart | None:
        """What the step is on this rank's part of the index keys, if they are held in parts."""
        index_keys = (pages.index_k_PBD for pages in caches)
        first = next((part for part in index_keys if part is not None), None)
        if self._index_parts is None or first is None:
            return None
        return self._index_parts.of_step(batch.rows, batch.slots_T, first)

    def _embed(self, token_ids_T: Tensor) -> Tensor:
        """[T, M]; each rank has the rows of its own share of the vocabulary."""
        if self._mesh.size == 1:
            return functional.embedding(token_ids_T, self.embedding)
        num_rows = self.embedding.shape[0]
        rows_T = token_ids_T - self._mesh.rank * num_rows
        is_own_T = (rows_T >= 0) & (rows_T < num_rows)
        x_TM = functional.embedding(rows_T.clamp(0, num_rows - 1), self.embedding)
        return self._mesh.all_reduce(x_TM.masked_fill(~is_own_T[:, None], 0))

    def encode_media(self, batch: PatchBatch) -> list[Tensor]:
        """Vision features of every item of a batch.

        Returns:
            One [t*h*w / merge^2, M] an item, in the model's dtype.
        """
        features = self.projector(self.vision(batch))
        square = self.config.vision.merge_size**2
        return list(features.split([t * h * w // square for t, h, w in batch.grids_thw]))
