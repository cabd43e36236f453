"""MSA by the sm_90a kernels: the decode form where it serves a step, else the prefill form."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from m3stack.kernels.build import KernelUnavailableError
from m3stack.kernels.interface import LayerPages, PagedRows
from m3stack.kernels.msa.decode.cuda_library import DecodeLibrary
from m3stack.kernels.msa.decode.fp8_pages import Fp8Pages
from m3stack.kernels.msa.decode.two_stage import MAX_LINES, choose_blocks_two_stage
from m3stack.kernels.msa.decode.with_cuda import CudaDecode
from m3stack.kernels.msa.index_copy import IndexCopy
from m3stack.kernels.msa.prefill.cuda_library import PrefillLibrary
from m3stack.kernels.msa.prefill.limits import (
    BLOCK_TOKENS,
    HEAD_DIM,
    HEADS_PER_GROUP,
    MAX_CHOSEN,
)
from m3stack.kernels.msa.prefill.widened_pages import block_attention_fp8, pays_to_widen
from m3stack.kernels.msa.prefill.with_cuda import CudaPrefill
from m3stack.kernels.shape import KernelShape

# keys of a decode step from which reading half of their bytes pays for the second stage
TWO_STAGE_TOKENS = 1 << 18
# (row, group) pairs of a step up to which the kernel of decode is faster over e4m3 pages
FEW_FP8_LINES = 256
# rows of a chunk up to which a copy of its e4m3 pages costs more than to widen them as they load
FEW_FP8_ROWS = 1024


class Fp8Way(StrEnum):
    """How block attention reads e4m3 pages."""

    DECODE = "decode"
    UNIONS = "unions"
    WIDENED = "widened"


def choose_fp8_way(num_tokens: int, pages: Fp8Pages, rows: PagedRows) -> Fp8Way:
    """What was fastest for a step that is no decode step, by sizes alone."""
    _, groups, page_tokens, _ = pages.k_PGBD.shape
    if num_tokens * groups <= FEW_FP8_LINES:
        return Fp8Way.DECODE
    # where few rows share a page, or a copy has no room, pages are widened as they are read
    is_chunk = num_tokens > FEW_FP8_ROWS
    return Fp8Way.WIDENED if is_chunk and pays_to_widen(rows, page_tokens) else Fp8Way.UNIONS


class CudaMsa:
    """Block choice and block attention for every step of a model; one stream at a time."""

    def __init__(self, shape: KernelShape) -> None:
        """Builds or finds both libraries.

        Raises:
            KernelUnavailableError: another GPU, no compiler, or a model the kernels do not serve.
        """
        refuse_other_models(shape)
        self.decode = CudaDecode(DecodeLibrary())
        self.prefill = CudaPrefill(PrefillLibrary())

    def choose_blocks(
        self,
        index_q_TGD: Tensor,
        index_k_PBD: Tensor,
        rows: PagedRows,
        num_blocks: int,
        num_local_blocks: int,
        index_copy_PX: Tensor | None = None,
    ) -> Tensor:
        """See `interface.ChooseBlocks`; long decode steps read a copy first."""
        arm = self._arm(index_q_TGD.shape[1], rows)
        inputs = (rows, num_blocks, num_local_blocks)
        index_q_TGD = index_q_TGD.contiguous()
        if (
            arm is self.decode
            and index_copy_PX is not None
            and pays_in_two_stages(index_q_TGD, rows)
        ):
            copy = IndexCopy.over(index_copy_PX, BLOCK_TOKENS)
            return choose_blocks_two_stage(self.decode, index_q_TGD, index_k_PBD, copy, *inputs)[0]
        return arm.choose_blocks(index_q_TGD, index_k_PBD, *inputs)

    def rescored(self) -> Rescored:
        """How far the two-stage choice had to read the keys themselves. Waits for the device."""
        return Rescored(*self.decode.rescored_2.tolist())

    def block_attention(
        self, q_THD: Tensor, pages: LayerPages, blocks_GTK: Tensor, rows: PagedRows, scale: float
    ) -> Tensor:
        """See `interface.BlockAttention`."""
        arm, q_THD = self._arm(pages.k_PGBD.shape[1], rows), q_THD.contiguous()
        if pages.k_PGBD.dtype != torch.float8_e4m3fn:
            return arm.block_attention(q_THD, pages, blocks_GTK, rows, scale)
        fp8 = Fp8Pages(pages.k_PGBD, pages.v_PGBD, None, None)
        way = Fp8Way.DECODE if arm is self.decode else choose_fp8_way(q_THD.shape[0], fp8, rows)
        return self.block_attention_fp8(q_THD, fp8, blocks_GTK, rows, scale, way=way)

    def block_attention_fp8(
        self,
        q_THD: Tensor,
        pages: Fp8Pages,
        blocks_GTK: Tensor,
        rows: PagedRows,
        scale: float,
        *,
        way: Fp8Way,
    ) -> Tensor:
        """Attention over e4m3 pages, the way given."""
        inputs = (q_THD, pages, blocks_GTK, rows, scale)
        if way is Fp8Way.DECODE:
            return self.decode.block_attention_fp8(*inputs)
        if way is Fp8Way.UNIONS:
            return self.prefill.block_attention_fp8(*inputs)
        return block_attention_fp8(self.prefill.block_attention, *inputs)

    def _arm(self, groups: int, rows: PagedRows) -> CudaDecode | CudaPrefill:
        return self.decode if self.decode.serves(groups, rows) else self.prefill


@dataclass(frozen=True, slots=True)
class Rescored:
    """Sums over all two-stage choices so far: blocks looked at in bf16, blocks ranked."""

    blocks: int
    ranked: int

    @property
    def share(self) -> float:
        """Half a percent on keys as they occur; 1 where the bounds say nothing."""
        return self.blocks / max(1, self.ranked)


def pays_in_two_stages(index_q_TGD: Tensor, rows: PagedRows) -> bool:
    """Whether the copy saves more than the second stage costs, by the lengths the host knows."""
    num_tokens, groups, _ = index_q_TGD.shape
    most_tokens = rows.seq_lens_S.shape[0] * rows.max_seq_len
    return num_tokens * groups <= MAX_LINES and most_tokens >= TWO_STAGE_TOKENS


def refuse_other_models(shape: KernelShape) -> None:
    """Raises `KernelUnavailableError` for a model that the sm_90a kernels are not written for."""
    served = {
        "dtype": (shape.dtype, torch.bfloat16),
        "head dim": (shape.head_dim, HEAD_DIM),
        "page tokens": (shape.page_tokens, BLOCK_TOKENS),
    }
    for what, (value, only) in served.items():
        if value != only:
            raise KernelUnavailableError(f"MSA kernels of sm_90a serve {what} {only}, got {value}")
    if not 1 <= shape.heads // shape.groups <= HEADS_PER_GROUP:
        raise KernelUnavailableError(
            f"MSA kernels of sm_90a serve at most {HEADS_PER_GROUP} heads a group, "
            f"got {shape.heads // shape.groups}"
        )
    if not 1 <= shape.num_local_blocks <= shape.num_blocks <= MAX_CHOSEN:
        raise KernelUnavailableError(
            f"MSA kernels of sm_90a serve 1 <= local blocks <= blocks <= {MAX_CHOSEN}, "
            f"got {shape.num_local_blocks} and {shape.num_blocks}"
        )
