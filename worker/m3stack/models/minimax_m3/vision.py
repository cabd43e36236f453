"""The vision tower: u8 patches in, one vector of text width for every merged square out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from m3stack.batch import PatchBatch
from m3stack.kernels.interface import Kernels
from m3stack.kernels.pointwise.reference import rotate
from m3stack.layers import LayerNorm, Linear, Place
from m3stack.models.minimax_m3.config import VisionConfig

Grid = tuple[int, int, int]


class VisionTower(nn.Module):
    """Patch embedding and transformer layers with attention inside segments.

    A still is one segment; a clip is cut into segments of at most `segment_max_patches` temporal
    patches, which do not see each other.
    """

    def __init__(self, config: VisionConfig, *, kernels: Kernels, place: Place) -> None:
        super().__init__()
        self._config = config
        self._dtype = place.dtype
        self.patch_embedding = place.parameter(
            config.hidden_size, config.patch_values, dtype=torch.float32
        )
        self.input_norm = LayerNorm(place, config.hidden_size, config.layer_norm_eps)
        self.layers = nn.ModuleList(
            VisionLayer(config, kernels=kernels, place=place) for _ in range(config.num_layers)
        )

    def forward(self, batch: PatchBatch) -> Tensor:
        """Embeds and encodes all items of a batch.

        Returns:
            [N, width] in the model's dtype, items back to back, patches in their order.
        """
        config = self._config
        pixels_N = torch.cat(
            [
                normalise(patches, frames, batch, config)
                for patches, frames in zip(batch.patches, batch.frames_per_patch, strict=True)
            ]
        )
        cos, sin = rotary(batch.grids_thw, config, pixels_N.device)
        lengths = segment_lengths(batch.grids_thw, config)
        cu_seqlens = torch.tensor([0, *lengths], device=cos.device).cumsum(0).to(torch.int32)
        return self.encode(pixels_N, cos, sin, cu_seqlens, max(lengths))

    def encode(
        self, pixels_N: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, max_len: int
    ) -> Tensor:
        """The same from normalised patches, their rotary and the bounds of the segments."""
        x = functional.linear(pixels_N.to(self.patch_embedding.dtype), self.patch_embedding)
        x = self.input_norm(x.to(self._dtype))
        for layer in self.layers:
            x = layer(x, cos, sin, cu_seqlens, max_len)
        return x


class VisionLayer(nn.Module):
    """Pre-norm transformer layer: full attention inside segments, then an MLP."""

    def __init__(self, config: VisionConfig, *, kernels: Kernels, place: Place) -> None:
        super().__init__()
        self._attend = kernels.varlen_attention
        self._num_heads, self._head_dim = config.num_heads, config.head_dim
        width, inner = config.hidden_size, config.intermediate_size
        self.attention_norm = LayerNorm(place, width, config.layer_norm_eps)
        self.in_proj = Linear(place, width, 3 * width, bias=True)
        self.out_proj = Linear(place, width, width, bias=True)
        self.mlp_norm = LayerNorm(place, width, config.layer_norm_eps)
        self.up = Linear(place, width, inner, bias=True)
        self.down = Linear(place, inner, width, bias=True)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, max_len: int
    ) -> Tensor:
        qkv = self.in_proj(self.attention_norm(x)).view(-1, 3, self._num_heads, self._head_dim)
        q, k, v = qkv.unbind(1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = self._attend(q, k, v, cu_seqlens, max_len, self._head_dim**-0.5)
        x = x + self.out_proj(mixed.reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))


class Projector(nn.Module):
    """Two MLPs: every patch to text width, then every square of patches to one vector."""

    def __init__(self, config: VisionConfig, text_width: int, *, place: Place) -> None:
        super().__init__()
        inner, square = config.projector_hidden_size, config.merge_size**2
        self._merged_width = square * text_width
        self.patch_up = Linear(place, config.hidden_size, inner, bias=True)
        self.patch_down = Linear(place, inner, text_width, bias=True)
        self.merge_up = Linear(place, self._merged_width, inner, bias=True)
        self.merge_down = Linear(place, inner, text_width, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[N, width] -> [N / merge^2, text width]; the squares' patches stand side by side."""
        x = self.patch_down(functional.gelu(self.patch_up(x)))
        x = x.view(-1, self._merged_width)
        return self.merge_down(functional.gelu(self.merge_up(x)))


def normalise(patches: Tensor, frames: int, batch: PatchBatch, config: VisionConfig) -> Tensor:
    """`(x - 255 mean) / (255 std)` per channel, and a still's one frame repeated over time.

    Args:
        patches: uint8 [n, channels * frames * patch_size^2].
        frames: stored in each row: 1 or `temporal_patch_size`.

    Returns:
        fp32 [n, patch_values].
    """
    assert frames in (1, config.temporal_patch_size), frames
    shape = (patches.shape[0], config.num_channels, frames, config.patch_size**2)
    scale = torch.tensor((batch.mean, batch.std), device=patches.device).view(2, -1, 1, 1) * 255
    pixels = (patches.view(shape).float() - scale[0]) / scale[1]
    pixels = pixels.expand(-1, -1, config.temporal_patch_size, -1) if frames == 1 else pixels
    return pixels.reshape(shape[0], config.patch_values)


def segments(grid: Grid, config: VisionConfig) -> list[Grid]:
    """The grids of an item's attention segments, in order."""
    frames, height, width = grid
    longest = config.segment_max_patches
    return [(min(longest, frames - start), height, width) for start in range(0, frames, longest)]


def segment_lengths(grids: Sequence[Grid], config: VisionConfig) -> list[int]:
    """Patches of every segment of every item, in order."""
    return [t * h * w for grid in grids for t, h, w in segments(grid, config)]


def rotary(
    grids: Sequence[Grid], config: VisionConfig, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 [N, 3 * frequencies]: time, row and column of every patch.

    Time restarts with every segment. Patches stand square by square, as they are merged.
    Source: transformers 5.24 `MiniMaxM3VLVisionRotaryEmbedding`.
    """
    axis_width = 2 * (config.head_dim // 3 // 2)
    exponents = torch.arange(0, axis_width, 2, device=device, dtype=torch.float32) / axis_width
    frequencies = 1.0 / config.rope_theta**exponents
    coordinates = torch.cat(
        [
            patch_coordinates(segment, config.merge_size, device)
            for grid in grids
            for segment in segments(grid, config)
        ]
    )
    angles = (coordinates[:, :, None] * frequencies).flatten(1)
    return angles.cos(), angles.sin()


def patch_coordinates(grid: Grid, merge: int, device: torch.device) -> Tensor:
    """(time, row, column) of every patch of a segment, fp32 [t*h*w, 3], square by square."""
    frames, height, width = grid
    assert height % merge == 0, f"{height} rows of patches are no multiple of {merge}"
    assert width % merge == 0, f"{width} columns of patches are no multiple of {merge}"
    ranges = (torch.arange(size, device=device) for size in grid)
    coordinates = torch.stack(torch.meshgrid(*ranges, indexing="ij"), dim=-1)
    squares = coordinates.view(frames, height // merge, merge, width // merge, merge, 3)
    return squares.transpose(2, 3).reshape(-1, 3).float()
