"""What the sm_90a kernels of prefill serve, and the refusal of anything else."""

from __future__ import annotations

import torch
from torch import Tensor

from m3stack.kernels.interface import LayerPages, PagedRows
from m3stack.kernels.msa.decode.fp8_pages import Fp8Pages

BLOCK_TOKENS = 128
HEAD_DIM = 128
HEADS_PER_GROUP = 16
MAX_CHOSEN = 16
SCORE_TILE_ROWS = 256
# a block id shares a word with the bits of eight tokens
MAX_BLOCKS_OF_SEQUENCE = 1 << 24


class UnsupportedShapeError(ValueError):
    """The prefill kernels do not serve this shape; the message names the value and the limit."""


def row_fields(rows: PagedRows) -> dict[str, int]:
    """The fields of an argument struct that say where rows stand.

    Raises:
        UnsupportedShapeError: another dtype or stride, or a sequence beyond 2^31 tokens.
    """
    for name in ("query_start_S1", "seq_lens_S", "page_table_SJ"):
        tensor = getattr(rows, name)
        if tensor.dtype != torch.int32 or (tensor.numel() and tensor.stride(-1) != 1):
            raise UnsupportedShapeError(f"{name} must be int32 and contiguous: {tensor.dtype}")
    if rows.max_seq_len > MAX_BLOCKS_OF_SEQUENCE * BLOCK_TOKENS:
        raise UnsupportedShapeError(f"sequence of {rows.max_seq_len} tokens, at most 2^31")
    return {
        "query_start": rows.query_start_S1.data_ptr(),
        "seq_lens": rows.seq_lens_S.data_ptr(),
        "page_table": rows.page_table_SJ.data_ptr(),
        "num_sequences": rows.seq_lens_S.shape[0],
        "table_pitch": rows.page_table_SJ.stride(0),
    }


def check_choice(
    index_q_TGD: Tensor, index_k_PBD: Tensor, num_blocks: int, num_local_blocks: int
) -> None:
    """Raises `UnsupportedShapeError` for what block choice does not serve."""
    if index_q_TGD.dtype != torch.bfloat16 or index_k_PBD.dtype != torch.bfloat16:
        raise UnsupportedShapeError(f"bf16 only, not {index_q_TGD.dtype} and {index_k_PBD.dtype}")
    if index_k_PBD.shape[1:] != (BLOCK_TOKENS, HEAD_DIM) or index_q_TGD.shape[2] != HEAD_DIM:
        raise UnsupportedShapeError(
            f"pages of {BLOCK_TOKENS} x {HEAD_DIM} only: {tuple(index_k_PBD.shape)}, "
            f"queries {tuple(index_q_TGD.shape)}"
        )
    if not index_q_TGD.is_contiguous() or index_k_PBD.stride(2) != 1:
        raise UnsupportedShapeError("index queries must be contiguous, index keys along a row")
    if not 1 <= num_local_blocks <= num_blocks <= MAX_CHOSEN:
        raise UnsupportedShapeError(
            f"1 <= local blocks <= blocks <= {MAX_CHOSEN}: {num_local_blocks}, {num_blocks}"
        )


def check_attention(q_THD: Tensor, pages: LayerPages | Fp8Pages, blocks_GTK: Tensor) -> None:
    """Raises `UnsupportedShapeError` for what block attention does not serve."""
    groups, num_tokens, num_blocks = blocks_GTK.shape
    k_PGBD, v_PGBD = pages.k_PGBD, pages.v_PGBD
    stored = torch.float8_e4m3fn if isinstance(pages, Fp8Pages) else torch.bfloat16
    if q_THD.dtype != torch.bfloat16 or {k_PGBD.dtype, v_PGBD.dtype} != {stored}:
        kind = "bf16" if stored == torch.bfloat16 else "bf16 over e4m3"
        raise UnsupportedShapeError(f"{kind} only, not {q_THD.dtype} over {k_PGBD.dtype}")
    if isinstance(pages, Fp8Pages):
        for scale_PG in (pages.k_scale_PG, pages.v_scale_PG):
            if scale_PG is not None and not scale_PG.is_contiguous():
                raise UnsupportedShapeError("scales of pages must be contiguous")
    if q_THD.shape != (num_tokens, groups * HEADS_PER_GROUP, HEAD_DIM):
        raise UnsupportedShapeError(
            f"queries {tuple(q_THD.shape)} for {groups} groups of {HEADS_PER_GROUP} heads x "
            f"{HEAD_DIM} and {num_tokens} rows"
        )
    for pool in (k_PGBD, v_PGBD):
        if pool.shape[1:] != (groups, BLOCK_TOKENS, HEAD_DIM) or pool.stride(3) != 1:
            raise UnsupportedShapeError(f"pages must be 128 x 128: {tuple(pool.shape)}")
    if blocks_GTK.dtype != torch.int32 or not blocks_GTK.is_contiguous():
        raise UnsupportedShapeError("chosen blocks must be contiguous int32")
    if q_THD.stride(2) != 1 or num_blocks > MAX_CHOSEN:
        raise UnsupportedShapeError(f"at most {MAX_CHOSEN} blocks a row: {num_blocks}")
