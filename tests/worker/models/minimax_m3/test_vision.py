"""Order, coordinates and normalisation of patches, spelled out."""

from __future__ import annotations

import pytest
import torch

from m3stack.models.minimax_m3.config import M3Config, VisionConfig
from m3stack.models.minimax_m3.vision import (
    normalise,
    patch_coordinates,
    rotary,
    segment_lengths,
    segments,
)
from tests.parity import golden
from tests.worker.models.minimax_m3.released import released_config

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def vision() -> VisionConfig:
    return M3Config.from_object(released_config()).vision


def test_clips_are_cut_into_segments_of_four(vision: VisionConfig) -> None:
    assert segments((9, 4, 6), vision) == [(4, 4, 6), (4, 4, 6), (1, 4, 6)]
    assert segments((1, 2, 2), vision) == [(1, 2, 2)]
    assert segment_lengths([(6, 2, 4), (1, 2, 2)], vision) == [32, 16, 4]


def test_patches_are_listed_square_by_square() -> None:
    expected = [
        [t, 2 * by + iy, 2 * bx + ix]
        for t in range(2)
        for by in range(2)
        for bx in range(3)
        for iy in range(2)
        for ix in range(2)
    ]
    assert patch_coordinates((2, 4, 6), 2, CPU).tolist() == expected


def test_rotary_angles_are_time_row_column_and_time_restarts(vision: VisionConfig) -> None:
    cos, sin = rotary([(5, 2, 4)], vision, CPU)
    # head dim 80: 13 frequencies an axis, 78 of 80 dims turn
    assert cos.shape == sin.shape == (40, 39)
    frequencies = [10000 ** (-2 * i / 26) for i in range(13)]
    for patch, (t, y, x) in [(0, (0, 0, 0)), (7, (0, 1, 3)), (31, (3, 1, 3)), (32, (0, 0, 0))]:
        angles = torch.tensor([at * f for at in (t, y, x) for f in frequencies])
        assert torch.allclose(cos[patch], angles.cos(), atol=1e-6)
        assert torch.allclose(sin[patch], angles.sin(), atol=1e-6)


@pytest.mark.parametrize("frames", [1, 2])
def test_normalising_is_exact_and_a_still_stands_twice(vision: VisionConfig, frames: int) -> None:
    patches = torch.randint(
        0, 256, (3, 3 * frames * 196), generator=torch.Generator().manual_seed(0)
    ).to(torch.uint8)
    batch = golden.patch_batch([patches], [frames], [(1, 1, 3)])
    pixels = normalise(patches, frames, batch, vision)
    assert pixels.shape == (3, 1176)
    assert pixels.dtype == torch.float32
    given = patches.view(3, 3, frames, 196)
    for channel in range(3):
        for frame in range(2):
            value = given[1, channel, frame % frames, 77].item() / 255
            expected = (value - golden.MEAN[channel]) / golden.STD[channel]
            got = pixels[1, (channel * 2 + frame) * 196 + 77].item()
            assert got == pytest.approx(expected, abs=1e-6)


def test_a_grid_that_cannot_be_merged_is_refused() -> None:
    with pytest.raises(AssertionError, match="3 rows of patches are no multiple of 2"):
        patch_coordinates((1, 3, 2), 2, CPU)
