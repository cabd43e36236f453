"""`m3stack bench media`: pictures and clips from file bytes to patch rows, beside bare decoders
and the reference processor, in one run; nothing is timed before its bytes are compared.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torchvision
import transformers
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms.v2 import functional

from m3stack._gateway import Preparer
from m3stack.checkpoints import builtin_checkpoint

Work = Callable[[], object]
Bytes = NDArray[np.uint8]

PATCH = 14
PICTURES = (("1080p JPEG", 1920, 1080), ("4K JPEG", 3840, 2160))


@dataclass(frozen=True, slots=True)
class ClipKind:
    """A clip, and how many frames a second are taken from it."""

    name: str
    size: str
    seconds: int
    key_every: int
    fps: float
    # the clip is played that many times
    plays: int = 1


CLIPS = (
    ClipKind("10 s of 720p30 H.264, 1 fps", "1280x720", 10, 250, 1.0),
    ClipKind("60 s of 720p30 H.264, 1 fps", "1280x720", 60, 250, 1.0),
    ClipKind("3 min of 1080p30 H.264, key frame each 2 s, 0.2 fps", "1920x1080", 60, 60, 0.2, 3),
)


@dataclass(slots=True)
class Row:
    """Milliseconds of each arm: the median of the rounds, and the best of them."""

    name: str
    unit: str = "ms"
    median: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)


class MismatchError(Exception):
    """Two arms gave different bytes."""


def photo(width: int, height: int) -> bytes:
    """A JPEG of quality 85 with detail at every scale; the same on every machine."""
    noise = np.random.default_rng(1)
    levels = np.full((height, width, 3), 128, np.float32)
    for step, amplitude in ((4, 6), (16, 18), (64, 40), (256, 90)):
        shape = (height // step + 2, width // step + 2, 3)
        coarse = noise.normal(size=shape).astype(np.float32)
        for channel in range(3):
            plane = Image.fromarray(coarse[..., channel])
            smooth = plane.resize((width, height), Image.Resampling.BICUBIC)
            levels[..., channel] += amplitude * np.asarray(smooth)
    buffer = io.BytesIO()
    Image.fromarray(levels.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def patch_rows(frame: Bytes) -> Bytes:
    """Patch rows [N, 3, 14, 14] of a frame [height, width, 3], by array reshapes."""
    height, width, _ = frame.shape
    blocks = frame.reshape(height // 28, 2, PATCH, width // 28, 2, PATCH, 3)
    return np.ascontiguousarray(blocks.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(-1, 3, PATCH, PATCH)


def run_rounds(row: Row, arms: dict[str, Work], rounds: int) -> Row:
    """Runs the arms in turn, so that a busy moment meets all of them."""
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for work in arms.values():
        work()
    for _ in range(rounds):
        for name, work in arms.items():
            begin = time.perf_counter()
            work()
            taken[name].append((time.perf_counter() - begin) * 1e3)
    row.median = {name: round(statistics.median(times), 3) for name, times in taken.items()}
    row.best = {name: round(min(times), 3) for name, times in taken.items()}
    return row


def picture_arms(ours: Preparer, data: bytes) -> dict[str, Work]:
    """File bytes to u8 patch rows.

    Raises:
        MismatchError: ours and torch's resampler differ in a byte.
    """
    rows, (_, grid_height, grid_width) = ours.preprocess_image(data)
    target = [grid_height * PATCH, grid_width * PATCH]
    source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    cubic = torchvision.transforms.InterpolationMode.BICUBIC

    def by_torch() -> Bytes:
        planes = torch.from_numpy(np.array(Image.open(io.BytesIO(data)))).permute(2, 0, 1)
        small = functional.resize(planes, target, interpolation=cubic, antialias=True)
        return patch_rows(small.permute(1, 2, 0).numpy())

    def by_pillow() -> Bytes:
        image = Image.open(io.BytesIO(data))
        size = (target[1], target[0])
        return patch_rows(np.asarray(image.resize(size, Image.Resampling.BICUBIC)))

    if rows != by_torch().tobytes():
        raise MismatchError("ours and torch's uint8 bicubic give different patch rows")
    return {
        "ours": lambda: ours.preprocess_image(data),
        "bare_decode": lambda: torchvision.io.decode_jpeg(source),
        "torch": by_torch,
        "pillow": by_pillow,
    }


def chat(kind: str, data: bytes, **controls: float) -> bytes:
    """Body of a chat request that shows one item."""
    url = f"data:;base64,{base64.b64encode(data).decode()}"
    part = {"type": f"{kind}_url", f"{kind}_url": {"url": url, **controls}}
    return json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode()


def preparer(cache_bytes: int) -> Preparer:
    """Ours with that much memory for what it has seen."""
    name = "M3STACK_GATEWAY_MEDIA_CACHE_BYTES"
    before = os.environ.get(name)
    os.environ[name] = str(cache_bytes)
    try:
        return Preparer(builtin_checkpoint("tiny"))
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def make_clip(directory: Path, kind: ClipKind) -> Path:
    """A clip of moving test bars."""
    once, path = directory / "once.mp4", directory / "clip.mp4"
    source = f"testsrc2=size={kind.size}:rate=30:duration={kind.seconds}"
    coder = ["-c:v", "libx264", "-preset", "veryfast", "-crf", "30", "-g", str(kind.key_every)]
    run_ffmpeg(["-f", "lavfi", "-i", source, *coder, "-pix_fmt", "yuv420p", str(once)])
    loops = str(kind.plays - 1)
    run_ffmpeg(["-stream_loop", loops, "-i", str(once), "-c", "copy", str(path)])
    return path


def run_ffmpeg(arguments: Sequence[str]) -> None:
    command = ["ffmpeg", "-nostdin", "-loglevel", "error", "-y", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def picture_rows(rounds: int) -> list[Row]:
    cold, warm = preparer(0), preparer(1 << 30)
    rows = []
    for name, width, height in PICTURES:
        data = photo(width, height)
        rows.append(run_rounds(Row(name), picture_arms(cold, data), rounds))
        body = chat("image", data)
        arms: dict[str, Work] = {
            "ours": lambda body=body: warm.prepare_chat(body),
            "ours_without_cache": lambda body=body: cold.prepare_chat(body),
        }
        rows.append(run_rounds(Row(f"{name} seen before, whole request"), arms, rounds))
    return rows


def clip_rows(rounds: int) -> list[Row]:
    cold = preparer(0)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for kind in CLIPS:
            path = make_clip(Path(directory), kind)
            body = chat("video", path.read_bytes(), fps=kind.fps)
            arms: dict[str, Work] = {
                "ours": lambda body=body: cold.prepare_chat(body),
                "bare_decode": lambda path=path: run_ffmpeg(["-i", str(path), "-f", "null", "-"]),
            }
            rows.append(run_rounds(Row(kind.name), arms, rounds))
    return rows


def machine() -> dict[str, str]:
    model = platform.processor() or platform.machine()
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        names = [line for line in cpu_info.read_text().splitlines() if "model name" in line]
        model = names[0].split(":")[1].strip() if names else model
    return {
        "cpu": f"{model}, {os.cpu_count()} logical cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "transformers": transformers.__version__,
        "pillow": Image.__version__,
    }


def main(argv: Sequence[str]) -> int:
    """Measures, prints a table and writes JSON if asked.

    Returns:
        0 measured, 1 ours differs from the reference, 2 it cannot run here.
    """
    parser = argparse.ArgumentParser(prog="m3stack bench media", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="of each picture; clips have 3")
    parser.add_argument("--only", choices=["pictures", "clips"], help="half of it")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows: list[Row] = []
    try:
        if options.only != "clips":
            rows += picture_rows(options.rounds)
    except MismatchError as error:
        print(f"m3stack bench media: {error}", file=sys.stderr)
        return 1
    if options.only != "pictures":
        if shutil.which("ffmpeg") is None:
            print("m3stack bench media: ffmpeg is not installed", file=sys.stderr)
            return 2
        rows += clip_rows(min(3, options.rounds))
    for row in rows:
        print(row.name)
        for arm, median in row.median.items():
            print(f"  {arm:20} {median:10.3f} {row.unit}   best {row.best[arm]:.3f}")
    if options.json:
        flat = [
            {"name": row.name, "unit": row.unit, **row.median, "best": row.best} for row in rows
        ]
        report = {"machine": machine(), "rows": flat}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
