"""The C interface of the prefill kernels: argument structs, tensor maps, launches, error codes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_float, c_int, c_void_p

import torch
from torch import Tensor

from m3stack.kernels.build import KernelUnavailableError, load_library

SOURCES = (
    "msa_prefill_maps.cu",
    "msa_prefill_score.cu",
    "msa_prefill_rank.cu",
    "msa_prefill_union_lists.cu",
    "msa_prefill_union.cu",
    "msa_prefill_union_e4m3.cu",
    "msa_prefill_kv_invert.cu",
    "msa_prefill_kv_attend.cu",
)
NEEDED_CAPABILITY = (9, 0)
MAP_BYTES = 128
MAP_ALIGNMENT = 64


class LaunchError(RuntimeError):
    """The CUDA runtime refused a launch; the message names the kernel and the error code."""


# field for field the structs of the .cu files; a pointer is a device address
class ScoreArguments(ctypes.Structure):
    """`m3::ScoreArguments`."""

    _fields_ = [
        *((name, c_void_p) for name in ("index_q", "query_start", "seq_lens", "page_table")),
        *((name, c_void_p) for name in ("tiles", "sequence_tiles", "work_start", "lists")),
        ("chosen", c_void_p),
        *((name, c_int) for name in ("num_tokens", "num_groups", "num_sequences")),
        *((name, c_int) for name in ("table_pitch", "num_tiles", "num_workers")),
        *((name, c_int) for name in ("num_blocks", "num_local")),
    ]


class AttendArguments(ctypes.Structure):
    """`m3::AttendArguments`."""

    _fields_ = [
        *((name, c_void_p) for name in ("out", "blocks", "query_start", "seq_lens")),
        *((name, c_void_p) for name in ("page_table", "selections", "totals", "tiles")),
        *((name, c_void_p) for name in ("union_sizes", "unions")),
        ("scale", c_float),
        *((name, c_int) for name in ("num_tokens", "num_heads", "num_groups", "num_sequences")),
        *((name, c_int) for name in ("table_pitch", "num_tiles", "num_blocks", "tile_tokens")),
        *((name, c_int) for name in ("arm", "load_limit")),
    ]


class InvertArguments(ctypes.Structure):
    """`m3::InvertArguments`."""

    _fields_ = [
        ("base", AttendArguments),
        *((name, c_void_p) for name in ("counts", "buckets", "slices", "edges", "pieces")),
        *((name, c_void_p) for name in ("partial", "partial_lse")),
        *((name, c_int) for name in ("first_token", "num_tokens", "max_blocks")),
        *((name, c_int) for name in ("num_chunks", "num_slices")),
    ]


class TensorMaps:
    """Encoded tensor maps in one host buffer, in the order of encoding."""

    def __init__(self, count: int) -> None:
        self._buffer = ctypes.create_string_buffer(count * MAP_BYTES + MAP_ALIGNMENT)
        start = ctypes.addressof(self._buffer)
        self.address = start + -start % MAP_ALIGNMENT


class PrefillLibrary:
    """The built kernels, launched on the current stream of the current device."""

    def __init__(self) -> None:
        """Builds or finds the library.

        Raises:
            KernelUnavailableError: no CUDA device, another architecture, or no compiler.
        """
        if not torch.cuda.is_available():
            raise KernelUnavailableError("MSA prefill kernels need a CUDA device; torch sees none")
        capability = torch.cuda.get_device_capability()
        if capability != NEEDED_CAPABILITY:
            raise KernelUnavailableError(
                f"MSA prefill kernels are built for sm_90a; this device is sm_{capability[0]}"
                f"{capability[1]} ({torch.cuda.get_device_name()})"
            )
        own = torch.cuda.get_device_properties(torch.cuda.current_device())
        self._bind(load_library("msa_prefill", SOURCES), own.multi_processor_count)

    def _bind(self, library: ctypes.CDLL, num_processors: int) -> None:
        self._library, self.num_processors = library, num_processors
        self._declare(
            "m3_encode_map", c_void_p, c_void_p, c_int, c_int, c_void_p, c_void_p, c_void_p
        )
        self._declare("m3_prefill_plan", POINTER(ScoreArguments), c_void_p)
        self._declare("m3_prefill_score", POINTER(ScoreArguments), c_void_p, c_void_p)
        self._declare("m3_prefill_rank", POINTER(ScoreArguments), c_void_p)
        self._declare("m3_prefill_build_unions", POINTER(AttendArguments), c_void_p)
        attend = (c_void_p, c_int, c_void_p)
        self._declare("m3_prefill_attend_unions", POINTER(AttendArguments), *attend)
        coded = (c_void_p, c_void_p, c_void_p, c_int, c_void_p)
        self._declare("m3_prefill_attend_coded_unions", POINTER(AttendArguments), *coded)
        self._declare("m3_prefill_invert", POINTER(InvertArguments), c_void_p)
        self._declare("m3_prefill_attend_key_major", POINTER(InvertArguments), *attend)

    def _declare(self, name: str, *types: type) -> None:
        function = getattr(self._library, name)
        function.argtypes = list(types)
        function.restype = c_int

    def _stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream

    def encode(self, tensors: Sequence[tuple[Tensor, tuple[int, ...]]]) -> TensorMaps:
        """Maps of tensors with their copy boxes, box sizes outermost first like the shape.

        Elements are bf16 or of one byte; a row of a box has 128 bytes.

        Raises:
            LaunchError: the driver refused a map, for instance an unaligned stride.
        """
        maps = TensorMaps(len(tensors))
        for index, (tensor, box) in enumerate(tensors):
            rank = tensor.dim()
            sizes = (ctypes.c_uint64 * rank)(*reversed(tensor.shape))
            strides = (ctypes.c_uint64 * (rank - 1))(
                *(tensor.itemsize * stride for stride in reversed(tensor.stride()[:-1]))
            )
            boxes = (ctypes.c_uint32 * rank)(*reversed(box))
            address = maps.address + index * MAP_BYTES
            code = self._library.m3_encode_map(
                address, tensor.data_ptr(), tensor.itemsize, rank, sizes, strides, boxes
            )
            if code != 0:
                raise LaunchError(
                    f"tensor map of {tuple(tensor.shape)} strides {tensor.stride()}: code {code}"
                )
        return maps

    def launch(self, name: str, arguments: ctypes.Structure, *more: object) -> None:
        """Enqueues one operation's kernels.

        Raises:
            LaunchError: the runtime refused one.
        """
        code = getattr(self._library, name)(byref(arguments), *more, self._stream())
        if code != 0:
            raise LaunchError(f"{name}: CUDA error {code}")
