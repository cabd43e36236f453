"""One rank's part of the model: its kernels, its weights, the threads it computes with."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from m3stack.cache.tiered import with_tier
from m3stack.config import WorkerConfig
from m3stack.errors import StartupError
from m3stack.hardware import Hardware
from m3stack.kernels.build import KernelUnavailableError
from m3stack.kernels.interface import Kernels
from m3stack.kernels.select import build_kernels
from m3stack.kernels.shape import KernelShape
from m3stack.layers import Place
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.e4m3_values import fold_value_scales
from m3stack.models.minimax_m3.model import M3Model
from m3stack.models.minimax_m3.random_weights import random_model
from m3stack.models.minimax_m3.ranks import Rank, tensor_rank
from m3stack.models.minimax_m3.weights import holds_mxfp8_alone, load_model
from m3stack.parallel import Mesh

_log = logging.getLogger(__name__)

# below that many parameters, handing work to threads costs more than it saves
SMALL_MODEL_VALUES = 50_000_000

Progress = Callable[[int, int], None]


def load_rank(
    config: WorkerConfig,
    model_config: M3Config,
    hardware: Hardware,
    *,
    mesh: Mesh,
    progress: Progress = lambda done, total: None,
) -> M3Model:
    """This rank's part of the model.

    Args:
        progress: called with bytes loaded and bytes in all; may raise to end the loading.

    Raises:
        StartupError: checkpoint, kernels or memory do not allow it.
    """
    rank = place_of(config, mesh.rank)
    own = model_config.per_rank(mesh.size, width_ranks=rank.width_ranks)
    kernels = choose_kernels(config.kernels, own, hardware)
    if config.hot_pages:
        kernels = with_tier(kernels)
    _log.info("kernels name=%s", kernels.name)
    keeps = keeps_mxfp8(config, model_config, hardware)
    if config.random_weights:
        _log.warning("weights are random: answers are noise")
        place = Place(hardware.device, hardware.dtype, keeps_mxfp8=keeps)
        model = random_model(model_config, kernels=kernels, place=place, mesh=mesh, rank=rank)
        progress(1, 1)
    else:
        model = load_model(
            Path(config.model_path),
            config=model_config,
            kernels=kernels,
            device=hardware.device,
            dtype=hardware.dtype,
            progress=progress,
            keep_quantised=keeps,
            mesh=mesh,
            rank=rank,
        )
    if config.kv_dtype == "fp8":
        fold_value_scales(model)
    if hardware.device.type == "cpu":
        use_threads(config, model)
    return model


def keeps_mxfp8(config: WorkerConfig, model: M3Config, hardware: Hardware) -> bool:
    """Whether text linears stay in MXFP8 on the device.

    Raises:
        StartupError: they are to be kept beside activations that the kernels do not take.
    """
    is_bf16 = hardware.dtype == torch.bfloat16
    if config.mxfp8_weights == "keep" and not is_bf16 and hardware.device.type == "cuda":
        raise StartupError(
            f"mxfp8_weights is keep and dtype is {config.dtype}: kernels take MXFP8 weights beside "
            "bfloat16 only; choose dtype bfloat16, or mxfp8_weights decode"
        )
    if config.mxfp8_weights != "auto":
        return config.mxfp8_weights == "keep"
    return is_bf16 and hardware.device.type == "cuda" and holds_mxfp8_alone(model)


def place_of(config: WorkerConfig, rank: int) -> Rank:
    """What a rank of the worker holds of its model."""
    return tensor_rank(
        rank,
        config.tensor_parallel,
        expert_parallel=config.expert_parallel,
        index_in_parts=config.shard_index_keys,
    )


def kernel_shape(model: M3Config, dtype: torch.dtype) -> KernelShape:
    """What the choice of kernels must know of a model held in `dtype`."""
    return KernelShape(
        dtype=dtype,
        heads=model.num_heads,
        groups=model.num_kv_heads,
        head_dim=model.head_dim,
        rotary_dim=model.rotary_dim,
        page_tokens=model.block_tokens,
        num_blocks=model.topk_blocks,
        num_local_blocks=model.num_local_blocks,
        vision_heads=model.vision.num_heads,
        vision_head_dim=model.vision.hidden_size // model.vision.num_heads,
        experts=model.num_experts,
        experts_per_token=model.num_experts_per_token,
    )


def choose_kernels(name: str, model: M3Config, hardware: Hardware) -> Kernels:
    """The kernels of a name for a model.

    Raises:
        StartupError: they cannot be had here.
    """
    shape = kernel_shape(model, hardware.dtype)
    try:
        return build_kernels(name, shape=shape, device=hardware.device)
    except KernelUnavailableError as error:
        raise StartupError(str(error)) from error


def use_threads(config: WorkerConfig, model: nn.Module) -> None:
    """Sets how many threads a CPU computes with."""
    num_values = sum(parameter.numel() for parameter in model.parameters())
    own = len(os.sched_getaffinity(0)) // (config.tensor_parallel // config.hosts)
    automatic = 1 if num_values < SMALL_MODEL_VALUES else max(1, own)
    torch.set_num_threads(config.cpu_threads or automatic)
