"""The worker's model with parameters that learn, and its weights to and from checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from m3stack.batch import DeviceBatch, MediaRows
from m3stack.layers import Place, TextLinear
from m3stack.models.minimax_m3 import tiny
from m3stack.models.minimax_m3.attention import SelfAttention
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.layout import checkpoint_layout
from m3stack.models.minimax_m3.model import M3Model
from m3stack.models.minimax_m3.vision import Grid, rotary, segments
from m3stack.train.batches import Batch
from m3stack.train.hints import Hints
from m3stack.train.operations import Layout, Operations
from m3stack.train.pointwise import Pointwise, SparseKernels


class IndexApartLinear(nn.Module):
    """The fused input product, its last rows fed a copy of `x` that takes no gradient.

    So the index branch learns from its own loss alone, and the backbone not from that.
    """

    def __init__(self, fused: TextLinear, num_main_rows: int) -> None:
        super().__init__()
        self.weight = fused.weight
        self._num_main_rows = num_main_rows

    def forward(self, x: Tensor) -> Tensor:
        main, index = self.weight.tensor_split([self._num_main_rows])
        return torch.cat([functional.linear(x, main), functional.linear(x.detach(), index)], dim=-1)


class Student:
    """A model in training.

    Args:
        config: of the checkpoint.
        device: where it lives; parameters are fp32 and compute in bf16 on a GPU.
        pointwise, kernels: see `Operations`.
    """

    def __init__(
        self,
        config: M3Config,
        device: torch.device,
        *,
        pointwise: Pointwise | None = None,
        kernels: SparseKernels | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config, self.device = config, device
        self.autocast = torch.autocast(device.type, torch.bfloat16, device.type == "cuda")
        self._key_dtype = torch.bfloat16 if device.type == "cuda" else dtype
        self.operations = Operations(
            config, dtype=self._key_dtype, pointwise=pointwise, kernels=kernels
        )
        self.model = M3Model(config, kernels=self.operations.table(), place=Place(device, dtype))
        main_rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        attentions = [m for m in self.model.modules() if isinstance(m, SelfAttention)]
        for attention, is_sparse in zip(attentions, config.sparse_layers, strict=True):
            if is_sparse:
                apart = IndexApartLinear(attention.in_proj, main_rows)
                attention.add_module("in_proj", apart)
        for name, parameter in self.model.named_parameters():
            # the router's bias follows the experts' loads, not a gradient
            parameter.requires_grad_(not name.endswith("router_bias"))
        self._mean, self._std = (
            torch.tensor(tiny.IMAGE_PREPROCESSOR[name], device=device).view(-1, 1, 1) * 255
            for name in ("image_mean", "image_std")
        )

    def logits(self, batch: Batch, layout: Layout, rows_S: Tensor | None = None) -> Tensor:
        """fp32 logits of the batch's loss rows, or of other rows; the batch is on the device."""
        told = None
        if layout.has_hints:
            is_text = batch.kind.num_media_rows == 0
            told = Hints(batch.told_rows_N, batch.sources_N, has_lags=is_text)
        rows, caches = self.operations.begin(layout, self.device, told)
        ids_T = batch.ids_T
        step = DeviceBatch(
            token_ids_T=ids_T,
            positions_T=torch.arange(layout.num_tokens, device=self.device).repeat(layout.num_rows),
            slots_T=torch.arange(ids_T.shape[0], device=self.device),
            rows=rows,
            sample_rows_S=batch.loss_rows_S if rows_S is None else rows_S,
            media=self._media(batch),
        )
        return self.model(step, caches)

    def _media(self, batch: Batch) -> tuple[MediaRows, ...]:
        """Features of all items and the rows they replace; items of equally many patches go
        through the tower together.
        """
        by_length: dict[int, list[Grid]] = {}
        for grid in batch.patches:
            by_length.setdefault(grid[0] * grid[1] * grid[2], []).append(grid)
        return tuple(
            MediaRows(
                torch.cat([batch.media_rows[grid] for grid in grids]),
                self._features([(grid, batch.patches[grid]) for grid in grids], length),
            )
            for length, grids in by_length.items()
        )

    def _features(self, items: list[tuple[Grid, Tensor]], length: int) -> Tensor:
        """Features of items of `length` patches each, back to back."""
        vision = self.config.vision
        turns: list[tuple[Tensor, Tensor]] = []
        for grid, patches in items:
            assert len(segments(grid, vision)) == 1, f"{grid} has several segments"
            cos, sin = rotary([grid], vision, self.device)
            count = patches.shape[0] // length
            turns.append((cos.repeat(count, 1), sin.repeat(count, 1)))
        cos, sin = (torch.cat(parts) for parts in zip(*turns, strict=True))
        pixels = torch.cat([self._pixels(patches) for _, patches in items])
        count = pixels.shape[0] // length
        bounds = torch.arange(count + 1, device=self.device, dtype=torch.int32) * length
        return self.model.projector(self.model.vision.encode(pixels, cos, sin, bounds, length))

    def _pixels(self, patches: Tensor) -> Tensor:
        """Normalised as in `vision.normalise`, without a copy from the host."""
        vision = self.config.vision
        channels, square = vision.num_channels, vision.patch_size**2
        pixels = patches.view(-1, channels, patches.shape[1] // (channels * square), square)
        pixels = (pixels.float() - self._mean) / self._std
        if pixels.shape[2] == 1:
            pixels = pixels.expand(-1, -1, vision.temporal_patch_size, -1)
        return pixels.reshape(-1, vision.patch_values)

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Fills the parameters from tensors by their released names."""
        parameters = dict(self.model.named_parameters())
        for name, placement in checkpoint_layout(self.config).items():
            target = parameters[placement.parameter]
            if placement.expert is not None:
                target = target[placement.expert]
            rows = weights[name].to(target.device, target.dtype)
            if rows.dim() > target.dim():
                rows = rows.flatten(1)
            target[placement.first_row : placement.first_row + rows.shape[0]].copy_(rows)

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """The parameters by their released names, on the CPU in fp32."""
        parameters = dict(self.model.named_parameters())
        named: dict[str, Tensor] = {}
        for name, placement in checkpoint_layout(self.config).items():
            source = parameters[placement.parameter]
            if placement.expert is not None:
                source = source[placement.expert]
            first, count = placement.first_row, placement.shape[0]
            named[name] = source[first : first + count].float().cpu().reshape(placement.shape)
        return named


def write_checkpoint(student: Student, config: Mapping[str, Any], directory: Path) -> None:
    """Writes model.safetensors, whole or not at all."""
    unfinished = directory / "unfinished"
    unfinished.mkdir(parents=True, exist_ok=True)
    tiny.save_weights(student.weights(), config, unfinished)
    (unfinished / "model.safetensors").replace(directory / "model.safetensors")
    unfinished.rmdir()
