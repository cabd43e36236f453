"""The gateway's pixels, as the Python module gives them, against transformers' processors."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin

from m3stack._gateway import RefusedError
from tests.parity.processors import Sides


@pytest.fixture(scope="module")
def sides() -> Sides:
    return Sides.open()


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


def shown(data: bytes) -> Image.Image:
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data)))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1"])
def test_lossless_pictures_of_any_size_give_the_reference_patches(sides: Sides, mode: str) -> None:
    rng = random.Random(f"lossless {mode}")
    for number in range(12 if mode == "RGB" else 4):
        file_format = "WEBP" if number % 4 == 3 and mode in ("RGB", "RGBA") else "PNG"
        data = encoded(picture(rng, mode), file_format, lossless=True)
        sides.assert_still_equal(data, shown(data))


def test_jpegs_of_any_kind_give_the_reference_patches(sides: Sides) -> None:
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
        sides.assert_still_equal(data, shown(data))


@pytest.mark.parametrize("form", ['="{}"', ">{}<"])
def test_orientation_in_xmp_turns_pictures_whose_exif_is_silent(sides: Sides, form: str) -> None:
    rng = random.Random(f"xmp {form}")
    for orientation in (1, 6, 8, 9):
        packet = b"<x:xmpmeta tiff:Orientation" + form.format(orientation).encode() + b"/>"
        for file_format in ("JPEG", "WEBP", "PNG"):
            options: dict[str, object] = {"xmp": packet}
            if file_format == "PNG":
                text = PngImagePlugin.PngInfo()
                text.add_itxt("XML:com.adobe.xmp", packet.decode())
                options = {"pnginfo": text}
            elif file_format == "WEBP":
                options["lossless"] = True
            data = encoded(picture(rng, "RGB"), file_format, **options)
            sides.assert_still_equal(data, shown(data))


@pytest.mark.parametrize("file_format", ["GIF", "BMP", "TIFF", "WEBP"])
def test_other_formats_give_the_reference_patches(sides: Sides, file_format: str) -> None:
    rng = random.Random(file_format)
    for _ in range(3):
        data = encoded(picture(rng, "RGB"), file_format)
        sides.assert_still_equal(data, shown(data))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_turned_pictures_are_shown_upright(sides: Sides, orientation: int) -> None:
    rng = random.Random(f"orientation {orientation}")
    exif = Image.Exif()
    exif[0x0112] = orientation
    for file_format in ("JPEG", "PNG", "WEBP", "TIFF"):
        options = {"lossless": True} if file_format == "WEBP" else {}
        data = encoded(picture(rng, "RGB"), file_format, exif=exif, **options)
        sides.assert_still_equal(data, shown(data))


@pytest.mark.parametrize("size", [(1, 1), (1, 200), (1000, 10), (98, 98), (40, 4000), (1920, 1080)])
def test_extreme_sizes_give_the_reference_patches(sides: Sides, size: tuple[int, int]) -> None:
    noise = np.random.default_rng(size[0])
    image = Image.fromarray(noise.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    sides.assert_still_equal(encoded(image, "PNG"), image)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, 11])
def test_clips_of_any_size_give_the_reference_patches(sides: Sides, count: int) -> None:
    width, height = picture(random.Random(f"clip {count}"), "RGB").size
    noise = np.random.default_rng(count)
    sides.assert_frames_equal(noise.integers(0, 256, (count, height, width, 3), dtype=np.uint8))


def test_a_picture_that_cannot_be_shown_is_refused_with_its_figures(sides: Sides) -> None:
    thin = Image.new("L", (402, 2))
    with pytest.raises(RefusedError) as refusal:
        sides.ours.preprocess_image(encoded(thin, "PNG"))
    message, *_, status = refusal.value.args
    assert "402x2" in message
    assert "the limit is 200" in message
    assert status == 400
    with pytest.raises(RefusedError, match="PNG image is truncated"):
        sides.ours.preprocess_image(encoded(Image.new("L", (40, 30)), "PNG")[:-20])


@pytest.mark.soak
def test_five_hundred_fresh_pictures_and_fifty_clips_give_the_reference_patches(
    sides: Sides,
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")  # shown when the test fails
    rng = random.Random(seed)
    for number in range(500):
        file_format = ("PNG", "WEBP", "GIF", "BMP", "JPEG")[number % 5]
        modes = {"PNG": ("RGB", "RGBA", "L", "LA", "P", "1"), "JPEG": ("RGB", "L", "CMYK")}
        image = picture(rng, rng.choice(modes.get(file_format, ("RGB",))))
        quality = {"quality": rng.randint(1, 100)} if file_format in ("WEBP", "JPEG") else {}
        data = encoded(image, file_format, **quality)
        sides.assert_still_equal(data, shown(data))
    for _ in range(50):
        width, height = picture(rng, "RGB").size
        noise = np.random.default_rng(rng.randrange(1 << 32))
        shape = (rng.randint(1, 12), height, width, 3)
        sides.assert_frames_equal(noise.integers(0, 256, shape, dtype=np.uint8))
