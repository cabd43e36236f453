"""Models of the bench: weights drawn once for a format, under operations that change by arm."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any, cast

import torch

from m3stack.bench.agentic.arms import Arm
from m3stack.bench.agentic.step_profile import TimedOperations
from m3stack.first_steps import with_layers
from m3stack.kernels.interface import Kernels
from m3stack.kernels.select import build_kernels
from m3stack.layers import Place
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.model import M3Model
from m3stack.models.minimax_m3.random_weights import random_model
from m3stack.rank_model import kernel_shape


def truncated(config: M3Config, num_sparse: int) -> M3Config:
    """The same widths with the first dense layer, `num_sparse` sparse ones and next to no ViT."""
    return replace(
        config,
        num_layers=1 + num_sparse,
        sparse_layers=(False, *(True,) * num_sparse),
        moe_layers=(False, *(True,) * num_sparse),
        vision=replace(config.vision, num_layers=1),
        quantization=None,
    )


def without_dense_layers(model: M3Model) -> M3Model:
    """The same weights, only the sparse layers of them."""
    sparse = model.config.sparse_layers
    return with_layers(model, [number for number, is_sparse in enumerate(sparse) if is_sparse])


class Models:
    """The model of one format at a time.

    Args:
        config: its sizes.
        kernels: name of the back end that arms change.
        device: where it lives.
    """

    def __init__(self, config: M3Config, kernels: str, device: torch.device) -> None:
        self.config, self._device = config, device
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        shape = kernel_shape(config, self._dtype)
        self.kernels = build_kernels(kernels, shape=shape, device=device)
        self._now = self.kernels
        self._model: M3Model | None = None
        self._keeps_mxfp8 = False
        self.operations = TimedOperations(time.perf_counter)

    def get(self, arm: Arm) -> M3Model:
        """The arm's model; those given before change with it."""
        return self.with_kernels(arm.kernels, keeps_mxfp8=arm.keeps_mxfp8)

    def with_kernels(self, change: Callable[[Kernels], Kernels], *, keeps_mxfp8: bool) -> M3Model:
        """The model over changed operations; those given before change with it."""
        self._now = change(self.kernels)
        if self._model is None or self._keeps_mxfp8 != keeps_mxfp8:
            self._model = None
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            place = Place(self._device, self._dtype, keeps_mxfp8=keeps_mxfp8)
            self._model = random_model(self.config, kernels=self._switched(), place=place)
            self._keeps_mxfp8 = keeps_mxfp8
        return self._model

    def _switched(self) -> Kernels:
        names = [field.name for field in fields(Kernels) if field.name != "name"]
        operations: dict[str, Any] = {name: partial(self._call, name) for name in names}
        return Kernels(name="of the arm", **operations)

    def _call(self, name: str, *arguments: object, **named: object) -> object:
        run = cast(Callable[..., object], getattr(self._now, name))
        return self.operations(name, lambda: run(*arguments, **named))
