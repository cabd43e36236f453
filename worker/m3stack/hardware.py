"""Which device a worker computes on, and in what dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from m3stack.config import WorkerConfig
from m3stack.errors import StartupError


@dataclass(frozen=True, slots=True)
class Hardware:
    """Where the model runs, and in what."""

    device: torch.device
    dtype: torch.dtype


def choose_hardware(config: WorkerConfig, rank: int = 0) -> Hardware:
    """Device and dtype the configuration asks for; several ranks take a GPU of their host each.

    Raises:
        StartupError: the machine does not have it, or not for all ranks.
    """
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise StartupError(f"device is {config.device}, but torch sees no CUDA GPU here")
        if (device.index or 0) >= torch.cuda.device_count():
            raise StartupError(
                f"device is {config.device}, but there are only {torch.cuda.device_count()} GPUs"
            )
    if config.tensor_parallel > 1 and device.type == "cuda":
        if device.index is not None:
            raise StartupError(
                f"device is {config.device}, but {config.tensor_parallel} ranks take one GPU each; "
                "say cuda, and choose GPUs with CUDA_VISIBLE_DEVICES"
            )
        own = config.tensor_parallel // config.hosts
        if torch.cuda.device_count() < own:
            spread = "" if config.hosts == 1 else f" over {config.hosts} hosts"
            raise StartupError(
                f"tensor_parallel is {config.tensor_parallel}{spread}, but there are only "
                f"{torch.cuda.device_count()} GPUs"
            )
        device = torch.device("cuda", rank % own)
    by_device = torch.float32 if device.type == "cpu" else torch.bfloat16
    dtypes = {"auto": by_device, "float32": torch.float32, "bfloat16": torch.bfloat16}
    return Hardware(device, dtypes[config.dtype])
