"""Our preprocessing beside the processors of transformers, compared in 8-bit levels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from transformers.models.minimax_m3_vl.image_processing_minimax_m3_vl import (
    MiniMaxM3VLImageProcessor,
)
from transformers.models.minimax_m3_vl.video_processing_minimax_m3_vl import (
    MiniMaxM3VLVideoProcessor,
)

from m3stack._gateway import Preparer
from m3stack.checkpoints import builtin_checkpoint

Bytes = NDArray[np.uint8]

PATCH_ROW = (3, 2, 14, 14)
# the reference normalises in single precision, far finer than half of a level
LEVEL_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Sides:
    """Our preprocessing and the reference's."""

    ours: Preparer
    images: MiniMaxM3VLImageProcessor
    videos: MiniMaxM3VLVideoProcessor

    @classmethod
    def open(cls) -> Sides:
        ours = Preparer(builtin_checkpoint("tiny"))
        return cls(ours, MiniMaxM3VLImageProcessor(), MiniMaxM3VLVideoProcessor())

    def assert_still_equal(self, data: bytes, picture: Image.Image) -> None:
        """A file's bytes through ours, the picture they show through the reference."""
        patches, grid = self.ours.preprocess_image(data)
        # a still comes without its second temporal copy
        rows = np.frombuffer(patches, np.uint8).reshape(-1, 3, 1, 14, 14).repeat(2, axis=2)
        reference = self.images(picture, return_tensors="np")
        assert tuple(reference["image_grid_thw"][0]) == grid
        np.testing.assert_array_equal(rows, self.levels(reference["pixel_values"]))

    def assert_frames_equal(self, frames: Bytes) -> None:
        """Frames [T, height, width, 3] through both."""
        _, height, width, _ = frames.shape
        raw = [frame.tobytes() for frame in frames]
        patches, grid = self.ours.preprocess_frames(raw, width, height)
        self._assert_clip_rows(patches, grid, frames)

    def assert_clip_equal(self, data: bytes, shown: Bytes) -> list[int]:
        """A clip file's bytes through ours, those of the frames it shows [T, height, width, 3] that
        ours takes through the reference; the numbers of those.
        """
        patches, grid, numbers, _times = self.ours.preprocess_video(data)
        self._assert_clip_rows(patches, grid, shown[numbers])
        return numbers

    def _assert_clip_rows(self, patches: bytes, grid: tuple[int, int, int], frames: Bytes) -> None:
        rows = np.frombuffer(patches, np.uint8).reshape(-1, *PATCH_ROW)
        planar = list(frames.transpose(0, 3, 1, 2))
        reference = self.videos(
            planar, do_resize=True, input_data_format="channels_first", return_tensors="np"
        )
        segments = reference["video_grid_thw"]
        assert grid == (sum(row[0] for row in segments), *segments[0][1:])
        np.testing.assert_array_equal(rows, self.levels(reference["pixel_values_videos"]))

    def levels(self, pixel_values: NDArray[np.float32]) -> Bytes:
        """The 8-bit levels [N, 3, 2, 14, 14] of which normalised values were made."""
        mean = np.asarray(self.images.image_mean)[:, None, None, None]
        std = np.asarray(self.images.image_std)[:, None, None, None]
        scaled = (pixel_values.reshape(-1, *PATCH_ROW).astype(np.float64) * std + mean) * 255
        assert np.abs(scaled - scaled.round()).max() < LEVEL_TOLERANCE
        return scaled.round().astype(np.uint8)
