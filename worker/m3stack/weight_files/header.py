"""The header of a safetensors file: which tensors it holds and where, checked against its size.

Source: safetensors format: 8 bytes of header length, little-endian; a JSON object of tensors with
dtype, shape and byte range; the tensors' bytes, without gaps.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from m3stack.errors import StartupError

METADATA_KEY = "__metadata__"
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    # exponents are read as the bytes they are
    "F8_E8M0": torch.uint8,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items() if name != "F8_E8M0"}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file.

    Attributes:
        dtype: safetensors name.
        shape: of the tensor.
        start: offset of its bytes in the file.
        num_bytes: of the tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a file, in the order of their bytes.

    Raises:
        StartupError: the file does not exist, is cut short, or is no safetensors file; says where.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES or not 0 < length <= min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
                raise _broken(path, f"a header of {length} bytes in a file of {size}")
            text = file.read(length)
    except FileNotFoundError:
        raise StartupError(f"{path} does not exist") from None
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error}") from error
    try:
        data = json.loads(text, object_pairs_hook=_unique)
    except (UnicodeDecodeError, ValueError) as error:
        raise _broken(path, f"header is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise _broken(path, "header is no JSON object")
    first = LENGTH_BYTES + length
    entries = {
        name: _entry(path, name, fields, first)
        for name, fields in data.items()
        if name != METADATA_KEY
    }
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].num_bytes)))
    end = first
    for name, entry in ordered.items():
        if entry.start != end:
            raise _broken(
                path, f"tensor {name} begins at {entry.start}, the last one ended at {end}"
            )
        end += entry.num_bytes
    if end != size:
        raise _broken(path, f"its tensors end at {end}, the file at {size}")
    return ordered


def header_bytes(entries: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """The first bytes of a file that holds these tensors back to back, in this order.

    Args:
        entries: name -> (safetensors dtype, shape).
    """
    data: dict[str, Any] = {METADATA_KEY: {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in entries.items():
        begin, end = end, end + num_bytes(dtype, shape)
        data[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(data, separators=(",", ":")).encode()
    # readers map the file: the tensors should begin at a multiple of eight
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor; all dtypes take whole bytes."""
    return math.prod(shape) * TORCH_DTYPES[dtype].itemsize


def _entry(path: Path, name: str, fields: Any, first: int) -> TensorEntry:
    try:
        dtype, shape = fields["dtype"], tuple(fields["shape"])
        begin, end = fields["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise _broken(path, f"tensor {name} lacks dtype, shape or data_offsets") from None
    if dtype not in TORCH_DTYPES:
        raise _broken(path, f"tensor {name} has dtype {dtype!r}")
    whole = (*shape, begin, end)
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in whole):
        raise _broken(path, f"tensor {name} has shape {list(shape)} at {[begin, end]}")
    if end - begin != num_bytes(dtype, shape):
        raise _broken(path, f"tensor {name}, {dtype} {list(shape)}, has {end - begin} bytes")
    return TensorEntry(dtype, shape, first + begin, end - begin)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} stands twice")
    return result


def _broken(path: Path, what: str) -> StartupError:
    return StartupError(f"{path} is not a readable safetensors file: {what}; fetch it again")
