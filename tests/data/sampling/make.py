"""Writes vectors.txt: frame choices by a plain transcription of the sampling rule.

Run: python tests/data/sampling/make.py. A line: frames, rate of the clip, wanted rate, most frames,
a colon, the chosen frames. Rates are written as the bits of a double, so that no digit is lost.
"""

import math
import random
import struct
from pathlib import Path


def choose(total: int, video_fps: float, fps: float, max_frames: int) -> list[int]:
    """The rule, in Python floats."""
    chosen = [0]
    while True:
        time = chosen[-1] / video_fps
        following = max(chosen[-1] + 1, math.ceil((time + 1.0 / fps - 1e-4) * video_fps))
        if following >= total:
            break
        chosen.append(following)
    last = total - 1
    if chosen[-1] != last and last / video_fps - chosen[-1] / video_fps > 1e-4:
        chosen.append(last)
    if len(chosen) > max_frames:
        step = len(chosen) / (max_frames - 1)
        chosen = [chosen[int(i * step)] for i in range(max_frames - 1)] + [chosen[-1]]
    return chosen


def cases() -> list[tuple[int, float, float, int]]:
    """Common rates and lengths, then random ones."""
    rng = random.Random(20260102)
    whole = [24.0, 25.0, 30.0, 60.0, 10.0, 0.5, 12.5, 15.0]
    rates = [*whole, 24000 / 1001, 30000 / 1001, 60000 / 1001]
    out = [(1, 10.0, 1.0, 768), (2, 10.0, 1.0, 768), (100, 24.0, 1.0, 768), (5, 0.5, 2.0, 768)]
    out += [
        (60, 60.0, 1.0, 768),
        (30, 10.0, 30.0, 768),
        (18000, 30.0, 1.0, 768),
        (20, 10.0, 1.0, 2),
    ]
    out += [
        (20000, 20000.0, 1.0, 768),
        (3, 1e-6, 5.0, 768),
        (11, 1.0, 1.0, 768),
        (12, 1.0, 1.0, 11),
    ]
    for _ in range(300):
        fps = rng.choice([0.2, 0.5, 1.0, 2.0, 5.0, rng.uniform(0.2, 5.0)])
        rate = rng.choice([*rates, rng.uniform(0.1, 120.0)])
        most = rng.choice([768, 768, 768, rng.randint(2, 40)])
        out.append((rng.randint(1, 2000), rate, fps, most))
    return out


def bits(value: float) -> str:
    """The double as 16 hexadecimal digits."""
    return struct.pack(">d", value).hex()


def main() -> None:
    """Writes the file beside this script."""
    lines = []
    for total, rate, fps, most in cases():
        chosen = " ".join(map(str, choose(total, rate, fps, most)))
        lines.append(f"{total} {bits(rate)} {bits(fps)} {most}: {chosen}\n")
    Path(__file__).with_name("vectors.txt").write_text("".join(lines))


if __name__ == "__main__":
    main()
