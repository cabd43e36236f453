"""Tensors are read whole or in parts, in pieces of bounded size, or the read fails by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from m3stack.errors import StartupError
from m3stack.weight_files.header import read_header
from m3stack.weight_files.reader import Buffer, FileReader

MATRIX = torch.randn(37, 10)


def write(path: Path) -> Path:
    file = path / "m.safetensors"
    save_file({"m": MATRIX, "s": torch.tensor(3.5), "v": torch.arange(9.0)}, file)
    return file


@pytest.mark.parametrize("buffer_bytes", [40, 41, 100, 4096])
@pytest.mark.parametrize("rows", [range(37), range(5, 6), range(11, 37), range(4, 4)])
def test_pieces_join_to_the_rows_asked_for(tmp_path: Path, buffer_bytes: int, rows: range) -> None:
    file = write(tmp_path)
    entry = read_header(file)["m"]
    joined = torch.full_like(MATRIX, float("nan"))
    with FileReader(file, Buffer(buffer_bytes)) as reader:
        for row, piece in reader.pieces("m", entry, rows):
            assert piece.nbytes <= buffer_bytes
            joined[row : row + len(piece)] = piece
    assert torch.equal(joined[rows.start : rows.stop], MATRIX[rows.start : rows.stop])
    assert joined.isnan().all(1).sum() == 37 - len(rows)


def test_pieces_can_be_kept_small(tmp_path: Path) -> None:
    file = write(tmp_path)
    entry = read_header(file)["m"]
    with FileReader(file, Buffer(4096)) as reader:
        sizes = [len(piece) for _, piece in reader.pieces("m", entry, range(37), 100)]
        single = [len(piece) for _, piece in reader.pieces("m", entry, range(3), 1)]
    assert sizes == [2] * 18 + [1]
    assert single == [1, 1, 1]


def test_scalars_and_vectors_are_rows_too(tmp_path: Path) -> None:
    file = write(tmp_path)
    entries = read_header(file)
    with FileReader(file, Buffer(64)) as reader:
        pieces = [(row, p.clone()) for row, p in reader.pieces("s", entries["s"], range(1))]
        assert [(row, p.tolist()) for row, p in pieces] == [(0, [[3.5]])]
        vector = torch.cat([p.clone() for _, p in reader.pieces("v", entries["v"], range(9))])
    assert vector.squeeze(1).tolist() == list(range(9))


def test_a_file_that_shrinks_under_way_is_an_error(tmp_path: Path) -> None:
    file = write(tmp_path)
    entry = read_header(file)["m"]
    with FileReader(file, Buffer(400)) as reader:
        pieces = reader.pieces("m", entry, range(37))
        next(pieces)
        os.truncate(file, entry.start + 500)
        with pytest.raises(StartupError, match=r"tensor m cannot be read: .* 300 bytes early"):
            next(pieces)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be read: No such file"):
        FileReader(tmp_path / "x", Buffer(8))
