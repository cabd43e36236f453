"""Writes sizes.txt and times.txt: target sizes by the reference's own function, printed times.

Run: python tests/data/vision/make.py (transformers 5.24). A line of sizes.txt: height, width, kind,
target height and width, or `refused`. A line of times.txt: frame number, the bits of the clip's
rate as hexadecimal digits, the time with one decimal.
"""

import random
import struct
from pathlib import Path

from transformers.models.minimax_m3_vl.image_processing_minimax_m3_vl import smart_resize

MAX_PIXELS = {"image": 451_584, "frame": 602_112}
HALF_WAY = [(98, 98), (42, 70), (14, 14), (70, 42), (126, 154), (14, 700), (700, 14), (13, 700)]
THIN = [
    (1, 1),
    (1, 200),
    (200, 1),
    (1, 201),
    (10, 1000),
    (2000, 10),
    (14, 400),
    (8000, 40),
    (2, 401),
]


def sizes() -> list[tuple[int, int]]:
    """Half-way and thin sizes, then random ones of every scale, many on multiples of 14."""
    rng = random.Random(20260103)
    out = [*HALF_WAY, *THIN, (672, 672), (700, 700), (1080, 1920), (4000, 3000), (65535, 65535)]
    for _ in range(300):
        out.append((round(2 ** rng.uniform(0, 13)), round(2 ** rng.uniform(0, 13))))
    for _ in range(200):
        out.append((14 * rng.randint(1, 150), 14 * rng.randint(1, 150)))
    return out


def target(height: int, width: int, kind: str) -> str:
    """What the reference makes of a size."""
    try:
        h, w = smart_resize(height, width, 28, 3136, MAX_PIXELS[kind])
    except ValueError:
        return "refused"
    return f"{h} {w}"


def times() -> list[tuple[int, float]]:
    """Frames and rates whose times are exact halves of a tenth, then random ones."""
    rng = random.Random(20260104)
    out = [(i, rate) for rate in (4.0, 8.0, 16.0, 20.0, 40.0) for i in range(20)]
    rates = [24.0, 25.0, 30.0, 24000 / 1001, 30000 / 1001]
    return out + [
        (rng.randint(0, 100_000), rng.choice([*rates, rng.uniform(0.1, 90)])) for _ in range(200)
    ]


def main() -> None:
    """Writes both files beside this script."""
    lines = [f"{h} {w} {kind} {target(h, w, kind)}\n" for h, w in sizes() for kind in MAX_PIXELS]
    Path(__file__).with_name("sizes.txt").write_text("".join(lines))
    lines = [f"{i} {struct.pack('>d', rate).hex()} {i / rate:.1f}\n" for i, rate in times()]
    Path(__file__).with_name("times.txt").write_text("".join(lines))


if __name__ == "__main__":
    main()
