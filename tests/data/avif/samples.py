"""Writes the AVIF files beside it, with Pillow and with libavif as Pillow's wheel has it.

    python -m tests.data.avif.samples tests/data/avif

Names say what is in them: planes, bit depth, `a` with transparency, tiles of a grid.
"""

from __future__ import annotations

import ctypes as c
import subprocess
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tests.data.avif.golden import SHIFTS, AvifImage, fill, library

ROTATION_TAG = 0x112


class AvifData(c.Structure):
    """`avifRWData`."""

    _fields_ = [("data", c.c_void_p), ("size", c.c_size_t)]


class AvifEncoder(c.Structure):
    """The beginning of `avifEncoder`."""

    _fields_ = [(name, c.c_int) for name in ("codec", "max_threads", "speed")]


def drawing(height: int, width: int, channels: int, values: int = 256) -> NDArray[np.uint16]:
    """A picture with edges, slopes and noise, [H, W, C]."""
    random = np.random.default_rng(height * width)
    y, x = np.mgrid[0:height, 0:width]
    planes = [x * 5 + y * 3, x * x // 7 + y * 2, y * 7, x * 4 + y * 9][:channels]
    shapes = np.stack(planes, -1) % 256 * (values // 256)
    noise = random.integers(-values // 12, values // 12, shapes.shape)
    return np.clip(shapes + noise, 0, values - 1).astype(np.uint16)


def save(path: Path, size: tuple[int, int], channels: int, **options: object) -> None:
    width, height = size
    pixels = drawing(height, width, channels).astype(np.uint8)
    Image.fromarray(pixels).save(path, "AVIF", speed=8, **options)


def cell(loaded: c.CDLL, planes: NDArray[np.uint16], layout: int, depth: int, full: bool) -> object:
    """An `avifImage` of Y, U, V and, if there are four, alpha; colours are thinned out."""
    height, width, channels = planes.shape
    image = loaded.avifImageCreate(width, height, depth, layout)
    fields = image.contents
    fields.range, fields.matrix, fields.primaries, fields.transfer = int(full), 9, 9, 16
    assert loaded.avifImageAllocatePlanes(image, 0xFF if channels == 4 else 1) == 0
    kind = "<u1" if depth == 8 else "<u2"
    fill(fields.planes[0], fields.row_bytes[0], planes[..., 0].astype(kind))
    x, y = SHIFTS.get(layout, (0, 0))
    for number in (1, 2) if layout in SHIFTS else ():
        thin = planes[:: 1 << y, :: 1 << x, number].astype(kind)
        fill(fields.planes[number], fields.row_bytes[number], thin)
    if channels == 4:
        fill(fields.alpha, fields.alpha_row_bytes, planes[..., 3].astype(kind))
    return image


def save_deep(path: Path, planes: str) -> None:
    """More than 8 bits: FFmpeg with libaom, since that of the wheel cannot."""
    source = ["-f", "lavfi", "-i", "testsrc2=size=32x24,scale=31:23,format=rgb48"]
    coding = ["-c:v", "libaom-av1", "-cpu-used", "8", "-still-picture", "1", "-crf", "20"]
    one = ["-frames:v", "1", "-pix_fmt", planes, str(path)]
    subprocess.run(
        ["ffmpeg", "-nostdin", "-loglevel", "error", "-y", *source, *coding, *one], check=True
    )


def encode(loaded: c.CDLL, cells: list[object], columns: int, rows: int) -> bytes:
    encoder = loaded.avifEncoderCreate()
    encoder.contents.speed = 8
    is_single = 2
    if len(cells) == 1:
        added = loaded.avifEncoderAddImage(encoder, cells[0], c.c_uint64(1), is_single)
    else:
        array = (c.POINTER(AvifImage) * len(cells))(*cells)
        added = loaded.avifEncoderAddImageGrid(encoder, columns, rows, array, is_single)
    assert added == 0, loaded.avifResultToString(added)
    out = AvifData()
    assert loaded.avifEncoderFinish(encoder, c.byref(out)) == 0
    return c.string_at(out.data, out.size)


def main() -> None:
    folder, loaded = Path(sys.argv[1]), library()
    loaded.avifResultToString.restype = c.c_char_p
    loaded.avifEncoderCreate.restype = c.POINTER(AvifEncoder)
    for subsampling in ("4:2:0", "4:2:2", "4:4:4", "4:0:0"):
        name = subsampling.replace(":", "")
        save(folder / f"{name}.avif", (65, 47), 3, subsampling=subsampling, range="limited")
        save(folder / f"{name}_a.avif", (47, 33), 4, subsampling=subsampling)
    for value in range(2, 9):
        exif = Image.Exif()
        exif[ROTATION_TAG] = value
        save(folder / f"turned_{value}.avif", (30, 20), 3, exif=exif)
    save(folder / "grain.avif", (64, 64), 3, advanced={"film-grain-test": "3"})
    save(folder / "multiplied_a.avif", (40, 30), 4, alpha_premultiplied=True)
    save(folder / "one_pixel.avif", (1, 1), 3)
    frames = [Image.fromarray(drawing(32, 48, 4).astype(np.uint8)) for _ in range(3)]
    frames[0].save(folder / "sequence_a.avif", save_all=True, append_images=frames[1:])
    for planes in ("yuv444p", "yuv422p", "yuv420p", "gray"):
        for depth in (10, 12):
            name = planes.replace("yuv", "").replace("gray", "400").rstrip("p")
            save_deep(folder / f"{name}_{depth}bit.avif", f"{planes}{depth}le")
    for name, layout, channels in (("420", 3, 3), ("444", 1, 4)):
        picture = drawing(150, 180, channels)
        pieces = [picture[y : y + 80, x : x + 64] for y in (0, 80) for x in (0, 64, 128)]
        cells = [cell(loaded, piece, layout, 8, full=True) for piece in pieces]
        suffix = "_a" if channels == 4 else ""
        (folder / f"grid_{name}{suffix}.avif").write_bytes(encode(loaded, cells, 3, 2))


if __name__ == "__main__":
    main()
