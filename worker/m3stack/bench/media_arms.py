"""Whom `m3stack bench media` compares with: decoders alone, the reference's processor, and other
ways from a file to patch rows; those that are not installed are left out.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms.v2 import functional
from transformers.models.minimax_m3_vl.image_processing_minimax_m3_vl import (
    MiniMaxM3VLImageProcessor,
)

Work = Callable[[], object]
Bytes = NDArray[np.uint8]

PATCH = 14
CUBIC = torchvision.transforms.InterpolationMode.BICUBIC


def patch_rows(frame: Bytes) -> Bytes:
    """Patch rows [N, 3, 14, 14] of a frame [height, width, 3], by array reshapes."""
    height, width, _ = frame.shape
    blocks = frame.reshape(height // 28, 2, PATCH, width // 28, 2, PATCH, 3)
    return np.ascontiguousarray(blocks.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(-1, 3, PATCH, PATCH)


def resized_rows(planes: torch.Tensor, target: Sequence[int]) -> Bytes:
    """Patch rows of u8 planes [3, height, width], resized by torch."""
    small = functional.resize(planes, list(target), interpolation=CUBIC, antialias=True)
    return patch_rows(small.permute(1, 2, 0).numpy())


def run_ffmpeg(arguments: Sequence[str]) -> None:
    """Runs FFmpeg to its end; what it writes to its output is thrown away."""
    command = ["ffmpeg", "-nostdin", "-loglevel", "error", "-y", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def picture_arms(data: bytes, target: Sequence[int]) -> dict[str, Work]:
    """Ways from a JPEG's bytes to its frame (`bare_decode`) or its patch rows."""
    source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    processor = MiniMaxM3VLImageProcessor()

    def by_torch() -> Bytes:
        planes = torch.from_numpy(np.array(Image.open(io.BytesIO(data)))).permute(2, 0, 1)
        return resized_rows(planes, target)

    def by_pillow() -> Bytes:
        image = Image.open(io.BytesIO(data))
        return patch_rows(
            np.asarray(image.resize((target[1], target[0]), Image.Resampling.BICUBIC))
        )

    return {
        "bare_decode": lambda: torchvision.io.decode_jpeg(source),
        "torch": by_torch,
        "pillow": by_pillow,
        "transformers": lambda: processor(Image.open(io.BytesIO(data)), return_tensors="np"),
    }


def clip_arms(path: Path, frames: Sequence[int], target: Sequence[int]) -> dict[str, Work]:
    """Ways from a clip's file to all its frames (`bare_decode`) or to patch rows of some."""
    arms: dict[str, Work] = {
        "bare_decode": lambda: run_ffmpeg(["-i", str(path), "-f", "null", "-"]),
    }
    if importlib.util.find_spec("av") is not None:
        arms["pyav"] = lambda: _by_pyav(path, frames, target)
    if importlib.util.find_spec("torchcodec") is not None:
        arms["torchcodec"] = lambda: _by_torchcodec(path, frames, target)
    return arms


def _by_pyav(path: Path, frames: Sequence[int], target: Sequence[int]) -> list[Bytes]:
    av: Any = importlib.import_module("av")
    wanted = set(frames)
    rows: list[Bytes] = []
    with av.open(str(path)) as container:
        for number, frame in enumerate(container.decode(video=0)):
            if number in wanted:
                pixels = torch.from_numpy(frame.to_ndarray(format="rgb24"))
                rows.append(resized_rows(pixels.permute(2, 0, 1), target))
    return rows


def _by_torchcodec(path: Path, frames: Sequence[int], target: Sequence[int]) -> list[Bytes]:
    decoders: Any = importlib.import_module("torchcodec.decoders")
    decoder = decoders.VideoDecoder(str(path), num_ffmpeg_threads=1, seek_mode="exact")
    # one at a time, so that a long clip is not held
    return [resized_rows(decoder.get_frame_at(number).data, target) for number in frames]
