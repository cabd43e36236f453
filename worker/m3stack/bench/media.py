"""`m3stack bench media`: pictures and clips from file bytes to patch rows, beside bare decoders
and other ways, in one run; nothing is timed before its bytes are compared.

Times are of the processor, all threads and child processes counted, so that what else a machine
does weighs less; wall times stand beside them.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import platform
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torchvision
import transformers
from PIL import Image

from m3stack._gateway import Preparer
from m3stack.bench import media_gateways
from m3stack.bench.media_arms import PATCH, Work, clip_arms, picture_arms, run_ffmpeg
from m3stack.bench.media_gateways import Figures
from m3stack.checkpoints import builtin_checkpoint

PICTURES = (("1080p JPEG", 1920, 1080), ("4K JPEG", 3840, 2160))
# children of ours are told to end when their last frame is there
SETTLE_S = 0.05
# of a picture in one round, so that ticks of the clock do not count
REQUESTS = 10


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
    pattern: str = "testsrc2"
    rounds: int = 3
    # pixels; frames are made no longer
    long_side: int | None = None


CLIPS = (
    ClipKind("10 s of 720p30 H.264, 1 fps", "1280x720", 10, 250, 1.0),
    ClipKind("60 s of 720p30 H.264, 1 fps", "1280x720", 60, 250, 1.0),
    ClipKind("3 min of 1080p30 H.264, key frame each 2 s, 0.2 fps", "1920x1080", 60, 60, 0.2, 3),
)
# an hour below the limit of one item's bytes needs a simpler picture, and smaller frames to fit the
# context; one round, nothing warmed up
HOUR = ClipKind(
    "1 h of 1080p30 H.264, key frame each 2 s, 0.2 fps, frames of 560 pixels",
    "1920x1080",
    60,
    60,
    0.2,
    60,
    "testsrc",
    1,
    560,
)


@dataclass(slots=True)
class Row:
    """Milliseconds of each arm: processor time (median and best of the rounds), wall time."""

    name: str
    unit: str = "ms"
    median: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    wall: dict[str, float] = field(default_factory=dict)


class MismatchError(Exception):
    """Two arms gave different bytes."""


def photo(width: int, height: int, file_format: str = "JPEG") -> bytes:
    """A picture of quality 85 with detail at every scale; the same on every machine."""
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
    Image.fromarray(levels.clip(0, 255).astype(np.uint8)).save(buffer, file_format, quality=85)
    return buffer.getvalue()


def processor_ms() -> float:
    """Processor time of this process and of its children that have ended, waited for or not."""
    own, children = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    waited_for = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
    return (waited_for + unburied_s()) * 1e3


def unburied_s() -> float:
    """Processor time of children that have ended and that nobody has waited for yet."""
    tasks = Path("/proc/self/task").glob("*/children")
    ticks = 0
    for child in " ".join(task.read_text() for task in tasks).split():
        # "id (name) state ...": the times are the 14th and 15th field of the line
        fields = Path(f"/proc/{child}/stat").read_text().rsplit(") ")[1].split()
        if fields[0] == "Z":
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def run_rounds(row: Row, arms: dict[str, Work], rounds: int, settle_s: float = 0.0) -> Row:
    """Runs the arms in turn, so that a busy moment meets all of them; after each it waits a while
    for children that were told to end.
    """
    spent: dict[str, list[float]] = {name: [] for name in arms}
    wall: dict[str, list[float]] = {name: [] for name in arms}
    for work in arms.values() if rounds > 1 else ():
        work()
    time.sleep(settle_s)
    for _ in range(rounds):
        for name, work in arms.items():
            begin, begin_ms = time.perf_counter(), processor_ms()
            work()
            wall[name].append((time.perf_counter() - begin) * 1e3)
            time.sleep(settle_s)
            spent[name].append(processor_ms() - begin_ms)
    row.median = {name: round(statistics.median(times), 3) for name, times in spent.items()}
    row.best = {name: round(min(times), 3) for name, times in spent.items()}
    row.wall = {name: round(statistics.median(times), 3) for name, times in wall.items()}
    return row


def checked_picture(ours: Preparer, data: bytes) -> dict[str, Work]:
    """File bytes to u8 patch rows, by ours and by all others.

    Raises:
        MismatchError: ours and torch's resampler differ in a byte.
    """
    rows, (_, grid_height, grid_width) = ours.preprocess_image(data)
    others = picture_arms(data, (grid_height * PATCH, grid_width * PATCH))
    expected = others["torch"]()
    if not isinstance(expected, np.ndarray) or rows != expected.tobytes():
        raise MismatchError("ours and torch's uint8 bicubic give different patch rows")
    return {"ours": lambda: ours.preprocess_image(data), **others}


def chat(kind: str, data: bytes, **controls: float | None) -> bytes:
    """Body of a chat request that shows one item; a control of None is not sent."""
    controls = {name: value for name, value in controls.items() if value is not None}
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
    source = f"{kind.pattern}=size={kind.size}:rate=30:duration={kind.seconds}"
    coder = ["-c:v", "libx264", "-preset", "veryfast", "-crf", "30", "-g", str(kind.key_every)]
    run_ffmpeg(["-f", "lavfi", "-i", source, *coder, "-pix_fmt", "yuv420p", str(once)])
    loops = str(kind.plays - 1)
    run_ffmpeg(["-stream_loop", loops, "-i", str(once), "-c", "copy", str(path)])
    return path


def picture_rows(rounds: int) -> list[Row]:
    cold, warm = preparer(0), preparer(1 << 30)
    rows = []
    for name, width, height in PICTURES:
        data = photo(width, height)
        rows.append(run_rounds(Row(name), checked_picture(cold, data), rounds))
        body = chat("image", data)
        plain = json.dumps({"messages": [{"role": "user", "content": "What is it?"}]}).encode()
        arms: dict[str, Work] = {
            "ours": lambda body=body: warm.prepare_chat(body),
            "ours_without_cache": lambda body=body: cold.prepare_chat(body),
            "ours_without_picture": lambda plain=plain: warm.prepare_chat(plain),
        }
        rows.append(run_rounds(Row(f"{name} seen before, whole request"), arms, rounds))
        patches, _ = cold.preprocess_image(data)
        size = Row(f"{name}, patch bytes sent", unit="bytes")
        size.median = size.best = size.wall = {"ours": len(patches)}
        rows.append(size)
    name, width, height = PICTURES[0]
    arms = checked_picture(cold, photo(width, height, "AVIF"))
    del arms["bare_decode"]  # of JPEG
    # ours starts a child
    rows.append(run_rounds(Row(name.replace("JPEG", "AVIF")), arms, rounds, SETTLE_S))
    return rows


def clip_rows(rounds: int, kinds: Sequence[ClipKind]) -> list[Row]:
    cold = preparer(0)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for kind in kinds:
            path = make_clip(Path(directory), kind)
            data = path.read_bytes()
            controls = {"fps": kind.fps, "max_long_side_pixel": kind.long_side}
            _, (_, height, width), frames, _ = cold.preprocess_video(data, **controls)
            body = chat("video", data, **controls)
            arms: dict[str, Work] = {
                "ours": lambda body=body: cold.prepare_chat(body),
                **clip_arms(path, frames, (height * PATCH, width * PATCH)),
            }
            if kind.rounds == 1:
                arms = {name: arms[name] for name in ("ours", "bare_decode")}
            row_rounds = min(rounds, kind.rounds)
            rows.append(run_rounds(Row(kind.name), arms, row_rounds, SETTLE_S))
    return rows


def gateway_rows(rounds: int, smg: Path | None) -> list[Row]:
    """First requests through whole gateways; for clips the bare decode beside them."""
    rows = []
    with tempfile.TemporaryDirectory() as directory, media_gateways.gateways(smg) as arms:
        for name, width, height in PICTURES:
            body = json.loads(chat("image", photo(width, height)))
            times = 1 if rounds == 1 else REQUESTS
            figures = media_gateways.compare(arms, body, rounds, times)
            rows.append(measured(Row(f"{name}, a first request through the gateway"), *figures))
        for kind in (clip for clip in CLIPS if clip.plays == 1):
            path = make_clip(Path(directory), kind)
            body = json.loads(chat("video", path.read_bytes(), fps=kind.fps))
            row = measured(
                Row(f"{kind.name}, through the gateway"),
                *media_gateways.compare(arms, body, min(rounds, kind.rounds), 1),
            )
            bare = {"bare_decode": clip_arms(path, [], [])["bare_decode"]}
            alone = run_rounds(Row(""), bare, min(rounds, kind.rounds), SETTLE_S)
            rows.append(measured(row, alone.median, alone.best, alone.wall))
    return rows


def measured(row: Row, median: Figures, best: Figures, wall: Figures) -> Row:
    """The row with more arms."""
    for known, more in ((row.median, median), (row.best, best), (row.wall, wall)):
        known.update({name: round(figure, 3) for name, figure in more.items()})
    return row


def machine() -> dict[str, str]:
    model = platform.processor() or platform.machine()
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        names = [line for line in cpu_info.read_text().splitlines() if "model name" in line]
        model = names[0].split(":")[1].strip() if names else model
    return {
        "cpu": f"{model}, {os.cpu_count()} logical cores",
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()),
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
    parser.add_argument(
        "--rounds", type=int, default=15, help="of each picture; clips have 3, an hour's clip 1"
    )
    parser.add_argument(
        "--only",
        choices=["pictures", "clips", "gateways", "hour"],
        help="a part of it; gateways (built by `make bench`) and the hour are no part of the whole",
    )
    parser.add_argument("--smg", type=Path, metavar="PROGRAM", help="the peer's smg, for gateways")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows: list[Row] = []
    try:
        if options.only in (None, "pictures"):
            rows += picture_rows(options.rounds)
    except MismatchError as error:
        print(f"m3stack bench media: {error}", file=sys.stderr)
        return 1
    if options.only == "gateways":
        if missing := media_gateways.missing_programs(options.smg):
            print(f"m3stack bench media: not built: {', '.join(missing)}", file=sys.stderr)
            return 2
        rows += gateway_rows(options.rounds, options.smg)
    elif options.only != "pictures":
        if shutil.which("ffmpeg") is None:
            print("m3stack bench media: ffmpeg is not installed", file=sys.stderr)
            return 2
        kinds = {"clips": CLIPS, "hour": (HOUR,), None: CLIPS}[options.only]
        rows += clip_rows(options.rounds, kinds)
    for row in rows:
        print(row.name)
        for arm, median in row.median.items():
            best, wall = row.best[arm], row.wall[arm]
            print(f"  {arm:20} {median:10.3f} {row.unit}   best {best:.3f}   wall {wall:.3f}")
    if options.json:
        flat = [
            {"name": row.name, "unit": row.unit, **row.median, "best": row.best, "wall": row.wall}
            for row in rows
        ]
        report = {"machine": machine(), "rows": flat}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
