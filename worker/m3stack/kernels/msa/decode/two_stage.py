"""Exact block choice that reads 1-byte index keys first and bf16 keys only where they can matter.

The int8 copy bounds every score from both sides: a block whose upper bound lies below the cut of
the lower bounds cannot be chosen. The rest is scored by the one-stage arithmetic, most of it by
one token, whose score no other token's bound reaches. So the choice is that of
`CudaDecode.choose_blocks` on every input. Proof and constants: docs/decisions/0010 and 0013.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from m3stack.kernels.interface import PagedRows
from m3stack.kernels.msa.decode.cuda_library import ScoreArgs, SettleArgs
from m3stack.kernels.msa.decode.with_cuda import (
    BLOCK_TOKENS,
    HEAD_DIM,
    CudaDecode,
    UnsupportedShapeError,
    check_index,
    row_fields,
    score_workspace,
)
from m3stack.kernels.msa.index_copy import IndexCopy, page_bytes

# blocks of the settling kernel that a processor holds at a time, and the largest cluster of them
SETTLE_BLOCKS_PER_PROCESSOR = 3
MAX_SETTLE_SPLITS = 16


# (row, head) lines of a step whose queries fit in shared memory beside the pages
MAX_LINES = 256


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
        percent on keys as they occur, all of them where the bounds say nothing.

    Raises:
        UnsupportedShapeError: a shape, dtype or stride that the decode kernels do not serve.
    """
    check_index(index_q_TGD, index_k_PBD, rows, num_blocks)
    num_tokens, groups, _ = index_q_TGD.shape
    _check_copy(copy, index_k_PBD, num_tokens * groups)
    work = Workspace.of(index_q_TGD, rows, num_blocks)
    if num_tokens == 0:
        return work.blocks_GTK, work.num_rescored_TG
    launch_bounds(decode, index_q_TGD, copy, rows, work)
    settling = SettleArgs(
        q=index_q_TGD.data_ptr(),
        pages=index_k_PBD.data_ptr(),
        keys=work.keys.data_ptr(),
        second_keys=work.second_keys.data_ptr(),
        lower_keys=work.lower_keys.data_ptr(),
        blocks=work.blocks_GTK.data_ptr(),
        num_rescored=work.num_rescored_TG.data_ptr(),
        totals=decode.rescored_2.data_ptr(),
        page_stride=index_k_PBD.stride(0),
        row_stride=work.keys.stride(0),
        num_rows=num_tokens,
        groups=groups,
        num_chosen=num_blocks,
        num_local=num_local_blocks,
        splits=settle_splits(num_tokens * groups, decode.library.num_processors),
        **row_fields(rows),
    )
    decode.library.launch("m3_settle", settling)
    return work.blocks_GTK, work.num_rescored_TG


def settle_splits(lines: int, num_processors: int) -> int:
    """Blocks that share the rescoring of a line: a power of two, all of them resident at once."""
    splits = 1
    slots = SETTLE_BLOCKS_PER_PROCESSOR * num_processors
    while splits < MAX_SETTLE_SPLITS and 2 * splits * lines <= slots:
        splits *= 2
    return splits


@dataclass(frozen=True, slots=True)
class Workspace:
    """Uninitialised tensors of one call; a line is a (row, group)."""

    keys: Tensor  # int32 [lines, J']: upper bounds, each with the token that has it
    second_keys: Tensor  # upper bounds of the other tokens of each block
    lower_keys: Tensor
    num_rescored_TG: Tensor
    blocks_GTK: Tensor

    @staticmethod
    def of(index_q_TGD: Tensor, rows: PagedRows, num_blocks: int) -> Workspace:
        num_tokens, groups, _ = index_q_TGD.shape
        lines, device = num_tokens * groups, index_q_TGD.device
        keys = score_workspace(lines, rows, device)
        return Workspace(
            keys=keys,
            second_keys=torch.empty_like(keys),
            lower_keys=torch.empty_like(keys),
            num_rescored_TG=keys.new_empty((num_tokens, groups)),
            blocks_GTK=keys.new_empty((groups, num_tokens, num_blocks)),
        )


def launch_bounds(
    decode: CudaDecode, index_q_TGD: Tensor, copy: IndexCopy, rows: PagedRows, work: Workspace
) -> None:
    """The first stage: upper and lower bounds of every block, from the int8 copy."""
    scoring = ScoreArgs(
        q=index_q_TGD.data_ptr(),
        pages=copy.keys_PBD.data_ptr(),
        keys=work.keys.data_ptr(),
        second_keys=work.second_keys.data_ptr(),
        lower_keys=work.lower_keys.data_ptr(),
        page_stride_bytes=copy.keys_PBD.stride(0),
        row_stride=work.keys.stride(0),
        groups=index_q_TGD.shape[1],
        table_width=rows.page_table_SJ.shape[1],
        num_lines=work.keys.shape[0],
        **row_fields(rows),
    )
    decode.launch_score("m3_score_int8", scoring, rows)


def _check_copy(copy: IndexCopy, index_k_PBD: Tensor, lines: int) -> None:
    size = page_bytes(BLOCK_TOKENS, HEAD_DIM)
    key_bytes = BLOCK_TOKENS * HEAD_DIM
    if copy.keys_PBD.shape != index_k_PBD.shape:
        raise UnsupportedShapeError(
            f"the int8 copy must have the shape of the index pages {tuple(index_k_PBD.shape)}, "
            f"got {tuple(copy.keys_PBD.shape)}"
        )
    side_by_side = copy.meta_PB.data_ptr() == copy.keys_PBD.data_ptr() + key_bytes
    strides = (copy.keys_PBD.stride(), copy.meta_PB.stride())
    if not side_by_side or strides != ((size, HEAD_DIM, 1), (size // 4, 1)):
        raise UnsupportedShapeError(f"a page of the int8 copy must be one piece, got {strides}")
    if lines > MAX_LINES:
        raise UnsupportedShapeError(f"query rows x index heads at most {MAX_LINES}, got {lines}")
