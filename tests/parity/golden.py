"""The golden tiny checkpoint, and its pixels turned back into the bytes they came from."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from m3stack.batch import PatchBatch

DIRECTORY = Path(__file__).parent.parent / "data" / "tiny_m3"

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)

Grid = tuple[int, int, int]


def outputs(name: str) -> dict[str, Tensor]:
    """Tensors of `golden_<name>.safetensors`."""
    return load_file(DIRECTORY / f"golden_{name}.safetensors")


def config_object() -> dict:
    """The parsed config.json."""
    return json.loads((DIRECTORY / "config.json").read_text(encoding="utf-8"))


def pixel_bytes(pixel_values: Tensor) -> Tensor:
    """The uint8 patch rows [n, 3 * 2 * 14 * 14] that were normalised into `pixel_values`."""
    per_channel = pixel_values.double().view(len(pixel_values), 3, -1)
    std, mean = (torch.tensor(x, dtype=torch.float64)[:, None] for x in (STD, MEAN))
    exact = (per_channel * std + mean) * 255
    rounded = exact.round()
    assert (exact - rounded).abs().max() < 1e-3, "these pixels were not made from bytes"
    return rounded.to(torch.uint8).flatten(1)


def still_bytes(patches: Tensor) -> Tensor:
    """A still's rows without the second copy of its one frame: [n, 3 * 14 * 14]."""
    frames = patches.view(len(patches), 3, 2, -1)
    assert torch.equal(frames[:, :, 0], frames[:, :, 1])
    return frames[:, :, 0].reshape(len(patches), -1)


def patch_batch(patches: list[Tensor], frames: list[int], grids: list[Grid]) -> PatchBatch:
    """A batch with the released mean and std."""
    return PatchBatch(
        patches=tuple(patches),
        frames_per_patch=tuple(frames),
        grids_thw=tuple(grids),
        mean=MEAN,
        std=STD,
    )
