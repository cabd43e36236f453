"""Clip files of every kind: the rows of the frames that are taken are those that the reference
makes of a whole decode, in every byte.
"""

from __future__ import annotations

import json
import random
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.parity.processors import Bytes, Sides

EXACT = "bicubic+accurate_rnd+full_chroma_int+bitexact"


@dataclass(frozen=True, slots=True)
class Kind:
    """A clip to be made: a moving card of that size and rate, coded with these options."""

    suffix: str
    options: tuple[str, ...] = ()
    size: tuple[int, int] = (128, 96)
    rate: str = "12"
    frames: int = 30
    # of the card, before it is coded
    filters: tuple[str, ...] = ()
    # of a second pass that copies what was coded
    copied: tuple[str, ...] = field(default=())


X264 = ("-c:v", "libx264", "-preset", "veryfast")
KINDS = {
    "plain": Kind("mp4", X264),
    "b-frames": Kind("mp4", (*X264, "-bf", "3", "-g", "9")),
    "open groups": Kind("mkv", (*X264, "-x264-params", "open-gop=1:bframes=3", "-g", "10")),
    "ten bits": Kind("mp4", (*X264, "-pix_fmt", "yuv420p10le")),
    "all chroma": Kind("mov", (*X264, "-pix_fmt", "yuv444p"), size=(99, 57)),
    "full range": Kind("mp4", (*X264, "-color_range", "pc"), filters=("scale=out_range=pc",)),
    "variable rate": Kind("mp4", (*X264, "-vsync", "vfr"), filters=("setpts=N*N/120/TB",)),
    "late start": Kind("ts", (*X264, "-output_ts_offset", "7.3")),
    "fragments": Kind("mp4", (*X264, "-movflags", "frag_keyframe+empty_moov", "-g", "8")),
    "turned": Kind("mp4", X264, copied=("-metadata:s:v", "rotate=90")),
    "wide pixels": Kind("mp4", (*X264, "-aspect", "16:9"), size=(96, 96)),
    "film rate": Kind("mkv", X264, rate="24000/1001"),
    "hevc": Kind("mp4", ("-c:v", "libx265", "-preset", "ultrafast", "-x265-params", "log-level=1")),
    "vp8": Kind("webm", ("-c:v", "libvpx", "-deadline", "realtime", "-cpu-used", "8")),
    "vp9": Kind("webm", ("-c:v", "libvpx-vp9", "-cpu-used", "8"), size=(77, 55)),
    "mpeg-4": Kind("avi", ("-c:v", "mpeg4", "-bf", "2")),
    "mpeg-2": Kind("mpg", ("-c:v", "mpeg2video", "-bf", "2"), rate="25"),
    "flash": Kind("flv", X264),
    "motion jpeg": Kind("mov", ("-c:v", "mjpeg", "-q:v", "3"), size=(75, 61)),
    "gif": Kind("gif", size=(61, 33), rate="10"),
    "animated png": Kind("apng", ("-pix_fmt", "rgb24", "-plays", "0"), size=(45, 31)),
    "one frame": Kind("mp4", X264, frames=1),
    "two frames": Kind("mp4", X264, frames=2),
    "cut between key frames": Kind("mp4", (*X264, "-g", "12"), copied=("-ss", "0.7")),
}
ALWAYS = tuple(KINDS)


@pytest.fixture(scope="module")
def sides() -> Sides:
    return Sides.open()


def ffmpeg(*arguments: str) -> bytes:
    command = ["ffmpeg", "-nostdin", "-v", "error", "-y", *arguments]
    return subprocess.run(command, check=True, capture_output=True, timeout=60).stdout


def made(folder: Path, kind: Kind) -> Path:
    """A clip of that kind; its second half is another card."""
    width, height = kind.size
    seconds = kind.frames * 2 / float(eval_rate(kind.rate))
    card = f"testsrc2=size={width}x{height}:rate={kind.rate}:duration={seconds}"
    path = folder / f"coded.{kind.suffix}"
    pixels = () if "-pix_fmt" in kind.options or kind.suffix == "gif" else ("-pix_fmt", "yuv420p")
    filters = ("-vf", ",".join(kind.filters)) if kind.filters else ()
    limit = ("-frames:v", str(kind.frames))
    ffmpeg("-f", "lavfi", "-i", card, *filters, *kind.options, *pixels, *limit, str(path))
    if not kind.copied:
        return path
    copy = folder / f"copy.{kind.suffix}"
    before = kind.copied if kind.copied[0] == "-ss" else ()
    after = () if before else kind.copied
    ffmpeg(*before, "-i", str(path), "-c", "copy", *after, str(copy))
    return copy


def eval_rate(rate: str) -> float:
    above, _, below = rate.partition("/")
    return float(above) / float(below or 1)


def whole_decode(path: Path, kind: Kind) -> Bytes:
    """Every frame that FFmpeg shows of a file, upright: [T, height, width, 3]."""
    entries = ("-show_entries", "stream=width,height", "-of", "json")
    command = ["ffprobe", "-v", "error", "-select_streams", "V:0", *entries, str(path)]
    probed = subprocess.run(command, check=True, capture_output=True, timeout=60)
    stream = json.loads(probed.stdout)["streams"][0]
    width, height = stream["width"], stream["height"]
    convert = f"scale=flags={EXACT},format=rgb24"
    if kind is KINDS["turned"]:
        # colours first: FFmpeg would turn what is not yet RGB, and its chroma spreads otherwise
        convert, width, height = f"{convert},transpose=cclock", height, width
    options = ("-vf", convert, "-vsync", "passthrough", "-f", "rawvideo", "-pix_fmt", "rgb24")
    raw = ffmpeg("-noautorotate", "-i", str(path), "-map", "0:V:0", *options, "-")
    return np.frombuffer(raw, np.uint8).reshape(-1, height, width, 3)


def check(sides: Sides, folder: Path, kind: Kind) -> None:
    path = made(folder, kind)
    shown = whole_decode(path, kind)
    numbers = sides.assert_clip_equal(path.read_bytes(), shown)
    # one a second, the last one besides
    assert numbers[0] == 0
    assert numbers[-1] == len(shown) - 1
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("name", ALWAYS)
def test_a_clip_file_gives_the_reference_patches(sides: Sides, tmp_path: Path, name: str) -> None:
    check(sides, tmp_path, KINDS[name])


def test_an_animated_webp_is_a_clip_over_white(sides: Sides, tmp_path: Path) -> None:
    noise = np.random.default_rng(4)
    pictures = []
    for level in range(5):
        pixels = noise.integers(0, 256, (40, 52, 4), dtype=np.uint8)
        # wholly there or not at all: what is between is a matter of rounding
        pixels[..., 3] = np.where(noise.random((40, 52)) < 0.1 * level, 0, 255)
        pictures.append(Image.fromarray(pixels))
    path = tmp_path / "moving.webp"
    options = {"save_all": True, "append_images": pictures[1:], "duration": 500}
    pictures[0].save(path, lossless=True, exact=True, minimize_size=False, **options)
    shown = []
    with Image.open(path) as file:
        for number in range(5):
            file.seek(number)
            white = Image.new("RGBA", file.size, "white")
            shown.append(Image.alpha_composite(white, file.convert("RGBA")).convert("RGB"))
    rows, grid, numbers, _times = sides.ours.preprocess_video(path.read_bytes())
    assert numbers == [0, 2, 4]
    raw = [shown[number].tobytes() for number in numbers]
    expected, expected_grid = sides.ours.preprocess_frames(raw, *shown[0].size)
    assert grid == expected_grid
    found, wanted = (np.frombuffer(rows, np.uint8).astype(int) for rows in (rows, expected))
    # the decoder lays frames over each other in fixed point, and is one too low at times
    assert np.abs(found - wanted).max() <= 2


@pytest.mark.soak
def test_fifty_fresh_clip_files_give_the_reference_patches(sides: Sides, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")  # shown when the test fails
    rng = random.Random(seed)
    for number in range(50):
        name = rng.choice([name for name in KINDS if "frame" not in name and name != "turned"])
        kind = KINDS[name]
        width, height = (2 * rng.randint(8, 160) for _ in range(2))
        if kind.suffix in ("gif", "apng", "mov") or name == "vp9":
            width, height = width + rng.randint(0, 1), height + rng.randint(0, 1)
        rate = kind.rate if "/" in kind.rate or kind.suffix == "mpg" else str(rng.randint(4, 60))
        groups = (
            ("-g", str(rng.randint(1, 40))) if kind.options and "-g" not in kind.options else ()
        )
        fresh = Kind(
            kind.suffix,
            (*kind.options, *groups),
            (width, height),
            rate,
            rng.randint(3, 90),
            kind.filters,
            kind.copied,
        )
        folder = tmp_path / str(number)
        folder.mkdir()
        print(name, fresh)
        check(sides, folder, fresh)
