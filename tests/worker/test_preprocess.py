"""Pictures and clips from Python: the arrays are those of the gateway, in order, errors and all."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from m3stack import preprocess
from m3stack._gateway import Preparer
from m3stack.checkpoints import builtin_checkpoint
from m3stack.errors import ErrorKind, WorkerError

MEDIA = Path(__file__).parents[1] / "data" / "media"


@pytest.fixture(scope="module")
def ours() -> preprocess.Preprocessor:
    return preprocess.Preprocessor(builtin_checkpoint("tiny"))


def encoded(picture: Image.Image) -> bytes:
    out = io.BytesIO()
    picture.save(out, "PNG")
    return out.getvalue()


def test_a_picture_at_its_own_size_comes_back_from_its_rows(
    ours: preprocess.Preprocessor,
) -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (112, 168, 3), np.uint8)
    made = ours.image(encoded(Image.fromarray(pixels)))
    assert made.grid == (1, 8, 12)
    assert made.rows.shape == (96, 3, 1, 14, 14)
    # [block row, block column, row, column, channel, y, x], two by two patches a block
    blocks = made.rows[:, :, 0].reshape(4, 6, 2, 2, 3, 14, 14)
    back = blocks.transpose(0, 2, 5, 1, 3, 6, 4).reshape(112, 168, 3)
    np.testing.assert_array_equal(back, pixels)
    assert not made.rows.flags.writeable


def test_many_pictures_come_in_their_order_with_their_controls(
    ours: preprocess.Preprocessor,
) -> None:
    files = [encoded(Image.new("RGB", (140 + 28 * n, 140), (n, 0, 0))) for n in range(9)]
    made = list(ours.images(iter(files), threads=2, max_long_side_pixel=336))
    assert [int(rows.rows[0, 0, 0, 0, 0]) for rows in made] == list(range(9))
    for file, rows in zip(files, made, strict=True):
        alone = ours.image(file, max_long_side_pixel=336)
        assert rows.grid == alone.grid
        np.testing.assert_array_equal(rows.rows, alone.rows)
    assert max(rows.grid[2] for rows in made) == 336 // 14


def test_a_refused_picture_is_an_error_at_its_place(ours: preprocess.Preprocessor) -> None:
    good = encoded(Image.new("RGB", (56, 56)))
    batch = ours.images([good, b"no picture", good])
    assert next(batch).grid[0] == 1
    with pytest.raises(WorkerError, match="not one of") as refused:
        next(batch)
    assert refused.value.kind is ErrorKind.INVALID_REQUEST
    assert next(batch).grid == (1, 4, 4)
    assert next(batch, None) is None
    assert next(batch, None) is None


def test_many_clips_come_in_their_order_with_their_controls(ours: preprocess.Preprocessor) -> None:
    names = ("vid_cfr_h264.mp4", "vid_two_frames.mp4", "vid_vp8.webm", "vid_rot90.mp4")
    files = [(MEDIA / name).read_bytes() for name in names]
    made = list(ours.videos(iter(files), threads=3, fps=2.0))
    alone = [ours.video(file, fps=2.0) for file in files]
    assert len({rows.rows.tobytes() for rows in alone}) == len(files)
    for one, other in zip(made, alone, strict=True):
        assert (one.grid, one.frames, one.times_s) == (other.grid, other.frames, other.times_s)
        np.testing.assert_array_equal(one.rows, other.rows)
    assert made[0].rows.shape == (int(np.prod(made[0].grid)), 3, 2, 14, 14)
    assert made[0].frames != ours.video(files[0], fps=0.5).frames


def test_a_refused_clip_is_an_error_at_its_place_and_the_others_come(
    ours: preprocess.Preprocessor,
) -> None:
    good = (MEDIA / "vid_two_frames.mp4").read_bytes()
    batch = ours.videos([good, b"no clip", good, good[:100], good], threads=2)
    expected = ours.video(good).rows
    for is_good in (True, False, True, False, True):
        if is_good:
            np.testing.assert_array_equal(next(batch).rows, expected)
            continue
        with pytest.raises(WorkerError) as refused:
            next(batch)
        assert refused.value.kind is ErrorKind.INVALID_REQUEST
    assert next(batch, None) is None


def test_no_more_is_read_ahead_than_was_said_and_who_leaves_ends_the_threads(
    ours: preprocess.Preprocessor,
) -> None:
    good = (MEDIA / "vid_two_frames.mp4").read_bytes()
    num_read = 0

    def endless() -> Iterator[bytes]:
        nonlocal num_read
        while True:
            num_read += 1
            yield good

    before = set(threading.enumerate())
    batch = ours.videos(endless(), threads=2)
    assert num_read == 0
    for taken in range(5):
        next(batch)
        assert num_read == 2 + taken
    threads = set(threading.enumerate()) - before
    assert 1 <= len(threads) <= 2
    del batch
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert num_read == 6


def test_a_clip_has_the_frames_and_bytes_that_a_request_would_send(
    ours: preprocess.Preprocessor,
) -> None:
    data = (MEDIA / "vid_cfr_h264.mp4").read_bytes()
    made = ours.video(data, fps=2.0)
    assert made.rows.shape == (int(np.prod(made.grid)), 3, 2, 14, 14)
    assert made.frames == sorted(set(made.frames))
    assert made.frames[0] == 0
    assert len(made.times_s) == made.grid[0]
    assert made.times_s == sorted(made.times_s)
    assert len(made.frames) > len(ours.video(data, fps=0.5).frames)

    # every other door: the frames themselves, cut up
    raw = preprocess.video(data, builtin_checkpoint("tiny"), fps=2.0)
    np.testing.assert_array_equal(raw.rows, made.rows)
    with pytest.raises(WorkerError):
        ours.video(b"no clip")


def test_the_plain_functions_give_the_same_and_know_the_layout() -> None:
    path = builtin_checkpoint("tiny")
    data = encoded(Image.new("RGB", (84, 84), (1, 2, 3)))
    rows = preprocess.image(data, path).rows
    expected, _grid = Preparer(path).preprocess_image(data)
    assert rows.tobytes() == expected
    assert Preparer(path).patch_layout() == (14, 2, 2)
