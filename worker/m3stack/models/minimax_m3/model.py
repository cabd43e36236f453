"""The whole of MiniMax-M3: vision tower, text stack and head."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from m3stack.batch import DeviceBatch, LayerCache, PatchBatch
from m3stack.kernels.interface import Kernels, LayerPages
from m3stack.layers import Linear, Place
from m3stack.models.minimax_m3.attention import SelfAttention, StepRows
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.moe import FeedForward, MixtureOfExperts
from m3stack.models.minimax_m3.vision import Projector, VisionTower
from m3stack.parallel import ALONE, Mesh


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the stream."""

    def __init__(
        self, config: M3Config, layer: int, *, kernels: Kernels, place: Place, mesh: Mesh
    ) -> None:
        super().__init__()
        self._mesh = mesh
        self._norm, self._eps = kernels.gemma_norm, config.rms_norm_eps
        self.input_norm = place.parameter(config.hidden_size)
        self.attention = SelfAttention(config, layer, kernels=kernels, place=place)
        self.middle_norm = place.parameter(config.hidden_size)
        self.feed_forward = (
            MixtureOfExperts(config, kernels=kernels, place=place)
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
    """

    def __init__(
        self, config: M3Config, *, kernels: Kernels, place: Place, mesh: Mesh = ALONE
    ) -> None:
        super().__init__()
        self.config = config
        self._kernels = kernels
        self._mesh = mesh
        own = config.per_rank(mesh.size)
        self.embedding = place.parameter(own.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(own, layer, kernels=kernels, place=place, mesh=mesh)
            for layer in range(config.num_layers)
        )
        self.norm = place.parameter(config.hidden_size)
        self.head = Linear(place, config.hidden_size, own.vocab_size)
        self.vision = VisionTower(config.vision, kernels=kernels, place=place)
        self.projector = Projector(config.vision, config.hidden_size, place=place)
        self._frequencies = config.rope.frequencies(config.rotary_dim, place.device)

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
        step = StepRows(batch.rows, batch.slots_T, angles.cos() * factor, angles.sin() * factor)
        for layer, pages in zip(self.layers, caches, strict=True):
            x_TM = layer(x_TM, step, pages)
        x_SM = x_TM.index_select(0, batch.sample_rows_S)
        x_SM = self._kernels.gemma_norm(x_SM, self.norm, self.config.rms_norm_eps)
        return self._mesh.all_gather_columns(self.head(x_SM)).float()

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
