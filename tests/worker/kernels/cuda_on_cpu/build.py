"""Compiles CUDA sources for this machine's CPU, against the emulator: decode kernels, and parts."""

from __future__ import annotations

import ctypes
import subprocess
from ctypes import byref, c_uint, c_void_p
from pathlib import Path

from m3stack.kernels.build import SOURCES

HERE = Path(__file__).parent
DYNAMIC = "extern __shared__ __align__(128) uint8_t"


def build(folder: Path) -> Path:
    """The shared object of the decode kernels, built in `folder` from copies of the sources."""
    write_copies(folder)
    for source in SOURCES.glob("msa_decode_*.cu*"):
        copy_source(source, folder)
    return compile_harness(folder, "harness.cpp", optimise=1)


def write_copies(folder: Path) -> None:
    """`async_copy.cuh` with the emulator's words in place of PTX."""
    header = (SOURCES / "async_copy.cuh").read_text()
    rest = header[header.index("// order-preserving integer") : header.index("inline cudaError_t")]
    head = (HERE / "async_copy_head.h").read_text()
    (folder / "async_copy.cuh").write_text(
        f"{head}\nnamespace m3 {{\n{rest}\n}}  // namespace m3\n"
    )


def copy_source(source: Path, folder: Path) -> None:
    """A source as it is, but for dynamic shared memory, which C++ has no word for: a pointer."""
    lines = source.read_text().splitlines()
    for number, line in enumerate(lines):
        if DYNAMIC in line:
            name = line.split(DYNAMIC)[1].strip().removesuffix("[];")
            lines[number] = f"    uint8_t* {name} = emulator::dynamic_shared;"
    (folder / source.name).write_text("\n".join(lines) + "\n")


def compile_harness(folder: Path, harness: str, *, optimise: int) -> Path:
    """The shared object of a harness and the copies in `folder`."""
    target = folder / f"{Path(harness).stem}.so"
    flags = "-std=c++20 -w -fPIC -shared -pthread -fno-strict-aliasing -ffp-contract=off"
    command = [
        "g++",
        f"-O{optimise}",
        *flags.split(),
        "-U_FORTIFY_SOURCE",
        f"-I{folder}",
        f"-I{HERE}",
    ]
    subprocess.run([*command, str(HERE / harness), "-o", str(target)], check=True)
    return target


class EmulatedLibrary:
    """Stands for `DecodeLibrary`: launches run to their end before they return."""

    def __init__(self, path: Path, *, num_processors: int, seed: int) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.start_emulator(c_uint(seed))
        self.num_processors = num_processors

    def launch(self, name: str, arguments: ctypes.Structure, *numbers: int) -> None:
        """As `DecodeLibrary.launch`."""
        code = getattr(self._library, name)(byref(arguments), *numbers, c_void_p())
        assert code == 0, (name, code)
