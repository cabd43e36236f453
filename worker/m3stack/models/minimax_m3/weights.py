"""Fills a model from safetensors files: every tensor exactly once, or a named error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from m3stack.errors import StartupError
from m3stack.kernels.interface import Kernels
from m3stack.layers import Place
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.layout import Placement, checkpoint_layout
from m3stack.models.minimax_m3.model import M3Model
from m3stack.models.strict_json import Section, read_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

Progress = Callable[[int, int], None]

_BYTES_OF_DTYPE = {"F32": 4, "F16": 2, "BF16": 2}
_SHOWN_NAMES = 5


def load_model(
    path: Path | str,
    *,
    config: M3Config,
    kernels: Kernels,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
) -> M3Model:
    """Builds the model on a device and fills it, one tensor at a time.

    Args:
        path: the checkpoint directory: `model.safetensors`, or shards and their index.
        config: of that directory.
        dtype: of the model; router weight, router bias and patch embedding stay fp32.
        progress: called with bytes done and bytes in all, first with 0, last with both equal.

    Raises:
        StartupError: quantised weights; a file, tensor or index entry that is missing, unknown,
            doubled or unreadable; a tensor of another shape or dtype.
    """
    if config.quantization is not None:
        raise StartupError(
            f"{path}: weights quantised by {config.quantization!r} are not supported yet; "
            "use the repository with bfloat16 weights"
        )
    layout = checkpoint_layout(config)
    shards = _shards(Path(path))
    _check_names(Path(path), shards, layout)
    model = M3Model(config, kernels=kernels, place=Place(device, dtype))
    parameters = dict(model.named_parameters())
    total = _check_tensors(shards, layout)
    done = 0
    progress(done, total)
    for file, names in shards.items():
        with _open(file) as tensors:
            for name in names:
                tensor = _read(tensors, file, name)
                _fill(parameters, layout[name], tensor)
                done += tensor.nbytes
                progress(done, total)
    return model


def _fill(parameters: Mapping[str, nn.Parameter], placement: Placement, tensor: Tensor) -> None:
    target = parameters[placement.parameter].detach()
    if placement.expert is not None:
        target = target[placement.expert]
    rows = target.narrow(0, placement.first_row, placement.shape[0])
    # the patch convolution is stored with five dims and used as a matrix
    rows.copy_(tensor.view(rows.shape))


def _shards(directory: Path) -> dict[Path, list[str]]:
    """Every weight file with the tensors it holds, checked against the index if there is one."""
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.exists() and index.exists():
        raise StartupError(
            f"{directory} holds both {SINGLE_FILE} and {INDEX_FILE}; remove one of them"
        )
    if single.exists():
        return {single: _names(single)}
    if not index.exists():
        raise StartupError(f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
    section = Section(
        INDEX_FILE, read_object(index), required=("weight_map",), optional=("metadata",)
    )
    weight_map = section.inner("weight_map")
    shards: dict[Path, list[str]] = {}
    for file_name in sorted({str(value) for value in weight_map.values()}):
        if Path(file_name).name != file_name:
            raise StartupError(f"{INDEX_FILE} names {file_name!r}, which is no plain file name")
        file = directory / file_name
        shards[file] = _names(file)
        mapped = {name for name, value in weight_map.items() if value == file_name}
        end = f"against what {INDEX_FILE} says of it"
        _complain(f"{file_name} lacks", mapped - set(shards[file]), end)
        _complain(f"{file_name} holds", set(shards[file]) - mapped, end)
    return shards


def _names(file: Path) -> list[str]:
    with _open(file) as tensors:
        return list(tensors.keys())


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except FileNotFoundError:
        raise StartupError(f"{file} does not exist") from None
    except (SafetensorError, OSError) as error:
        raise StartupError(f"{file} is not a readable safetensors file: {error}") from error


def _read(tensors: Any, file: Path, name: str) -> Tensor:
    try:
        return tensors.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise StartupError(f"{file.name}: tensor {name} cannot be read: {error}") from error


def _check_names(
    directory: Path, shards: Mapping[Path, list[str]], layout: Mapping[str, Placement]
) -> None:
    held = Counter(name for names in shards.values() for name in names)
    doubled = [name for name, count in held.items() if count > 1]
    _complain(f"{directory} holds", doubled, "more than once")
    _complain(f"{directory} lacks", set(layout) - set(held), "which config.json calls for")
    _complain(f"{directory} holds", set(held) - set(layout), "which config.json has no place for")


def _check_tensors(shards: Mapping[Path, list[str]], layout: Mapping[str, Placement]) -> int:
    """Checks shapes and dtypes from the headers; returns the bytes in all."""
    total = 0
    for file, names in shards.items():
        with _open(file) as tensors:
            for name in names:
                header = tensors.get_slice(name)
                shape, dtype = tuple(header.get_shape()), header.get_dtype()
                if shape != layout[name].shape:
                    raise StartupError(
                        f"{file.name}: tensor {name} has shape {list(shape)}, "
                        f"config.json calls for {list(layout[name].shape)}"
                    )
                if dtype not in _BYTES_OF_DTYPE:
                    raise StartupError(
                        f"{file.name}: tensor {name} has dtype {dtype}, "
                        f"expected one of {', '.join(_BYTES_OF_DTYPE)}"
                    )
                total += _BYTES_OF_DTYPE[dtype] * layout[name].numel
    return total


def _complain(start: str, names: Iterable[str], end: str) -> None:
    found = sorted(names)
    if found:
        more = f" and {len(found) - _SHOWN_NAMES} more" if len(found) > _SHOWN_NAMES else ""
        raise StartupError(f"{start} {', '.join(found[:_SHOWN_NAMES])}{more}, {end}")
