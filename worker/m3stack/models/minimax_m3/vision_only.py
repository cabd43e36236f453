"""MiniMax-M3's vision tower and projector alone, for workers that only encode media."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from m3stack.batch import DeviceBatch, LayerCache, PatchBatch
from m3stack.kernels.interface import Kernels
from m3stack.layers import Place
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.ranks import WHOLE
from m3stack.models.minimax_m3.slices import rank_slices
from m3stack.models.minimax_m3.vision import Projector, VisionTower
from m3stack.models.minimax_m3.weights import Progress, fill, open_checkpoint


class VisionModel(nn.Module):
    """The vision side of `M3Model`, under the same parameter names; text costs nothing here."""

    def __init__(self, config: M3Config, *, kernels: Kernels, place: Place) -> None:
        super().__init__()
        self.config = config
        self.vision = VisionTower(config.vision, kernels=kernels, place=place)
        self.projector = Projector(config.vision, config.hidden_size, place=place)

    def forward(self, batch: DeviceBatch, caches: LayerCache) -> Tensor:
        """Logits that say nothing: requests come here for their media."""
        rows = batch.sample_rows_S
        return torch.zeros(len(rows), self.config.vocab_size, device=rows.device)

    def encode_media(self, batch: PatchBatch) -> list[Tensor]:
        """As `M3Model.encode_media`."""
        features = self.projector(self.vision(batch))
        square = self.config.vision.merge_size**2
        return list(features.split([t * h * w // square for t, h, w in batch.grids_thw]))


def load_vision(
    path: Path | str,
    *,
    config: M3Config,
    kernels: Kernels,
    place: Place,
    progress: Progress,
) -> VisionModel:
    """The vision side of a checkpoint; of its files no other bytes are read.

    Raises:
        StartupError: as `weights.load_model`.
    """
    checkpoint = open_checkpoint(path, config)
    model = VisionModel(config, kernels=kernels, place=place)
    targets = {name: parameter.detach() for name, parameter in model.named_parameters()}
    slices = {
        name: item for name, item in rank_slices(config, WHOLE).items() if item.parameter in targets
    }
    assert {item.parameter for item in slices.values()} == set(targets)
    fill(checkpoint, slices, targets, progress)
    return model
