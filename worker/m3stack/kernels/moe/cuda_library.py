"""The C interface of the expert kernels: argument structs, launches, error codes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_float, c_int, c_int32, c_int64, c_void_p
from enum import IntEnum

import torch

from m3stack.kernels.build import KernelUnavailableError, load_library

SOURCES = ("moe_few.cu",)
NEEDED_CAPABILITY = (9, 0)
FEW_TOKENS = (8, 16, 32, 64)


class LaunchError(RuntimeError):
    """The CUDA runtime refused a launch; the message names the kernel and the error code."""


class Mode(IntEnum):
    """Which product a launch is."""

    UP = 0
    DOWN = 1
    LINEAR = 2


class FewArgs(ctypes.Structure):
    """Field for field the struct of the source; a pointer is a device address."""

    _fields_ = (
        ("x", c_void_p),
        ("elements", c_void_p),
        ("scales", c_void_p),
        ("shared_elements", c_void_p),
        ("shared_scales", c_void_p),
        ("pairs", c_void_p),
        ("experts", c_void_p),
        ("weights", c_void_p),
        ("out", c_void_p),
        ("x_row", c_int64),
        ("alpha", c_float),
        ("limit", c_float),
        ("factor", c_float),
        ("num_pairs", c_int32),
        ("num_tokens", c_int32),
        ("top_k", c_int32),
        ("width", c_int32),
        ("outputs", c_int32),
        ("shared_blocks", c_int32),
        ("num_blocks", c_int32),
    )


class ExpertLibrary:
    """The built kernels, launched on the current stream of the current device."""

    def __init__(self) -> None:
        """Builds or finds the library.

        Raises:
            KernelUnavailableError: no CUDA device, another architecture, or no compiler.
        """
        if not torch.cuda.is_available():
            raise KernelUnavailableError("expert kernels need a CUDA device; torch sees none")
        capability = torch.cuda.get_device_capability()
        if capability != NEEDED_CAPABILITY:
            raise KernelUnavailableError(
                f"expert kernels are built for sm_90a; this device is sm_{capability[0]}"
                f"{capability[1]} ({torch.cuda.get_device_name()})"
            )
        library = load_library("moe", SOURCES)
        self._few = library.m3_few
        self._few.argtypes = [POINTER(FewArgs), c_int, c_int, c_void_p]
        self._few.restype = c_int

    def few(self, arguments: FewArgs, block_tokens: int, mode: Mode) -> None:
        """Enqueues the product of few tokens.

        Raises:
            LaunchError: the runtime refused it.
        """
        stream = torch.cuda.current_stream().cuda_stream
        code = self._few(byref(arguments), block_tokens, mode, stream)
        if code != 0:
            raise LaunchError(f"m3_few: CUDA error {code}")
