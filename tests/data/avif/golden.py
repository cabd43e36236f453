"""Writes `colour.bin`: what libavif, as Pillow's wheel has it, makes of random planes.

    python tests/data/avif/golden.py tests/data/avif/colour.bin

Each case: bytes width, height, bit depth, planes (1 4:4:4, 2 4:2:2, 3 4:2:0, 4 grey), alpha,
full range, matrix (H.273), premultiplied; the planes Y, U, V, alpha of u8 or little-endian u16;
the rows of R G B or R G B A. Written with Pillow 13.0.0, libavif 1.4.2, libyuv 1924 on x86-64.
"""

from __future__ import annotations

import ctypes as c
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import PIL
from numpy.typing import NDArray

# loads the library's own libraries
from PIL import _avif  # pyright: ignore[reportAttributeAccessIssue, reportUnusedImport]  # noqa: F401

SHIFTS = {1: (0, 0), 2: (1, 0), 3: (1, 1)}


class AvifImage(c.Structure):
    """The beginning of `avifImage`."""

    _fields_ = [
        *((name, c.c_uint32) for name in ("width", "height", "depth")),
        *((name, c.c_int) for name in ("format", "range", "position")),
        ("planes", c.c_void_p * 3),
        ("row_bytes", c.c_uint32 * 3),
        ("owns_planes", c.c_int),
        ("alpha", c.c_void_p),
        ("alpha_row_bytes", c.c_uint32),
        ("owns_alpha", c.c_int),
        ("is_premultiplied", c.c_int),
        ("icc", c.c_void_p),
        ("icc_bytes", c.c_size_t),
        *((name, c.c_uint16) for name in ("primaries", "transfer", "matrix")),
    ]


class AvifRgb(c.Structure):
    """`avifRGBImage`, with room for what later versions add."""

    _fields_ = [
        *((name, c.c_uint32) for name in ("width", "height", "depth")),
        *((name, c.c_int) for name in ("format", "up", "down", "avoid", "ignore", "premultiplied")),
        ("is_float", c.c_int),
        ("max_threads", c.c_int),
        ("pixels", c.c_void_p),
        ("row_bytes", c.c_uint32),
        ("room", c.c_uint32 * 8),
    ]


def library() -> c.CDLL:
    folder = Path(PIL.__file__).parent.parent / "pillow.libs"
    loaded = c.CDLL(str(next(folder.glob("libavif*"))))
    loaded.avifImageCreate.restype = c.POINTER(AvifImage)
    return loaded


def fill(pointer: int, row_bytes: int, plane: NDArray[np.unsignedinteger]) -> None:
    height, width = plane.shape
    rows = np.ctypeslib.as_array(c.cast(pointer, c.POINTER(c.c_uint8)), (height, row_bytes))
    rows.view(plane.dtype)[:, :width] = plane


def converted(
    library: c.CDLL, planes: list[NDArray[np.unsignedinteger]], has_alpha: bool, case: list[int]
) -> NDArray[np.uint8]:
    """RGB, or RGBA, [H, W, C] of planes Y, U, V, alpha."""
    width, height, depth, layout, _alpha, is_full, matrix, is_premultiplied = case
    image = library.avifImageCreate(width, height, depth, layout)
    fields = image.contents
    fields.range, fields.matrix, fields.primaries = is_full, matrix, 2
    fields.is_premultiplied = is_premultiplied
    assert library.avifImageAllocatePlanes(image, 0xFF if has_alpha else 1) == 0
    colours = planes[:-1] if has_alpha else planes
    for number, plane in enumerate(colours):
        fill(fields.planes[number], fields.row_bytes[number], plane)
    if has_alpha:
        fill(fields.alpha, fields.alpha_row_bytes, planes[-1])
    rgb = AvifRgb()
    library.avifRGBImageSetDefaults(c.byref(rgb), image)
    channels = 4 if has_alpha else 3
    pixels = np.zeros((height, width, channels), np.uint8)
    rgb.depth, rgb.format, rgb.row_bytes = 8, int(has_alpha), width * channels
    rgb.pixels = pixels.ctypes.data
    assert library.avifImageYUVToRGB(image, c.byref(rgb)) == 0
    library.avifImageDestroy(image)
    return pixels


def cases() -> Iterator[list[int]]:
    options = itertools.product(
        ((7, 5), (6, 4)), (8, 10, 12), (1, 2, 3, 4), (0, 1), (0, 1), (1, 6, 9, 4, 7, 0)
    )
    for (width, height), depth, layout, alpha, is_full, matrix in options:
        is_subsampled_identity = matrix == 0 and layout not in (1, 4)
        if is_subsampled_identity or (height == 4 and matrix in (1, 4)):
            continue
        for is_premultiplied in (0, 1) if alpha and height == 5 and matrix in (6, 7) else (0,):
            yield [width, height, depth, layout, alpha, is_full, matrix, is_premultiplied]


def main() -> None:
    loaded, random, out = library(), np.random.default_rng(7), bytearray()
    for case in cases():
        width, height, depth, layout, alpha, *_ = case
        values, kind = 1 << depth, "<u1" if depth == 8 else "<u2"
        sizes = [(height, width)]
        if layout in SHIFTS:
            x, y = SHIFTS[layout]
            sizes += [((height + y) >> y, (width + x) >> x)] * 2
        planes = [random.integers(0, values, size).astype(kind) for size in sizes]
        if alpha:
            plane = random.integers(0, values, sizes[0])
            # a colour above its alpha is no colour; where alpha is 1 the result of one depends on
            # the processor
            plane[plane < values // 64] = values - 1
            plane[0, 0] = 0
            planes.append(plane.astype(kind))
        pixels = converted(loaded, planes, bool(alpha), case)
        out += bytes(case) + b"".join(plane.tobytes() for plane in planes) + pixels.tobytes()
    Path(sys.argv[1]).write_bytes(out)


if __name__ == "__main__":
    main()
