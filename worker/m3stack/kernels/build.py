"""How CUDA sources become a loaded library: nvcc at first use, kept in a cache by content.

The cache is `M3STACK_KERNEL_CACHE`, else `$XDG_CACHE_HOME/m3stack/kernels`, else
`~/.cache/m3stack/kernels`.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
DEFAULT_HOME = "/usr/local/cuda"
INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)
# sm_90a: the architecture whose own instructions the sources use; PTX for it does not move on
FLAGS = (
    "-gencode=arch=compute_90a,code=sm_90a",
    "-O3",
    "-std=c++17",
    "-Xcompiler=-fPIC",
)


class KernelUnavailableError(Exception):
    """A back end cannot run here; the message names the operation, the device and the reason."""


class CompilerMissingError(KernelUnavailableError):
    """No nvcc on PATH, under CUDA_HOME or at /usr/local/cuda."""


class CompileError(KernelUnavailableError):
    """nvcc rejected a source; the message holds its output."""


def find_compiler() -> Path:
    """Path of nvcc.

    Raises:
        CompilerMissingError: names the places that were searched.
    """
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), DEFAULT_HOME]
    for home in filter(None, homes):
        candidate = Path(home) / "bin" / "nvcc"
        if candidate.exists():
            return candidate
    found = shutil.which("nvcc")
    if found is None:
        raise CompilerMissingError(
            f"CUDA kernels need nvcc: none on PATH, under CUDA_HOME, CUDA_PATH or {DEFAULT_HOME}"
        )
    return Path(found)


def cache_folder() -> Path:
    """Where built libraries are kept."""
    chosen = os.environ.get("M3STACK_KERNEL_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "m3stack" / "kernels"


def load_library(name: str, sources: Sequence[str]) -> ctypes.CDLL:
    """Builds (or finds) and loads the library of these files of `csrc`.

    Raises:
        CompilerMissingError: the library is not in the cache and there is no nvcc.
        CompileError: nvcc rejected a source.
    """
    return ctypes.CDLL(str(build_library(name, sources)))


def build_library(name: str, sources: Sequence[str]) -> Path:
    """Path of the shared object, compiled once for each content of sources, headers and flags."""
    target = cache_folder() / f"{name}-{fingerprint(sources)}.so"
    if target.exists():
        return target
    compiler = find_compiler()
    target.parent.mkdir(parents=True, exist_ok=True)
    logger.warning("building CUDA kernels name=%s sources=%s", name, ",".join(sources))
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        _compile(compiler, sources, built, Path(folder))
        # another process may have built the same file meanwhile: the rename is atomic either way
        built.replace(target)
    seconds = time.monotonic() - started
    logger.warning("built CUDA kernels name=%s seconds=%.1f path=%s", name, seconds, target)
    return target


def _compile(compiler: Path, sources: Sequence[str], built: Path, folder: Path) -> None:
    """Compiles each source in its own process, then links."""
    running = []
    for source in sources:
        part = folder / (Path(source).stem + ".o")
        command = [str(compiler), *FLAGS, "-c", str(SOURCES / source), "-o", str(part)]
        running.append((command, part, _start(command)))
    try:
        for command, _, process in running:
            _finish(command, process)
    finally:
        # none outlives the folder that it writes to
        for _, _, process in running:
            if process.returncode is None:
                process.kill()
                process.communicate()
    parts = [str(part) for _, part, _ in running]
    command = [str(compiler), *FLAGS, "--shared", *parts, "-o", str(built)]
    _finish(command, _start(command))


def _start(command: list[str]) -> subprocess.Popen:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _finish(command: list[str], process: subprocess.Popen) -> None:
    output, _ = process.communicate()
    if process.returncode != 0:
        raise CompileError(f"{' '.join(command)} failed with {process.returncode}:\n{output}")


def fingerprint(sources: Sequence[str]) -> str:
    """What a library is kept under: changes with its sources, what they include, and the flags."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for name in sorted(_with_headers(sources)):
        digest.update(name.encode())
        digest.update((SOURCES / name).read_bytes())
    return digest.hexdigest()[:16]


def _with_headers(sources: Sequence[str]) -> set[str]:
    """The sources and every header of the folder that they include, directly or not."""
    found, waiting = set(), list(sources)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += INCLUDE.findall((SOURCES / name).read_text())
    return found
