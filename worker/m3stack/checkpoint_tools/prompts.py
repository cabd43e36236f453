"""Prompts that a checkpoint is verified with: token ids, and one made-up picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from m3stack.batch import PatchBatch
from m3stack.errors import StartupError
from m3stack.models.minimax_m3.config import M3Config

# of the released picture processor
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)

PASSAGE = "The river is {n} metres wide here; upstream lie {m} mills and a bridge of stone. "
CODE = "def area(width: float, height: float) -> float:\n    return width * height\n"
CHINESE = "请用一句话描述这张图片里的风景，并说明天气如何。"
QUESTION = "What does this picture show? Answer in one sentence."
PICTURE_GRID = (1, 8, 12)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        name: shown beside its figures.
        ids_T: int64 [T], placeholders of the picture included.
        picture: its patches, or None.
    """

    name: str
    ids_T: Tensor
    picture: PatchBatch | None = None

    @property
    def pixel_values(self) -> Tensor:
        """The picture as transformers takes it: fp32 [patches, channels * 2 * patch * patch]."""
        assert self.picture is not None
        (rows,) = self.picture.patches
        channels = len(self.picture.mean)
        pixels = rows.float().view(len(rows), channels, 1, -1) / 255
        mean, std = (
            torch.tensor(values).view(1, channels, 1, 1)
            for values in (self.picture.mean, self.picture.std)
        )
        # a still's frame stands for both of its patch
        return ((pixels - mean) / std).expand(-1, -1, 2, -1).flatten(1)


def make_prompts(directory: Path, config: M3Config, long_tokens: int) -> list[Prompt]:
    """Short texts, one of `long_tokens`, and a picture between words.

    Raises:
        StartupError: the directory has no tokenizer, or it knows tokens that the model does not.
    """
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise StartupError(f"{file} does not exist; prompts cannot be made without it")
    tokenizer = Tokenizer.from_file(str(file))

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        if not found or max(found) >= config.vocab_size:
            raise StartupError(f"{file} does not fit the model: {text[:20]!r} becomes {found[:5]}")
        return found

    passage = "".join(PASSAGE.format(n=n, m=n * n) for n in range(2, 2 + long_tokens))
    grid, vision = PICTURE_GRID, config.vision
    placeholders = [config.image_token_id] * (grid[1] * grid[2] // vision.merge_size**2)
    return [
        _text("English", ids(PASSAGE.format(n=40, m=3))),
        _text("code", ids(CODE)),
        _text("Chinese", ids(CHINESE)),
        _text(f"{long_tokens} tokens", ids(passage)[:long_tokens]),
        Prompt("picture", torch.tensor([*placeholders, *ids(QUESTION)]), _picture(config)),
    ]


def _text(name: str, ids: Sequence[int]) -> Prompt:
    return Prompt(name, torch.tensor(ids))


def _picture(config: M3Config) -> PatchBatch:
    """Smooth colours with some noise, the same on every machine."""
    vision, (_, height, width) = config.vision, PICTURE_GRID
    patch = vision.patch_size**2
    row = torch.arange(height * width)[:, None, None]
    channel = torch.arange(vision.num_channels)[None, :, None]
    pixel = torch.arange(patch)[None, None, :]
    values = (37 * row + 61 * channel + pixel + (row * pixel * 7919 + channel) % 31) % 256
    return PatchBatch(
        patches=(values.to(torch.uint8).flatten(1),),
        frames_per_patch=(1,),
        grids_thw=(PICTURE_GRID,),
        mean=MEAN,
        std=STD,
    )
