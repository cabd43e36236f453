"""The gateway's pixels, as the Python module gives them, against transformers' processors."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps
from transformers.models.minimax_m3_vl.image_processing_minimax_m3_vl import (
    MiniMaxM3VLImageProcessor,
)
from transformers.models.minimax_m3_vl.video_processing_minimax_m3_vl import (
    MiniMaxM3VLVideoProcessor,
)

from m3stack import _gateway
from tests.parity import golden

Bytes = NDArray[np.uint8]

# the reference normalises in single precision, far finer than half of a level
LEVEL_TOLERANCE = 1e-3
PATCH_ROW = (3, 2, 14, 14)


@pytest.fixture(scope="module")
def image_processor() -> MiniMaxM3VLImageProcessor:
    return MiniMaxM3VLImageProcessor()


@pytest.fixture(scope="module")
def video_processor() -> MiniMaxM3VLVideoProcessor:
    return MiniMaxM3VLVideoProcessor()


def levels(pixel_values: NDArray[np.float32], processor: object) -> Bytes:
    """The 8-bit levels `[N, 3, 2, 14, 14]` of which normalised values were made."""
    mean = np.asarray(processor.image_mean)[:, None, None, None]  # type: ignore[attr-defined]
    std = np.asarray(processor.image_std)[:, None, None, None]  # type: ignore[attr-defined]
    scaled = (pixel_values.reshape(-1, *PATCH_ROW).astype(np.float64) * std + mean) * 255
    assert np.abs(scaled - scaled.round()).max() < LEVEL_TOLERANCE
    return scaled.round().astype(np.uint8)


def our_still(data: bytes) -> tuple[Bytes, tuple[int, int, int]]:
    """Our patch rows with the second copy filled in, and the grid."""
    patches, grid = _gateway.preprocess_image(data, golden.DIRECTORY)
    rows = np.frombuffer(patches, np.uint8).reshape(-1, 3, 1, 14, 14)
    return np.repeat(rows, 2, axis=2), grid


def our_clip(frames: Bytes) -> tuple[Bytes, tuple[int, int, int]]:
    """Our patch rows of frames `[T, height, width, 3]`, and the grid."""
    _, height, width, _ = frames.shape
    raw = [frame.tobytes() for frame in frames]
    patches, grid = _gateway.preprocess_frames(raw, width, height, golden.DIRECTORY)
    return np.frombuffer(patches, np.uint8).reshape(-1, *PATCH_ROW), grid


def assert_like_reference(
    data: bytes, picture: Image.Image, processor: MiniMaxM3VLImageProcessor
) -> None:
    reference = processor(picture, return_tensors="np")
    rows, grid = our_still(data)
    assert tuple(reference["image_grid_thw"][0]) == grid
    np.testing.assert_array_equal(rows, levels(reference["pixel_values"], processor))


def picture(rng: random.Random, mode: str) -> Image.Image:
    """Smooth shapes under noise, of any size up to 900 and any ratio up to 40."""
    while True:
        width, height = (round(2 ** rng.uniform(0, 9.8)) for _ in range(2))
        if max(width, height) <= 40 * min(width, height):
            break
    noise = np.random.default_rng(rng.randrange(1 << 32))
    coarse = noise.integers(0, 256, (height // 9 + 1, width // 9 + 1, 4), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    grain = noise.integers(0, 24, smooth.shape, dtype=np.uint8)
    return Image.fromarray(smooth ^ grain).convert(mode)


def encoded(image: Image.Image, file_format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1"])
def test_lossless_pictures_of_any_size_give_the_reference_patches(
    mode: str, image_processor: MiniMaxM3VLImageProcessor
) -> None:
    rng = random.Random(f"lossless {mode}")
    for number in range(12 if mode == "RGB" else 4):
        file_format = "WEBP" if number % 4 == 3 and mode in ("RGB", "RGBA") else "PNG"
        data = encoded(picture(rng, mode), file_format, lossless=True)
        assert_like_reference(data, Image.open(io.BytesIO(data)), image_processor)


def test_jpegs_of_any_kind_give_the_reference_patches(
    image_processor: MiniMaxM3VLImageProcessor,
) -> None:
    rng = random.Random("jpeg")
    for number in range(16):
        mode = ("RGB", "RGB", "L", "CMYK")[number % 4]
        data = encoded(
            picture(rng, "RGB").convert(mode),
            "JPEG",
            quality=rng.randint(20, 98),
            subsampling=rng.randint(0, 2),
            progressive=bool(number & 4),
        )
        assert_like_reference(data, Image.open(io.BytesIO(data)), image_processor)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_turned_pictures_are_shown_upright(
    orientation: int, image_processor: MiniMaxM3VLImageProcessor
) -> None:
    rng = random.Random(f"orientation {orientation}")
    exif = Image.Exif()
    exif[0x0112] = orientation
    for file_format in ("JPEG", "PNG", "WEBP"):
        data = encoded(picture(rng, "RGB"), file_format, exif=exif, lossless=True)
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        assert_like_reference(data, upright, image_processor)


@pytest.mark.parametrize("size", [(1, 1), (1, 200), (1000, 10), (98, 98), (40, 4000), (1920, 1080)])
def test_extreme_sizes_give_the_reference_patches(
    size: tuple[int, int], image_processor: MiniMaxM3VLImageProcessor
) -> None:
    noise = np.random.default_rng(size[0])
    image = Image.fromarray(noise.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    assert_like_reference(encoded(image, "PNG"), image, image_processor)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, 11])
def test_clips_of_any_size_give_the_reference_patches(
    count: int, video_processor: MiniMaxM3VLVideoProcessor
) -> None:
    rng = random.Random(f"clip {count}")
    width, height = picture(rng, "RGB").size
    noise = np.random.default_rng(count)
    frames = noise.integers(0, 256, (count, height, width, 3), dtype=np.uint8)
    reference = video_processor(
        list(frames.transpose(0, 3, 1, 2)), do_resize=True, return_tensors="np"
    )
    rows, grid = our_clip(frames)
    segments = reference["video_grid_thw"]
    assert grid == (sum(row[0] for row in segments), *segments[0][1:])
    np.testing.assert_array_equal(rows, levels(reference["pixel_values_videos"], video_processor))
