"""Exact block choice that reads 1-byte index keys first and bf16 keys only where they can matter.

The int8 copy bounds every score from both sides; a block whose upper bound lies below the cut of
the lower bounds cannot be chosen. The rest is scored by the one-stage arithmetic, so the choice is
that of `CudaDecode.choose_blocks` on every input. Proof and constants: docs/decisions/0010.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from m3stack.kernels.interface import PagedRows
from m3stack.kernels.msa.decode.cuda_library import (
    RescoreArgs,
    ScoreArgs,
    SelectArgs,
    SplitQueryArgs,
)
from m3stack.kernels.msa.decode.with_cuda import (
    BLOCK_TOKENS,
    HEAD_DIM,
    CudaDecode,
    UnsupportedShapeError,
    check_index,
    row_fields,
    score_workspace,
)

# share of |k| added to the stored bound: rounding of the query to 16 bits, of both fp32 scores
NORM_SHARE = 2.0**-11
# covers the rounding of the norms themselves
NORM_SLACK = 1.0 + 2.0**-10
# products of norms up to this never overflow; longer keys have no bound and are always rescored
MAX_NORM = 1.0e18
# keeps underflowed products inside the bound
MIN_BOUND = 1.0e-15
# processors times resident blocks of the rescoring kernel
RESCORE_BLOCKS_PER_PROCESSOR = 4


@dataclass(frozen=True, slots=True)
class IndexCopy:
    """One-byte index keys of a pool, written beside the bf16 keys.

    Attributes:
        keys_PBD: int8 [P, B, D].
        meta_PB: int32 [P, B]: bf16 scale in the low half, bf16 bound in the high half; NaN bound
            where the key has none.
    """

    keys_PBD: Tensor
    meta_PB: Tensor

    @staticmethod
    def empty(num_pages: int, device: torch.device | str) -> IndexCopy:
        """Uninitialised copy for `num_pages` pages: 132 bytes a token."""
        keys_PBD = torch.empty((num_pages, BLOCK_TOKENS, HEAD_DIM), dtype=torch.int8, device=device)
        return IndexCopy(keys_PBD, keys_PBD.new_empty(keys_PBD.shape[:2], dtype=torch.int32))


def copy_index_keys(index_k: Tensor) -> tuple[Tensor, Tensor]:
    """The int8 keys and packed metas of any bf16 keys [..., D]; the meaning of the fused writer.

    Returns:
        int8 [..., D] and int32 [...] with |k - scale * key8| + 2^-11 |k| <= bound.
    """
    exact = index_k.float()
    largest = exact.abs().amax(-1)
    scale = round_up_to_bf16(largest / 127.0).clamp(min=2.0**-100)
    keys = (exact / scale[..., None]).round().clamp(-127, 127)
    residual = torch.linalg.vector_norm(exact - keys * scale[..., None], dim=-1)
    norm = torch.linalg.vector_norm(exact, dim=-1)
    bound = ((residual + NORM_SHARE * norm) * NORM_SLACK).clamp(min=MIN_BOUND)
    bounded = norm <= MAX_NORM  # false for NaN
    keys = torch.where(bounded[..., None], keys, 0.0).to(torch.int8)
    scale_bits = torch.where(bounded, scale, 0.0).view(torch.int32) >> 16
    bound_bits = round_up_to_bf16(bound).view(torch.int32)
    bound_bits = torch.where(bounded, bound_bits, 0x7FC00000)
    return keys, scale_bits | bound_bits


def round_up_to_bf16(positive: Tensor) -> Tensor:
    """Smallest bf16 value not below each positive fp32 value, still as fp32."""
    bits = positive.contiguous().view(torch.int32)
    return ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32)


def choose_blocks_two_stage(
    decode: CudaDecode,
    index_q_TGD: Tensor,
    index_k_PBD: Tensor,
    copy: IndexCopy,
    rows: PagedRows,
    num_blocks: int,
    num_local_blocks: int,
) -> tuple[Tensor, Tensor]:
    """The choice of `decode.choose_blocks`, reading about half of the bytes.

    Args:
        decode: the decode kernels.
        index_q_TGD: bf16 [T, G, D].
        index_k_PBD: bf16 [P, B, D].
        copy: the int8 copy of `index_k_PBD`.
        rows: positions and page tables.
        num_blocks: K.
        num_local_blocks: forced last blocks.

    Returns:
        int32 [G, T, K] blocks and int32 [T, G], how many blocks had to be scored in bf16: a few
        percent on keys as they occur, all of them where the bound says nothing.

    Raises:
        UnsupportedShapeError: a shape, dtype or stride that the decode kernels do not serve.
    """
    check_index(index_q_TGD, index_k_PBD, rows, num_blocks)
    if copy.keys_PBD.shape != index_k_PBD.shape or not copy.meta_PB.is_contiguous():
        raise UnsupportedShapeError(
            f"the int8 copy must have the shape of the index pages {tuple(index_k_PBD.shape)}, "
            f"got {tuple(copy.keys_PBD.shape)}"
        )
    num_tokens, groups, _ = index_q_TGD.shape
    work = _Workspace.of(index_q_TGD, rows, num_blocks)
    _launch_bounds(decode, index_q_TGD, copy, rows, work)
    choosing = SelectArgs(
        keys=work.keys.data_ptr(),
        lower_keys=work.lower_keys.data_ptr(),
        blocks=work.blocks_GTK.data_ptr(),
        candidates=work.candidates.data_ptr(),
        num_candidates=work.num_candidates_TG.data_ptr(),
        row_stride=work.keys.stride(0),
        num_rows=num_tokens,
        groups=groups,
        num_chosen=num_blocks,
        num_local=num_local_blocks,
        **row_fields(rows),
    )
    decode.library.launch("m3_select", choosing, 1)
    _launch_rescore(decode, index_q_TGD, index_k_PBD, rows, work)
    decode.library.launch("m3_select", choosing, 0)
    return work.blocks_GTK, work.num_candidates_TG


@dataclass(frozen=True, slots=True)
class _Workspace:
    """Uninitialised tensors of one call; a line is a (row, group)."""

    planes: Tensor  # int8 [lines, 2, D]: the query as high and low bytes
    query_meta: Tensor  # fp32 [lines, 4]: scale and norm bound
    keys: Tensor  # int32 [lines, J']: upper bounds, then scores
    lower_keys: Tensor
    candidates: Tensor
    num_candidates_TG: Tensor
    blocks_GTK: Tensor

    @staticmethod
    def of(index_q_TGD: Tensor, rows: PagedRows, num_blocks: int) -> _Workspace:
        num_tokens, groups, _ = index_q_TGD.shape
        lines, device = num_tokens * groups, index_q_TGD.device
        keys = score_workspace(lines, rows, device)
        return _Workspace(
            planes=torch.empty((lines, 2, HEAD_DIM), dtype=torch.int8, device=device),
            query_meta=torch.empty((lines, 4), dtype=torch.float32, device=device),
            keys=keys,
            lower_keys=torch.empty_like(keys),
            candidates=torch.empty_like(keys),
            num_candidates_TG=keys.new_empty((num_tokens, groups)),
            blocks_GTK=keys.new_empty((groups, num_tokens, num_blocks)),
        )


def _launch_bounds(
    decode: CudaDecode, index_q_TGD: Tensor, copy: IndexCopy, rows: PagedRows, work: _Workspace
) -> None:
    """Upper and lower bounds of every block, from the int8 copy."""
    splitting = SplitQueryArgs(
        q=index_q_TGD.data_ptr(),
        planes=work.planes.data_ptr(),
        meta=work.query_meta.data_ptr(),
        num_lines=work.keys.shape[0],
    )
    decode.library.launch("m3_split_query", splitting)
    scoring = ScoreArgs(
        q=work.planes.data_ptr(),
        q_meta=work.query_meta.data_ptr(),
        pages=copy.keys_PBD.data_ptr(),
        page_meta=copy.meta_PB.data_ptr(),
        keys=work.keys.data_ptr(),
        lower_keys=work.lower_keys.data_ptr(),
        page_stride_bytes=copy.keys_PBD.stride(0),
        row_stride=work.keys.stride(0),
        groups=index_q_TGD.shape[1],
        table_width=rows.page_table_SJ.shape[1],
        **row_fields(rows),
    )
    decode.launch_score("m3_score_int8", scoring, rows)


def _launch_rescore(
    decode: CudaDecode,
    index_q_TGD: Tensor,
    index_k_PBD: Tensor,
    rows: PagedRows,
    work: _Workspace,
) -> None:
    """One-stage scores of the candidates, from the bf16 keys."""
    lines = work.keys.shape[0]
    rescoring = RescoreArgs(
        q=index_q_TGD.data_ptr(),
        pages=index_k_PBD.data_ptr(),
        candidates=work.candidates.data_ptr(),
        num_candidates=work.num_candidates_TG.data_ptr(),
        keys=work.keys.data_ptr(),
        page_stride=index_k_PBD.stride(0),
        row_stride=work.keys.stride(0),
        groups=index_q_TGD.shape[1],
        **row_fields(rows),
    )
    slots = RESCORE_BLOCKS_PER_PROCESSOR * decode.library.num_processors
    decode.library.launch("m3_rescore", rescoring, lines, max(1, slots // max(1, lines)))
