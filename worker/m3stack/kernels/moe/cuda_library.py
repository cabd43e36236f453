"""The C interface of the expert kernels: argument structs, launches, error codes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_float, c_int, c_int32, c_int64, c_void_p
from enum import IntEnum

import torch
from torch import Tensor

from m3stack.kernels.build import KernelUnavailableError, load_library

SOURCES = ("moe_few.cu", "moe_many.cu", "moe_route.cu", "msa_prefill_maps.cu")
NEEDED_CAPABILITY = (9, 0)
FEW_TOKENS = (8, 16, 32, 64)
# of the kernels of many tokens: tokens of a block, and of one copy
MANY_TOKENS, BOX_TOKENS, BOX_COLUMNS = 256, 64, 64
MAP_BYTES = 128
ROUTE_TOKENS, ROUTE_EXPERTS, ROUTE_CHOSEN = 8, 256, 32


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


class ManyArgs(ctypes.Structure):
    """Field for field the struct of the source; a pointer is a device address."""

    _fields_ = (
        ("elements", c_void_p),
        ("scales", c_void_p),
        ("shared_elements", c_void_p),
        ("shared_scales", c_void_p),
        ("experts", c_void_p),
        ("firsts", c_void_p),
        ("counts", c_void_p),
        ("pairs", c_void_p),
        ("weights", c_void_p),
        ("out", c_void_p),
        ("alpha", c_float),
        ("limit", c_float),
        ("factor", c_float),
        ("num_pairs", c_int32),
        ("num_tokens", c_int32),
        ("width", c_int32),
        ("outputs", c_int32),
        ("max_blocks", c_int32),
    )


class RouteArgs(ctypes.Structure):
    """Field for field the struct of the source; a pointer is a device address."""

    _fields_ = (
        ("x", c_void_p),
        ("router", c_void_p),
        ("bias", c_void_p),
        ("scores", c_void_p),
        ("arrived", c_void_p),
        ("ids", c_void_p),
        ("weights", c_void_p),
        ("x_row", c_int64),
        ("num_tokens", c_int32),
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("width", c_int32),
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
        self._processors = torch.cuda.get_device_properties(0).multi_processor_count
        self._map = library.m3_encode_map
        self._map.argtypes = [c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_void_p]
        self._many = library.m3_many
        self._many.argtypes = [POINTER(ManyArgs), c_void_p, c_int, c_int, c_void_p]
        self._gather = library.m3_gather
        self._gather.argtypes = [c_void_p, c_void_p, c_void_p, c_int64, *[c_int] * 4, c_void_p]
        for function in (self._map, self._many, self._gather):
            function.restype = c_int
        self._route = library.m3_route
        self._route.argtypes = [POINTER(RouteArgs), c_void_p]
        self._route.restype = c_int
        self._few = library.m3_few
        self._few.argtypes = [POINTER(FewArgs), c_int, c_int, c_void_p]
        self._few.restype = c_int

    def route(self, arguments: RouteArgs) -> None:
        """Enqueues the routing of at most `ROUTE_TOKENS`.

        Raises:
            LaunchError: the runtime refused it.
        """
        code = self._route(byref(arguments), torch.cuda.current_stream().cuda_stream)
        if code != 0:
            raise LaunchError(f"m3_route: CUDA error {code}")

    def few(self, arguments: FewArgs, block_tokens: int, mode: Mode) -> None:
        """Enqueues the product of few tokens.

        Raises:
            LaunchError: the runtime refused it.
        """
        stream = torch.cuda.current_stream().cuda_stream
        code = self._few(byref(arguments), block_tokens, mode, stream)
        if code != 0:
            raise LaunchError(f"m3_few: CUDA error {code}")

    def many(self, arguments: ManyArgs, tokens: Tensor, mode: Mode) -> None:
        """Enqueues the product of many tokens with weights in MXFP8.

        Args:
            tokens: bf16 [rows, width] in the order of the products (`gather`).

        Raises:
            LaunchError: the runtime refused it.
        """
        # a map must stand on a multiple of 64 bytes
        buffer = ctypes.create_string_buffer(MAP_BYTES + 64)
        address = ctypes.addressof(buffer)
        address += -address % 64
        rows, width = tokens.shape
        sizes = (ctypes.c_uint64 * 3)(width, rows, 1)
        strides = (ctypes.c_uint64 * 2)(2 * width, 2 * width * rows)
        box = (ctypes.c_uint32 * 3)(BOX_COLUMNS, BOX_TOKENS, 1)
        code = self._map(address, tokens.data_ptr(), 3, sizes, strides, box)
        if code != 0:
            raise LaunchError(f"m3_encode_map of {tuple(tokens.shape)}: code {code}")
        stream = torch.cuda.current_stream().cuda_stream
        code = self._many(byref(arguments), address, mode, self._processors, stream)
        if code != 0:
            raise LaunchError(f"m3_many: CUDA error {code}")

    def gather(self, x: Tensor, pairs: Tensor | None, out: Tensor, *, top_k: int) -> None:
        """Writes the tokens of sorted pairs, then all tokens, with columns in the products' order.

        Args:
            x: bf16 [tokens, width], rows on multiples of 16 bytes.
            pairs: int32, sorted; None for none.
            out: bf16 [pairs + tokens or pairs alone, width].

        Raises:
            LaunchError: the runtime refused it.
        """
        num_pairs = 0 if pairs is None else pairs.numel()
        address = None if pairs is None else pairs.data_ptr()
        stream = torch.cuda.current_stream().cuda_stream
        code = self._gather(
            x.data_ptr(), address, out.data_ptr(), x.stride(0), out.shape[0], num_pairs, top_k,
            out.shape[1], stream,
        )  # fmt: skip
        if code != 0:
            raise LaunchError(f"m3_gather: CUDA error {code}")
