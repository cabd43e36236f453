"""The C interface of the decode kernels: argument structs, launches, error codes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_float, c_int, c_int32, c_int64, c_void_p

import torch

from m3stack.kernels.build import KernelUnavailableError, load_library

SOURCES = (
    "msa_decode_score.cu",
    "msa_decode_select.cu",
    "msa_decode_settle.cu",
    "msa_decode_attend.cu",
    "msa_decode_attend_block.cu",
)
NEEDED_CAPABILITY = (9, 0)


class LaunchError(RuntimeError):
    """The CUDA runtime refused a launch; the message names the kernel and the error code."""


def _struct(name: str, **fields: type) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


# field for field the structs of the .cu files; a pointer is a device address
ScoreArgs = _struct(
    "ScoreArgs",
    q=c_void_p,
    pages=c_void_p,
    query_start=c_void_p,
    seq_lens=c_void_p,
    page_table=c_void_p,
    keys=c_void_p,
    second_keys=c_void_p,
    lower_keys=c_void_p,
    page_stride_bytes=c_int64,
    table_stride=c_int64,
    row_stride=c_int64,
    num_seqs=c_int32,
    groups=c_int32,
    seq_stride=c_int32,
    table_width=c_int32,
    num_lines=c_int32,
)
SelectArgs = _struct(
    "SelectArgs",
    keys=c_void_p,
    query_start=c_void_p,
    seq_lens=c_void_p,
    blocks=c_void_p,
    row_stride=c_int64,
    num_seqs=c_int32,
    num_rows=c_int32,
    groups=c_int32,
    num_chosen=c_int32,
    num_local=c_int32,
)
SettleArgs = _struct(
    "SettleArgs",
    q=c_void_p,
    pages=c_void_p,
    keys=c_void_p,
    second_keys=c_void_p,
    lower_keys=c_void_p,
    query_start=c_void_p,
    seq_lens=c_void_p,
    page_table=c_void_p,
    blocks=c_void_p,
    num_rescored=c_void_p,
    totals=c_void_p,
    page_stride=c_int64,
    table_stride=c_int64,
    row_stride=c_int64,
    num_seqs=c_int32,
    num_rows=c_int32,
    groups=c_int32,
    num_chosen=c_int32,
    num_local=c_int32,
    splits=c_int32,
)
AttendArgs = _struct(
    "AttendArgs",
    q=c_void_p,
    k=c_void_p,
    v=c_void_p,
    k_scale=c_void_p,
    v_scale=c_void_p,
    query_start=c_void_p,
    seq_lens=c_void_p,
    page_table=c_void_p,
    blocks=c_void_p,
    out=c_void_p,
    partials=c_void_p,
    arrived=c_void_p,
    k_page_stride=c_int64,
    k_group_stride=c_int64,
    k_token_stride=c_int64,
    v_page_stride=c_int64,
    v_group_stride=c_int64,
    v_token_stride=c_int64,
    table_stride=c_int64,
    scale_log2=c_float,
    num_seqs=c_int32,
    num_rows=c_int32,
    groups=c_int32,
    heads_per_group=c_int32,
    num_chosen=c_int32,
    splits=c_int32,
)


class DecodeLibrary:
    """The built kernels, launched on the current stream of the current device."""

    def __init__(self) -> None:
        """Builds or finds the library.

        Raises:
            KernelUnavailableError: no CUDA device, another architecture, or no compiler.
        """
        if not torch.cuda.is_available():
            raise KernelUnavailableError("MSA decode kernels need a CUDA device; torch sees none")
        capability = torch.cuda.get_device_capability()
        if capability != NEEDED_CAPABILITY:
            raise KernelUnavailableError(
                f"MSA decode kernels are built for sm_90a; this device is sm_{capability[0]}"
                f"{capability[1]} ({torch.cuda.get_device_name()})"
            )
        self._library = load_library("msa_decode", SOURCES)
        own = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.num_processors = own.multi_processor_count
        self._declare("m3_score", POINTER(ScoreArgs), c_int, c_int)
        self._declare("m3_score_int8", POINTER(ScoreArgs), c_int, c_int)
        self._declare("m3_select", POINTER(SelectArgs))
        self._declare("m3_settle", POINTER(SettleArgs))
        self._declare("m3_attend", POINTER(AttendArgs), c_int, c_int, c_int)
        self._declare("m3_attend_block", POINTER(AttendArgs))

    def _declare(self, name: str, *types: type) -> None:
        function = getattr(self._library, name)
        function.argtypes = [*types, c_void_p]
        function.restype = c_int

    def launch(self, name: str, arguments: ctypes.Structure, *numbers: int) -> None:
        """Enqueues one kernel.

        Raises:
            LaunchError: the runtime refused it.
        """
        stream = torch.cuda.current_stream().cuda_stream
        code = getattr(self._library, name)(byref(arguments), *numbers, stream)
        if code != 0:
            raise LaunchError(f"{name}: CUDA error {code}")
