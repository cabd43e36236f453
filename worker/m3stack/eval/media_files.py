"""Pictures and clips as files that a client would send."""

from __future__ import annotations

import base64
import struct
import subprocess
import zlib

from m3stack.errors import StartupError
from m3stack.train.encode import Pixels


def png(pixels: Pixels) -> bytes:
    """uint8 [height, width, 3] as a PNG."""
    height, width, _ = pixels.shape
    # every row begins with its filter: none
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows, 6))
        + chunk(b"IEND", b"")
    )


def mp4(frames: Pixels) -> bytes:
    """uint8 [F, height, width, 3] as H.264 of one frame a second, by the program `ffmpeg`.

    Raises:
        StartupError: there is no such program, or it failed.
    """
    _, height, width, _ = frames.shape
    command = ["ffmpeg", "-v", "error", "-f", "rawvideo", "-pix_fmt", "rgb24"]
    command += ["-s", f"{width}x{height}", "-r", "1", "-i", "pipe:0"]
    command += ["-c:v", "libx264", "-crf", "8", "-pix_fmt", "yuv420p", "-threads", "1"]
    # an MP4 on a pipe cannot be rewound for its index
    command += ["-movflags", "frag_keyframe+empty_moov", "-f", "mp4", "pipe:1"]
    try:
        done = subprocess.run(command, input=frames.tobytes(), capture_output=True, check=False)
    except FileNotFoundError:
        raise StartupError("clips are made with the program ffmpeg, which is missing") from None
    if done.returncode:
        raise StartupError(f"ffmpeg could not make a clip: {done.stderr.decode()[-300:]}")
    return done.stdout


def data_url(data: bytes, mime: str) -> str:
    """The file as a data URL."""
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"
