"""The C interface of the expert kernels: argument structs, launches, error codes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from m3stack.kernels.build import KernelUnavailableError, load_library
from m3stack.kernels.moe.tensor_maps import MAP_BYTES, MapSizes

SOURCES = (
    "moe_few.cu",
    "moe_maps.cu",
    "moe_order.cu",
    "moe_ring_bf16.cu",
    "moe_ring_mxfp8.cu",
    "moe_route.cu",
    "moe_route_many.cu",
)
NEEDED_CAPABILITY = (9, 0)
FEW_TOKENS = (8, 16, 32, 64)
# tokens of a block of the ring's kernels
SOME_TOKENS, MANY_TOKENS = (32, 64), 288
ROUTE_TOKENS, ROUTE_EXPERTS, ROUTE_CHOSEN = 2, 256, 32
# of the routing of many tokens: experts, columns of a step, tokens of a tile
MANY_ROUTE_EXPERTS, ROUTE_COLUMNS, ROUTE_TILE = 128, 64, 128
ROUTER_PARTS = 3


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
        ("is_early", c_int32),
    )


class RingArgs(ctypes.Structure):
    """Field for field the struct of the source; a pointer is a device address."""

    _fields_ = (
        ("scales", c_void_p),
        ("own_scales", c_void_p),
        ("experts", c_void_p),
        ("firsts", c_void_p),
        ("counts", c_void_p),
        ("pairs", c_void_p),
        ("pair_weights", c_void_p),
        ("next_tile", c_void_p),
        ("out", c_void_p),
        ("alpha", c_float),
        ("limit", c_float),
        ("factor", c_float),
        ("num_pairs", c_int32),
        ("num_tokens", c_int32),
        ("width", c_int32),
        ("outputs", c_int32),
        ("max_blocks", c_int32),
        ("own_block", c_int32),
        ("box_tokens", c_int32),
    )


class SortArgs(ctypes.Structure):
    """Field for field the struct of the source; a pointer is a device address."""

    _fields_ = (
        ("ids", c_void_p),
        ("pairs", c_void_p),
        ("places", c_void_p),
        ("experts", c_void_p),
        ("firsts", c_void_p),
        ("counts", c_void_p),
        ("num_pairs", c_int32),
        ("num_experts", c_int32),
        ("max_blocks", c_int32),
        ("most", c_int32),
    )


class GatherArgs(ctypes.Structure):
    """Field for field the struct of the source; a pointer is a device address."""

    _fields_ = (
        ("x", c_void_p),
        ("places", c_void_p),
        ("out", c_void_p),
        ("next_tiles", c_void_p),
        ("x_row", c_int64),
        ("num_pairs", c_int32),
        ("top_k", c_int32),
        ("width", c_int32),
        ("is_coded", c_int32),
        ("with_tokens", c_int32),
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


class RouteManyArgs(ctypes.Structure):
    """Field for field the struct of the source; a pointer is a device address."""

    _fields_ = (
        ("router", c_void_p),
        ("parts", c_void_p),
        ("partial", c_void_p),
        ("bias", c_void_p),
        ("ids", c_void_p),
        ("weights", c_void_p),
        ("num_tokens", c_int32),
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("width", c_int32),
        ("splits", c_int32),
    )


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """Pairs by expert without gaps, cut into blocks of one expert each.

    Attributes:
        pairs: int32 [pairs], ascending by expert; then -1, for those of negative ids.
        places: int32 [T, k], where in `pairs` each stands; -1 for those of negative ids.
        experts: int32 [blocks], ascending; -1 where a block is not used.
        firsts, counts: int32 [blocks], where in `pairs` a block starts and how many it has.
    """

    pairs: Tensor
    places: Tensor
    experts: Tensor
    firsts: Tensor
    counts: Tensor

    @property
    def max_blocks(self) -> int:
        return self.experts.shape[0]


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
        device = torch.device("cuda", torch.cuda.current_device())
        own = torch.cuda.get_device_properties(device)
        self._bind(load_library("moe", SOURCES), own.multi_processor_count, device)

    def _bind(self, library: ctypes.CDLL, processors: int, device: torch.device) -> None:
        self._library, self.processors = library, processors
        # tiles taken of the up product and the down product of one call
        self.next_tiles = torch.zeros(2, dtype=torch.int32, device=device)
        self._first_numbers = torch.arange(ROUTE_CHOSEN, dtype=torch.int32, device=device)
        self._ones = torch.ones_like(self._first_numbers)
        self._maps: dict[tuple[int, MapSizes], bytes] = {}
        for name, arguments in {
            "m3_expert_map": [c_void_p, c_void_p, c_int, c_int, c_void_p, c_void_p, c_void_p],
            "m3_few": [POINTER(FewArgs), c_int, c_int, c_void_p],
            "m3_sort": [POINTER(SortArgs), c_void_p],
            "m3_gather": [POINTER(GatherArgs), c_int, c_void_p],
            "m3_ring_bf16": [POINTER(RingArgs), c_void_p, c_int, c_int, c_void_p],
            "m3_ring_mxfp8": [POINTER(RingArgs), c_void_p, c_int, c_int, c_int, c_void_p],
            "m3_route": [POINTER(RouteArgs), c_void_p],
            "m3_route_many": [POINTER(RouteManyArgs), c_void_p, c_void_p],
        }.items():
            function = getattr(library, name, None)
            if function is not None:
                function.argtypes, function.restype = arguments, c_int

    def _stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments, self._stream())
        if code != 0:
            raise LaunchError(f"{name}: CUDA error {code}")

    def route(self, arguments: RouteArgs) -> None:
        """Enqueues the routing of at most `ROUTE_TOKENS`.

        Raises:
            LaunchError: the runtime refused it.
        """
        self._call("m3_route", byref(arguments))

    def route_many(self, arguments: RouteManyArgs, tokens: bytes, router: bytes) -> None:
        """Enqueues the routing of any number of tokens, given the maps of both.

        Raises:
            LaunchError: the runtime refused it.
        """
        self._call("m3_route_many", byref(arguments), tokens + router)

    def few(self, arguments: FewArgs, block_tokens: int, mode: Mode) -> None:
        """Enqueues the product of few tokens.

        Raises:
            LaunchError: the runtime refused it.
        """
        self._call("m3_few", byref(arguments), block_tokens, mode)

    def ring(self, arguments: RingArgs, maps: list[bytes], mode: Mode, most: int) -> None:
        """Enqueues the product of blocks of at most `most` tokens.

        Args:
            maps: of tokens, the shared expert's tokens, weights, the shared expert's.

        Raises:
            LaunchError: the runtime refused it.
        """
        joined = b"".join(maps)
        if arguments.scales or arguments.own_scales:
            self._call("m3_ring_mxfp8", byref(arguments), joined, mode, most, self.processors)
        else:
            assert most == MANY_TOKENS, most
            self._call("m3_ring_bf16", byref(arguments), joined, mode, self.processors)

    def tensor_map(self, tensor: Tensor, sizes: MapSizes) -> bytes:
        """The encoded map of a tensor, kept: it depends on nothing else.

        Raises:
            LaunchError: the driver refused it.
        """
        key = (tensor.data_ptr(), sizes)
        if key not in self._maps:
            if len(self._maps) > 4096:
                self._maps.clear()
            # a map must stand on a multiple of 64 bytes
            buffer = ctypes.create_string_buffer(MAP_BYTES + 64)
            address = ctypes.addressof(buffer) + -ctypes.addressof(buffer) % 64
            rank = len(sizes.sizes)
            code = self._library.m3_expert_map(
                address, tensor.data_ptr(), sizes.element_bytes, rank,
                (ctypes.c_uint64 * rank)(*sizes.sizes),
                (ctypes.c_uint64 * (rank - 1))(*sizes.strides),
                (ctypes.c_uint32 * rank)(*sizes.box),
            )  # fmt: skip
            if code != 0:
                raise LaunchError(f"m3_expert_map of {sizes}: code {code}")
            self._maps[key] = ctypes.string_at(address, MAP_BYTES)
        return self._maps[key]

    def sort(self, ids_Tk: Tensor, num_experts: int, most: int) -> SortedPairs:
        """Pairs ascending by expert and number, in blocks of at most `most`.

        Args:
            ids_Tk: int32 [T, k], contiguous, at least one pair; negative ids are in no block.

        Raises:
            LaunchError: the runtime refused it.
        """
        num_pairs, device = ids_Tk.numel(), ids_Tk.device
        # blocks that suffice however the pairs fall: an expert with pairs wastes less than one
        max_blocks = min(num_pairs, num_pairs // most + num_experts)
        pairs = torch.empty(num_pairs, dtype=torch.int32, device=device)
        places = torch.empty_like(ids_Tk)
        experts, firsts, counts = torch.empty(3, max_blocks, dtype=torch.int32, device=device)
        arguments = SortArgs(
            ids=ids_Tk.data_ptr(), pairs=pairs.data_ptr(), places=places.data_ptr(),
            experts=experts.data_ptr(), firsts=firsts.data_ptr(), counts=counts.data_ptr(),
            num_pairs=num_pairs, num_experts=num_experts, max_blocks=max_blocks, most=most,
        )  # fmt: skip
        self._call("m3_sort", byref(arguments))
        return SortedPairs(pairs, places, experts, firsts, counts)

    def lone(self, ids_1k: Tensor) -> SortedPairs:
        """The pairs of one token, whose experts are all different: each is a block by itself.

        Args:
            ids_1k: int32 [1, k], contiguous, at most `ROUTE_CHOSEN`; negative ids are in no block.
        """
        chosen = ids_1k.numel()
        first, counts = self._first_numbers[:chosen], self._ones[:chosen]
        return SortedPairs(first, first[None], ids_1k[0], first, counts)

    def gather(
        self, x: Tensor, places: Tensor | None, *, is_coded: bool, with_tokens: bool
    ) -> Tensor:
        """bf16 [pairs (+ tokens), width]: the token of each pair, then each token once.

        Tiles of the ring that follows are counted from their first on. Rows of pairs that no expert
        here has are left as they are allocated.

        Args:
            x: bf16 [tokens, width], rows on multiples of 16 bytes.
            places: int32 [tokens, k] of `SortedPairs`; None for no pairs.
            is_coded: columns in the order in which MXFP8 weights are decoded.
            with_tokens: whether tokens follow the pairs.

        Raises:
            LaunchError: the runtime refused it.
        """
        tokens, width = x.shape
        num_pairs, top_k = (0, 0) if places is None else (places.numel(), places.shape[-1])
        out = torch.empty(num_pairs + with_tokens * tokens, width, dtype=x.dtype, device=x.device)
        arguments = GatherArgs(
            x=x.data_ptr(), places=None if places is None else places.data_ptr(),
            out=out.data_ptr(), next_tiles=self.next_tiles.data_ptr(), x_row=x.stride(0),
            num_pairs=num_pairs, top_k=top_k, width=width, is_coded=is_coded,
            with_tokens=with_tokens,
        )  # fmt: skip
        self._call("m3_gather", byref(arguments), tokens)
        return out
