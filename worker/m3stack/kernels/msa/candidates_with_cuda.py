"""Candidates of a part of the index keys and their merge, by the sm_90a kernels."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_int, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from m3stack.kernels.build import load_library
from m3stack.kernels.interface import PagedRows, PartRows
from m3stack.kernels.msa.decode.cuda_library import LaunchError, ScoreArgs
from m3stack.kernels.msa.decode.with_cuda import (
    CudaDecode,
    check_index,
    row_fields,
    score_workspace,
)
from m3stack.kernels.msa.prefill.cuda_library import ScoreArguments
from m3stack.kernels.msa.prefill.with_cuda import CudaPrefill

SOURCES = ("msa_candidates.cu", "msa_candidates_prefill.cu")
MAX_MERGED = 256
MAX_CHOSEN = 32


class UnsupportedShapeError(ValueError):
    """The candidate kernels do not serve this shape; the message names the value and the limit."""


# field for field the structs of the .cu files; a pointer is a device address
class CandidateArgs(ctypes.Structure):
    """`m3::CandidateArgs`."""

    _fields_ = [
        *((name, c_void_p) for name in ("keys", "query_start", "seq_lens", "ids", "candidates")),
        *((name, c_int64) for name in ("row_stride", "ids_stride")),
        *((name, c_int32) for name in ("num_seqs", "num_rows", "groups")),
        *((name, c_int32) for name in ("num_chosen", "num_local")),
    ]


class MergeArgs(ctypes.Structure):
    """`m3::MergeArgs`."""

    _fields_ = [
        *((name, c_void_p) for name in ("candidates", "query_start", "seq_lens", "blocks")),
        *((name, c_int32) for name in ("num_seqs", "num_rows", "groups")),
        *((name, c_int32) for name in ("num_ranks", "num_chosen", "num_local")),
    ]


class PieceCandidates(ctypes.Structure):
    """`m3::PieceCandidates`."""

    _fields_ = [
        ("scored", ScoreArguments),
        ("ids", c_void_p),
        ("candidates", c_void_p),
        ("ids_pitch", c_int),
    ]


class CandidateLibrary:
    """The built kernels, launched on the current stream of the current device."""

    def __init__(self) -> None:
        """Builds or finds the library.

        Raises:
            KernelUnavailableError: no compiler.
        """
        self._library = load_library("msa_candidates", SOURCES)
        for name, arguments in (
            ("m3_candidates", CandidateArgs),
            ("m3_merge_candidates", MergeArgs),
            ("m3_prefill_candidates", PieceCandidates),
        ):
            function = getattr(self._library, name)
            function.argtypes = [POINTER(arguments), c_void_p]
            function.restype = c_int

    def launch(self, name: str, arguments: ctypes.Structure) -> None:
        """Enqueues one kernel.

        Raises:
            LaunchError: the runtime refused it.
        """
        stream = torch.cuda.current_stream().cuda_stream
        code = getattr(self._library, name)(byref(arguments), stream)
        if code != 0:
            raise LaunchError(f"{name}: CUDA error {code}")


class CudaCandidates:
    """Both operations; steps are scored by the kernels of whole index keys.

    Args:
        decode, prefill: which score, the former where it serves a step.
    """

    def __init__(self, library: CandidateLibrary, decode: CudaDecode, prefill: CudaPrefill) -> None:
        self._library, self._decode, self._prefill = library, decode, prefill

    def choose_candidates(
        self,
        index_q_TGD: Tensor,
        index_k_PBD: Tensor,
        part: PartRows,
        num_blocks: int,
        num_local: int,
    ) -> Tensor:
        """See `interface.ChooseCandidates`; the last `num_local` entries are empty.

        Raises:
            UnsupportedShapeError: a shape, dtype or stride that the kernels do not serve.
        """
        num_tokens, groups, _ = index_q_TGD.shape
        index_q_TGD = index_q_TGD.contiguous()
        if part.blocks_SJ.dtype != torch.int32 or part.blocks_SJ.stride(-1) != 1:
            raise UnsupportedShapeError(
                f"block ids must be int32 with dense rows: {part.blocks_SJ.dtype}, "
                f"{part.blocks_SJ.stride()}"
            )
        candidates_GTK = torch.empty(
            (groups, num_tokens, num_blocks), dtype=torch.int64, device=index_q_TGD.device
        )
        if num_tokens == 0:
            return candidates_GTK
        if self._decode.serves(groups, part.rows):
            self._score_few(index_q_TGD, index_k_PBD, part, num_local, candidates_GTK)
        else:
            self._score_many(index_q_TGD, index_k_PBD, part, num_local, candidates_GTK)
        return candidates_GTK

    def _score_few(
        self, q_TGD: Tensor, k_PBD: Tensor, part: PartRows, num_local: int, out_GTK: Tensor
    ) -> None:
        rows, (groups, num_tokens, num_blocks) = part.rows, out_GTK.shape
        check_index(q_TGD, k_PBD, rows, num_blocks)
        keys = score_workspace(num_tokens * groups, rows, q_TGD.device)
        scored = ScoreArgs(
            q=q_TGD.data_ptr(),
            pages=k_PBD.data_ptr(),
            keys=keys.data_ptr(),
            page_stride_bytes=k_PBD.stride(0) * 2,
            row_stride=keys.stride(0),
            groups=groups,
            table_width=rows.page_table_SJ.shape[1],
            **row_fields(rows),
        )
        self._decode.launch_score("m3_score", scored, rows)
        arguments = CandidateArgs(
            keys=keys.data_ptr(),
            query_start=rows.query_start_S1.data_ptr(),
            seq_lens=rows.seq_lens_S.data_ptr(),
            ids=part.blocks_SJ.data_ptr(),
            candidates=out_GTK.data_ptr(),
            row_stride=keys.stride(0),
            ids_stride=part.blocks_SJ.stride(0),
            num_seqs=rows.seq_lens_S.shape[0],
            num_rows=num_tokens,
            groups=groups,
            num_chosen=num_blocks,
            num_local=num_local,
        )
        self._library.launch("m3_candidates", arguments)

    def _score_many(
        self, q_TGD: Tensor, k_PBD: Tensor, part: PartRows, num_local: int, out_GTK: Tensor
    ) -> None:
        scored = self._prefill.score(q_TGD, k_PBD, part.rows, out_GTK.shape[-1], num_local)
        arguments = PieceCandidates(
            scored=scored.arguments,
            ids=part.blocks_SJ.data_ptr(),
            candidates=out_GTK.data_ptr(),
            ids_pitch=part.blocks_SJ.stride(0),
        )
        self._library.launch("m3_prefill_candidates", arguments)

    def merge_candidates(
        self, candidates_RGTK: Tensor, rows: PagedRows, page_tokens: int, num_local: int
    ) -> Tensor:
        """See `interface.MergeCandidates`.

        Raises:
            UnsupportedShapeError: pages of another size, or more candidates than a warp merges.
        """
        ranks, groups, num_tokens, num_blocks = candidates_RGTK.shape
        if page_tokens != 128 or num_blocks > MAX_CHOSEN or ranks * num_blocks > MAX_MERGED:
            raise UnsupportedShapeError(
                f"pages of 128 tokens, at most {MAX_CHOSEN} blocks and {MAX_MERGED} candidates a "
                f"row: {page_tokens}, {num_blocks}, {ranks * num_blocks}"
            )
        candidates_RGTK = candidates_RGTK.contiguous()
        blocks_GTK = torch.empty(
            (groups, num_tokens, num_blocks), dtype=torch.int32, device=candidates_RGTK.device
        )
        if num_tokens == 0:
            return blocks_GTK
        arguments = MergeArgs(
            candidates=candidates_RGTK.data_ptr(),
            query_start=rows.query_start_S1.data_ptr(),
            seq_lens=rows.seq_lens_S.data_ptr(),
            blocks=blocks_GTK.data_ptr(),
            num_seqs=rows.seq_lens_S.shape[0],
            num_rows=num_tokens,
            groups=groups,
            num_ranks=ranks,
            num_chosen=num_blocks,
            num_local=num_local,
        )
        self._library.launch("m3_merge_candidates", arguments)
        return blocks_GTK
