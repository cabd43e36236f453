"""Compiles the CUDA sources of prefill attention by query tiles for this machine's CPU."""

from __future__ import annotations

import ctypes
from ctypes import c_uint
from pathlib import Path

from m3stack.kernels.build import SOURCES
from m3stack.kernels.msa.prefill.cuda_library import PrefillLibrary
from tests.worker.kernels.cuda_on_cpu.build import (
    HERE,
    compile_harness,
    copy_source,
    write_copies,
)


def build(folder: Path) -> Path:
    """The shared object, built in `folder` from copies of the sources."""
    write_copies(folder)
    for name, head in (
        ("moe_products.cuh", "products_head.h"),
        ("msa_prefill_hopper.cuh", "prefill_head.h"),
    ):
        (folder / name).write_text((HERE / head).read_text())
    for source in (*SOURCES.glob("msa_prefill_union*"), SOURCES / "msa_prefill_attend.cuh"):
        copy_source(source, folder)
    return compile_harness(folder, "prefill_harness.cpp", optimise=2)


class EmulatedPrefill(PrefillLibrary):
    """Stands for `PrefillLibrary`: launches run to their end before they return."""

    def __init__(self, path: Path, *, processors: int, seed: int) -> None:
        library = ctypes.CDLL(str(path))
        library.start_emulator(c_uint(seed))
        self._bind(library, processors)

    def _declare(self, name: str, *types: type) -> None:
        if hasattr(self._library, name):  # the other operations are not in it
            super()._declare(name, *types)

    def _stream(self) -> int:
        return 0
