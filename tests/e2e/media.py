"""Pictures and clips made on the spot, as bytes and as data URLs."""

from __future__ import annotations

import base64
from pathlib import Path

import ffmpeg


def picture(folder: Path, *, size: str = "640x480", name: str = "card.jpg") -> bytes:
    """A test card drawn by FFmpeg; the name's suffix decides the format."""
    path = folder / name
    source = ffmpeg.input(f"testsrc2=size={size}:rate=1:duration=1", f="lavfi")
    source.output(str(path), vframes=1).run(quiet=True, overwrite_output=True)
    return path.read_bytes()


def clip(folder: Path, *, size: str = "320x240", seconds: int = 5, name: str = "card.mp4") -> bytes:
    """A moving test card, 24 frames a second, H.264."""
    path = folder / name
    source = ffmpeg.input(f"testsrc2=size={size}:rate=24:duration={seconds}", f="lavfi")
    source.output(str(path), vcodec="libx264", pix_fmt="yuv420p").run(
        quiet=True, overwrite_output=True
    )
    return path.read_bytes()


def image_part(data: bytes, mime: str = "image/jpeg") -> dict:
    url = f"data:{mime};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def video_part(data: bytes, mime: str = "video/mp4") -> dict:
    url = f"data:{mime};base64,{base64.b64encode(data).decode()}"
    return {"type": "video_url", "video_url": {"url": url}}


def text_part(text: str) -> dict:
    return {"type": "text", "text": text}
