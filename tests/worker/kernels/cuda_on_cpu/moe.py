"""Compiles the CUDA sources of the expert kernels for this machine's CPU, against the emulator."""

from __future__ import annotations

import ctypes
from ctypes import c_uint
from pathlib import Path

import torch

from m3stack.kernels.build import SOURCES
from m3stack.kernels.moe.cuda_library import ExpertLibrary
from tests.worker.kernels.cuda_on_cpu.build import (
    HERE,
    compile_harness,
    copy_source,
    write_copies,
)

# headers of PTX, which the emulator's stand for
REPLACED = ("moe_products.cuh", "moe_weights.cuh")


def build(folder: Path, harness: str) -> Path:
    """The shared object of a harness, built in `folder` from copies of the sources."""
    write_copies(folder)
    (folder / "moe_products.cuh").write_text((HERE / "products_head.h").read_text())
    weights = (SOURCES / "moe_weights.cuh").read_text()
    decoding = weights[weights.index("// Bytes 0 and 2 of four e4m3") :]
    (folder / "moe_weights.cuh").write_text(WEIGHTS_HEAD + decoding)
    for source in SOURCES.glob("moe_*.cu*"):
        if source.name not in REPLACED:
            copy_source(source, folder)
    (folder / "cuda_runtime.h").write_text('#include "moe_products.cuh"\n')
    return compile_harness(folder, harness, optimise=2)


WEIGHTS_HEAD = """#pragma once
#include "moe_products.cuh"
namespace m3 {
constexpr int kGroup = 32;
inline uint32_t load_scales(const uint8_t* from) {
    uint32_t value;
    std::memcpy(&value, from, 4);
    return value;
}
inline uint32_t times(uint32_t pair, uint32_t factor) {
    return pack_bf16(bf16_of(pair, 0) * bf16_of(factor, 0), bf16_of(pair, 1) * bf16_of(factor, 1));
}
"""


class EmulatedExperts(ExpertLibrary):
    """Stands for `ExpertLibrary`: launches run to their end before they return."""

    def __init__(self, path: Path, *, processors: int, seed: int) -> None:
        library = ctypes.CDLL(str(path))
        library.start_emulator(c_uint(seed))
        self._bind(library, processors, torch.device("cpu"))

    def _stream(self) -> int:
        return 0
