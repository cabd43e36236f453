"""Headers of safetensors files: those of the library are read, and broken ones are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from m3stack.errors import StartupError
from m3stack.weight_files.header import header_bytes, read_header

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4, dtype=torch.bfloat16),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "fp8": torch.ones(3, 2).to(torch.float8_e4m3fn),
}


def test_files_of_the_library_are_read(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    save_file(TENSORS, file, metadata={"format": "pt"})
    entries = read_header(file)
    content = file.read_bytes()
    assert set(entries) == set(TENSORS)
    for name, tensor in TENSORS.items():
        entry = entries[name]
        assert entry.shape == tuple(tensor.shape)
        raw = content[entry.start : entry.start + entry.num_bytes]
        assert raw == tensor.view(-1).view(torch.uint8).numpy().tobytes()


def test_our_files_are_read_by_the_library(tmp_path: Path) -> None:
    entries = {"x": ("BF16", (2, 2)), "s": ("F32", ()), "none": ("U8", (0,)), "e": ("U8", (3,))}
    values = {
        "x": torch.tensor([[1.0, -2.0], [3.0, 4.0]]).bfloat16(),
        "s": torch.tensor(7.0),
        "none": torch.zeros(0, dtype=torch.uint8),
        "e": torch.tensor([1, 2, 3], dtype=torch.uint8),
    }
    file = tmp_path / "m.safetensors"
    data = b"".join(v.reshape(-1).view(torch.uint8).numpy().tobytes() for v in values.values())
    file.write_bytes(header_bytes(entries) + data)
    loaded = load_file(file)
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == {
        name: tensor.tolist() for name, tensor in values.items()
    }
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def with_header(data: Any, tail: bytes = b"") -> bytes:
    text = data if isinstance(data, bytes) else json.dumps(data).encode()
    return len(text).to_bytes(8, "little") + text + tail


def entry(dtype: str = "F32", shape: Any = (1,), at: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(at)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a header of 0 bytes in a file of 0"),
        (b"\x05\x00\x00", "a header of 5 bytes in a file of 3"),
        (
            (1 << 40).to_bytes(8, "little") + b"{}",
            "a header of 1099511627776 bytes in a file of 10",
        ),
        (with_header(b"{"), "header is no JSON"),
        (with_header(b"\xff\xfe"), "header is no JSON"),
        (with_header([1]), "header is no JSON object"),
        (with_header({"a": {"dtype": "F32"}}), "tensor a lacks dtype, shape or data_offsets"),
        (with_header({"a": 3}), "tensor a lacks dtype, shape or data_offsets"),
        (with_header({"a": entry("F6")}, bytes(4)), "tensor a has dtype 'F6'"),
        (with_header({"a": entry(shape=(-1,))}, bytes(4)), r"tensor a has shape \[-1\]"),
        (with_header({"a": entry(shape=(2,))}, bytes(4)), r"a, F32 \[2\], has 4 bytes"),
        (with_header({"a": entry(), "b": entry(at=(8, 12))}, bytes(12)), "b begins at .* ended at"),
        (with_header({"a": entry(), "b": entry(at=(0, 4))}, bytes(4)), "b begins at"),
        (with_header({"a": entry()}, bytes(3)), "tensors end at .*, the file at"),
        (with_header({"a": entry()}, bytes(5)), "tensors end at .*, the file at"),
        (with_header(b'{"a": {}, "a": {}}'), "'a' stands twice"),
    ],
)
def test_broken_files_are_refused_with_the_reason(
    tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "m.safetensors"
    file.write_bytes(content)
    with pytest.raises(StartupError, match=f"is not a readable safetensors file: .*{message}"):
        read_header(file)


def test_a_missing_file_and_a_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"none\.safetensors does not exist"):
        read_header(tmp_path / "none.safetensors")
    with pytest.raises(StartupError, match="cannot be read"):
        read_header(tmp_path)
