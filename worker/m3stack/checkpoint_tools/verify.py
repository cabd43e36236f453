"""Compares a loaded checkpoint with transformers: the same ids and pixels, the logits side by side.

The two models are loaded one after the other, so that only one has to fit at a time.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from m3stack.batch import DeviceBatch, LayerCache, MediaRows, PatchBatch
from m3stack.checkpoint_tools.conversion_plan import Target
from m3stack.checkpoint_tools.convert import convert
from m3stack.checkpoint_tools.prompts import Prompt, make_prompts
from m3stack.kernels.interface import Kernels, LayerPages, PagedRows
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.model import M3Model
from m3stack.models.minimax_m3.weights import load_model
from m3stack.progress import TransferProgress

# dtype -> (mean difference in logit standard deviations, share of equal argmax) that still agree,
# prompt by prompt. In fp32 two right implementations differ by rounding alone. In bf16 near ties
# of the router and of the block choice fall either way and move single rows by whole units: on
# random weights up to 0.05 deviations and a quarter of a short prompt's argmax.
LIMITS = {torch.float32: (1e-4, 0.99), torch.bfloat16: (0.1, 0.6)}


@dataclass(frozen=True, slots=True)
class Settings:
    """How a checkpoint is verified.

    Attributes:
        kernels: that our model computes with.
        dtype: of both models.
        long_tokens: of the longest prompt.
        keep_quantised: our MXFP8 weights are kept as they are.
    """

    kernels: Kernels
    device: torch.device
    dtype: torch.dtype
    long_tokens: int = 600
    keep_quantised: bool = False


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt's logits, ours against theirs.

    Attributes:
        deviation: standard deviation of their logits, the scale of the differences.
        same_argmax: share of positions with the same likeliest token.
    """

    prompt: str
    num_tokens: int
    max_difference: float
    mean_difference: float
    deviation: float
    same_argmax: float

    def agrees(self, dtype: torch.dtype) -> bool:
        """Whether the difference is what rounding in this dtype explains."""
        mean, share = LIMITS[dtype]
        return self.mean_difference <= mean * self.deviation and self.same_argmax >= share


def verify(directory: Path, settings: Settings) -> list[Comparison]:
    """Runs all prompts through both models.

    Raises:
        StartupError: the checkpoint cannot be loaded, or has no tokenizer.
    """
    config = M3Config.from_dir(directory)
    prompts = make_prompts(directory, config, settings.long_tokens)
    with _plain(directory, config) as plain:
        expected = _their_logits(plain, prompts, settings)
    ours = _our_logits(directory, config, prompts, settings)
    return [compare(*parts) for parts in zip(prompts, ours, expected, strict=True)]


def compare(prompt: Prompt, ours: Tensor, theirs: Tensor) -> Comparison:
    """Differences of two [T, vocab] tensors of logits; NaN anywhere makes them infinite."""
    difference = (ours - theirs).abs().nan_to_num(nan=float("inf"))
    same = (ours.argmax(-1) == theirs.argmax(-1)).float().mean().item()
    return Comparison(
        prompt=prompt.name,
        num_tokens=len(prompt.ids_T),
        max_difference=difference.max().item(),
        mean_difference=difference.mean().item(),
        deviation=theirs.std().item(),
        same_argmax=same,
    )


@contextmanager
def _plain(directory: Path, config: M3Config) -> Iterator[Path]:
    """The checkpoint with plain weights, converted to a temporary folder where it has others."""
    if config.quantization is None:
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="m3stack-verify-") as scratch:
        with TransferProgress("decoding for transformers") as progress:
            target = Path(scratch) / directory.resolve().name
            convert(directory, target, Target.BF16, progress=progress)
        yield target


def _their_logits(directory: Path, prompts: Sequence[Prompt], settings: Settings) -> list[Tensor]:
    with _quiet():
        model: Any = AutoModelForImageTextToText.from_pretrained(directory, dtype=settings.dtype)
    model = model.to(settings.device).eval()
    logits = []
    with torch.inference_mode():
        for prompt in prompts:
            inputs: dict[str, Tensor] = {"input_ids": prompt.ids_T[None]}
            if prompt.picture is not None:
                inputs["pixel_values"] = prompt.pixel_values.to(settings.dtype)
                inputs["image_grid_thw"] = torch.tensor(prompt.picture.grids_thw)
            inputs = {name: value.to(settings.device) for name, value in inputs.items()}
            logits.append(model(**inputs).logits[0].float().cpu())
    del model
    _free(settings.device)
    return logits


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers' notes and bars off the terminal; its errors are raised anyway."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()
        transformers_logging.set_verbosity(verbosity)


def _our_logits(
    directory: Path, config: M3Config, prompts: Sequence[Prompt], settings: Settings
) -> list[Tensor]:
    with TransferProgress(f"loading {directory.resolve().name}") as progress:
        model = load_model(
            directory,
            config=config,
            kernels=settings.kernels,
            device=settings.device,
            dtype=settings.dtype,
            progress=progress,
            keep_quantised=settings.keep_quantised,
        )
    with torch.inference_mode():
        logits = [_run(model, prompt, settings).cpu() for prompt in prompts]
    del model
    _free(settings.device)
    return logits


def _run(model: M3Model, prompt: Prompt, settings: Settings) -> Tensor:
    """Logits of all positions, in one step over a cache of its own."""
    device, count = settings.device, len(prompt.ids_T)
    num_pages = -(-count // model.config.block_tokens)
    media = ()
    if prompt.picture is not None:
        (features_NM,) = model.encode_media(_moved(prompt.picture, device))
        rows_N = (prompt.ids_T == model.config.image_token_id).nonzero()[:, 0].to(device)
        media = (MediaRows(rows_N, features_NM),)
    positions_T = torch.arange(count, device=device)
    batch = DeviceBatch(
        token_ids_T=prompt.ids_T.to(device),
        positions_T=positions_T,
        slots_T=positions_T,
        rows=PagedRows(
            query_start_S1=torch.tensor([0, count], dtype=torch.int32, device=device),
            seq_lens_S=torch.tensor([count], dtype=torch.int32, device=device),
            page_table_SJ=torch.arange(num_pages, dtype=torch.int32, device=device)[None],
            max_query_len=count,
            max_seq_len=count,
        ),
        sample_rows_S=positions_T,
        media=media,
    )
    return model(batch, _cache(model.config, num_pages, settings))


def _cache(config: M3Config, num_pages: int, settings: Settings) -> LayerCache:
    def pages(*shape: int) -> Tensor:
        return torch.zeros(num_pages, *shape, dtype=settings.dtype, device=settings.device)

    groups, block = config.num_kv_heads, config.block_tokens
    return tuple(
        LayerPages(
            k_PGBD=pages(groups, block, config.head_dim),
            v_PGBD=pages(groups, block, config.head_dim),
            index_k_PBD=pages(block, config.index_dim) if is_sparse else None,
        )
        for is_sparse in config.sparse_layers
    )


def _moved(picture: PatchBatch, device: torch.device) -> PatchBatch:
    patches = tuple(rows.to(device) for rows in picture.patches)
    return PatchBatch(
        patches, picture.frames_per_patch, picture.grids_thw, picture.mean, picture.std
    )


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
