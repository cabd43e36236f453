"""Compiles the CUDA sources of the expert kernels for this machine's CPU, against the emulator."""

from __future__ import annotations

import ctypes
import subprocess
from ctypes import c_uint
from pathlib import Path

from m3stack.kernels.build import SOURCES
from m3stack.kernels.moe.cuda_library import ExpertLibrary
from tests.worker.kernels.cuda_on_cpu.build import DYNAMIC, HERE


def build(folder: Path, harness: str) -> Path:
    """The shared object of a harness, built in `folder` from copies of the sources.

    Headers of PTX are replaced by the emulator's, and dynamic shared memory, which C++ has no word
    for, becomes a pointer.
    """
    header = (SOURCES / "async_copy.cuh").read_text()
    rest = header[header.index("// order-preserving integer") : header.index("inline cudaError_t")]
    copies = (HERE / "async_copy_head.h").read_text()
    _write(folder / "async_copy.cuh", f"{copies}\nnamespace m3 {{\n{rest}\n}}  // namespace m3\n")
    _write(folder / "moe_products.cuh", (HERE / "products_head.h").read_text())
    weights = (SOURCES / "moe_weights.cuh").read_text()
    decoding = weights[weights.index("// Bytes 0 and 2 of four e4m3") :]
    _write(folder / "moe_weights.cuh", WEIGHTS_HEAD + decoding)
    for source in ("moe_ring.cuh", "moe_choose.cuh", *(p.name for p in SOURCES.glob("moe_*.cu"))):
        lines = (SOURCES / source).read_text().splitlines()
        for number, line in enumerate(lines):
            if DYNAMIC in line:
                name = line.split(DYNAMIC)[1].strip().removesuffix("[];")
                lines[number] = f"    uint8_t* {name} = emulator::dynamic_shared;"
        _write(folder / source, "\n".join(lines) + "\n")
    _write(folder / "cuda_runtime.h", '#include "moe_products.cuh"\n')
    target = folder / f"{Path(harness).stem}.so"
    flags = "-std=c++20 -O2 -w -fPIC -shared -pthread -fno-strict-aliasing -ffp-contract=off"
    command = ["g++", *flags.split(), "-U_FORTIFY_SOURCE", f"-I{folder}", f"-I{HERE}"]
    subprocess.run([*command, str(HERE / harness), "-o", str(target)], check=True)
    return target


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
        self._bind(library, processors)

    def _stream(self) -> int:
        return 0


def _write(path: Path, text: str) -> None:
    path.write_text(text)
