"""AVIF pictures: the rows are those of what Pillow's plug-in shows, in every byte."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from m3stack import preprocess
from m3stack.checkpoints import builtin_checkpoint
from m3stack.errors import WorkerError

FOLDER = Path(__file__).parents[1] / "data" / "avif"
FILES = sorted(FOLDER.glob("*.avif"))


@pytest.fixture(scope="module")
def ours() -> preprocess.Preprocessor:
    return preprocess.Preprocessor(builtin_checkpoint("tiny"))


def shown(file: bytes) -> bytes:
    """A PNG of what the reference shows: turned upright, over white."""
    picture = ImageOps.exif_transpose(Image.open(io.BytesIO(file)))
    if picture.mode == "RGBA":
        white = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(white, picture)
    out = io.BytesIO()
    picture.convert("RGB").save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_rows_are_those_of_what_pillow_shows(ours: preprocess.Preprocessor, file: Path) -> None:
    made, expected = ours.image(file.read_bytes()), ours.image(shown(file.read_bytes()))
    assert made.grid == expected.grid
    np.testing.assert_array_equal(made.rows, expected.rows)


def test_the_files_cover_every_kind() -> None:
    names = {file.stem for file in FILES}
    planes = {f"{planes}{kind}" for planes in (400, 420, 422, 444) for kind in ("", "_a", "_10bit")}
    assert planes | {"grid_420", "grid_444_a", "sequence_a", "turned_6", "grain"} <= names


@pytest.mark.parametrize("name", ["420", "444_a", "grid_420"])
def test_damaged_coded_data_is_a_picture_or_a_refusal(
    ours: preprocess.Preprocessor, name: str
) -> None:
    file, random = (FOLDER / f"{name}.avif").read_bytes(), np.random.default_rng(5)
    coded = file.index(b"mdat") + 4
    refused = 0
    for _ in range(8):
        damaged = bytearray(file)
        for place in random.integers(coded, len(file), 20):
            damaged[place] ^= int(random.integers(1, 256))
        try:
            made = ours.image(bytes(damaged))
        except WorkerError as error:
            refused += "AVIF" in error.message
        else:
            assert made.grid == ours.image(file).grid
    assert refused, "nothing was damaged enough"
