"""Writes vectors.txt: digests of what torch's uint8 bicubic antialias makes of known noise.

Run: python tests/data/resize/make.py (torch 2.11). A line: source width and height, target width
and height, pattern, SHA-256 of the target's interleaved RGB bytes. The source bytes come from a
counter-based generator that the Rust tests repeat, so that no picture need be stored.
"""

import hashlib
import random
from pathlib import Path

import numpy as np
import torch

PATTERNS = ("noise", "extremes", "ramp")

FIXED_SHAPES = [
    (1, 1, 56, 56),
    (1, 1, 1, 1),
    (1, 200, 28, 812),
    (200, 1, 812, 28),
    (2, 2, 28, 28),
    (27, 29, 56, 84),
    (28, 28, 28, 28),
    (28, 28, 28, 56),
    (28, 28, 56, 28),
    (98, 98, 112, 112),
    (100, 37, 112, 28),
    (410, 97, 420, 84),
    (1000, 10, 560, 28),
    (1920, 1080, 896, 504),
    (1080, 1920, 504, 896),
    (4000, 500, 1876, 224),
    (40, 8000, 28, 8008),
    (8000, 3, 28, 28),
    (3, 8000, 28, 28),
    (6000, 6, 28, 6),
    (7, 5000, 7, 28),
    (640, 480, 756, 560),
    (1280, 720, 1008, 588),
    (65535, 1, 28, 1),
    (1, 65535, 1, 28),
]


def source(width: int, height: int, pattern: str) -> np.ndarray:
    """Bytes [height, width, 3]: splitmix64 of the byte's number, its top byte."""
    count = width * height * 3
    index = np.arange(1, count + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = index * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    data = (mixed >> np.uint64(56)).astype(np.uint8)
    if pattern == "extremes":
        data = np.where(data >= 128, 255, 0).astype(np.uint8)
    elif pattern == "ramp":
        data = (np.arange(count) // 3 % 256).astype(np.uint8)
    return data.reshape(height, width, 3)


def resized(picture: np.ndarray, width: int, height: int) -> np.ndarray:
    """Torch's answer, through the layout that the reference processor uses."""
    tensor = torch.from_numpy(picture).permute(2, 0, 1).contiguous()[None]
    out = torch.nn.functional.interpolate(
        tensor, size=(height, width), mode="bicubic", antialias=True, align_corners=False
    )
    return out[0].permute(1, 2, 0).contiguous().numpy()


def shapes() -> list[tuple[int, int, int, int]]:
    """The fixed shapes, then random ones of every scale."""
    rng = random.Random(20260101)

    def side(top: float) -> int:
        return round(2 ** rng.uniform(0, top))

    def merged() -> int:
        return 28 * rng.randint(1, 20)

    free = [(side(9), side(9), side(9), side(9)) for _ in range(160)]
    model = [(side(10), side(10), merged(), merged()) for _ in range(80)]
    return FIXED_SHAPES + free + model


def main() -> None:
    """Writes the file beside this script."""
    torch.set_num_threads(1)
    lines = []
    for number, (sw, sh, tw, th) in enumerate(shapes()):
        pattern = PATTERNS[number % len(PATTERNS)]
        out = resized(source(sw, sh, pattern), tw, th)
        lines.append(f"{sw} {sh} {tw} {th} {pattern} {hashlib.sha256(out.tobytes()).hexdigest()}\n")
    Path(__file__).with_name("vectors.txt").write_text("".join(lines))


if __name__ == "__main__":
    main()
