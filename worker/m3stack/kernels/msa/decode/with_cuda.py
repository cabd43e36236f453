"""Block choice and block attention for few query rows a request, by the sm_90a decode kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from m3stack.kernels.interface import LayerPages, PagedRows
from m3stack.kernels.msa.decode.cuda_library import (
    AttendArgs,
    DecodeLibrary,
    ScoreArgs,
    SelectArgs,
)
from m3stack.kernels.msa.decode.fp8_pages import Fp8Pages

BLOCK_TOKENS = 128
HEAD_DIM = 128
# query rows of a request times index heads that one pass over a page can serve
MAX_COLUMNS = 32
MAX_CHOSEN = 32
MAX_SEQUENCES = 1024
MAX_HEADS_PER_GROUP = 16
# up to so many (row, group) lines each chosen block has a thread block of its own
BLOCK_LINES = 16
CLUSTER_LINES = 8
CLUSTER_SPLITS = 16
MAX_SPLITS = 16


class UnsupportedShapeError(ValueError):
    """The decode kernels do not serve this shape; the message names the value and the limit."""


class CudaDecode:
    """The two decode operations, bound to one built library; calls belong on one stream."""

    def __init__(self, library: DecodeLibrary, device: str = "cuda") -> None:
        self.library = library
        # arrivals of blocks at a line; every launch leaves zeros, so launches must not overlap
        self._arrived = torch.zeros(library.num_processors, dtype=torch.int32, device=device)
        # blocks scored in bf16 and blocks ranked by the two-stage choice, summed on the device
        self.rescored_2 = torch.zeros(2, dtype=torch.int64, device=device)

    @staticmethod
    def serves(groups: int, rows: PagedRows) -> bool:
        """Whether a step is small enough for one pass of these kernels."""
        num_seqs = rows.seq_lens_S.shape[0]
        return rows.max_query_len * groups <= MAX_COLUMNS and num_seqs <= MAX_SEQUENCES

    def choose_blocks(
        self,
        index_q_TGD: Tensor,
        index_k_PBD: Tensor,
        rows: PagedRows,
        num_blocks: int,
        num_local_blocks: int,
    ) -> Tensor:
        """See `interface.ChooseBlocks`; bf16, 128 x 128 pages.

        Raises:
            UnsupportedShapeError: a shape, dtype or stride outside the limits above.
        """
        check_index(index_q_TGD, index_k_PBD, rows, num_blocks)
        num_tokens, groups, _ = index_q_TGD.shape
        if num_tokens == 0:
            return index_q_TGD.new_empty((groups, 0, num_blocks), dtype=torch.int32)
        keys = score_workspace(num_tokens * groups, rows, index_q_TGD.device)
        arguments = ScoreArgs(
            q=index_q_TGD.data_ptr(),
            pages=index_k_PBD.data_ptr(),
            keys=keys.data_ptr(),
            page_stride_bytes=index_k_PBD.stride(0) * 2,
            row_stride=keys.stride(0),
            groups=groups,
            table_width=rows.page_table_SJ.shape[1],
            num_lines=num_tokens * groups,
            **row_fields(rows),
        )
        self.launch_score("m3_score", arguments, rows)
        return self.select(keys, rows, num_tokens, groups, num_blocks, num_local_blocks)

    def launch_score(self, name: str, arguments: ScoreArgs, rows: PagedRows) -> None:
        """Enqueues a scoring kernel over as many processors as there can be pages."""
        num_seqs = rows.seq_lens_S.shape[0]
        most_pages = max(1, num_seqs * -(-rows.max_seq_len // BLOCK_TOKENS))
        grid = min(self.library.num_processors, most_pages)
        arguments.seq_stride = coprime_at_least(num_seqs, grid)
        columns = rows.max_query_len * arguments.groups
        self.library.launch(name, arguments, columns, grid)

    def select(
        self,
        keys: Tensor,
        rows: PagedRows,
        num_tokens: int,
        groups: int,
        num_blocks: int,
        num_local_blocks: int,
    ) -> Tensor:
        """Ranks the keys of every row: int32 [G, T, K]."""
        blocks_GTK = torch.empty(
            (groups, num_tokens, num_blocks), dtype=torch.int32, device=keys.device
        )
        arguments = SelectArgs(
            keys=keys.data_ptr(),
            blocks=blocks_GTK.data_ptr(),
            row_stride=keys.stride(0),
            num_rows=num_tokens,
            groups=groups,
            num_chosen=num_blocks,
            num_local=num_local_blocks,
            query_start=rows.query_start_S1.data_ptr(),
            seq_lens=rows.seq_lens_S.data_ptr(),
            num_seqs=rows.seq_lens_S.shape[0],
        )
        self.library.launch("m3_select", arguments)
        return blocks_GTK

    def block_attention(
        self,
        q_THD: Tensor,
        pages: LayerPages,
        blocks_GTK: Tensor,
        rows: PagedRows,
        scale: float,
    ) -> Tensor:
        """See `interface.BlockAttention`; bf16, any page, group and token strides.

        Raises:
            UnsupportedShapeError: a shape, dtype or stride outside the limits above.
        """
        _require(pages.k_PGBD.dtype == torch.bfloat16, "K and V must be bf16", pages.k_PGBD.dtype)
        return self._attend(
            q_THD, (pages.k_PGBD, pages.v_PGBD), (None, None), blocks_GTK, rows, scale
        )

    def block_attention_fp8(
        self,
        q_THD: Tensor,
        pages: Fp8Pages,
        blocks_GTK: Tensor,
        rows: PagedRows,
        scale: float,
    ) -> Tensor:
        """Block attention over e4m3 pages; otherwise as `block_attention`.

        Raises:
            UnsupportedShapeError: a shape, dtype or stride outside the limits above.
        """
        for pool in (pages.k_PGBD, pages.v_PGBD):
            _require(pool.dtype == torch.float8_e4m3fn, "fp8 K and V must be e4m3", pool.dtype)
        scales_PG = (pages.k_scale_PG, pages.v_scale_PG)
        for scales in scales_PG:
            if scales is not None:
                _require(scales.is_contiguous(), "scales must be contiguous", scales.stride())
        _require(
            (scales_PG[0] is None) == (scales_PG[1] is None),
            "K and V must both have scales or both none",
            scales_PG[0],
        )
        kv_PGBD = (pages.k_PGBD, pages.v_PGBD)
        return self._attend(q_THD, kv_PGBD, scales_PG, blocks_GTK, rows, scale)

    def _attend(
        self,
        q_THD: Tensor,
        kv_PGBD: tuple[Tensor, Tensor],
        scales_PG: tuple[Tensor | None, Tensor | None],
        blocks_GTK: Tensor,
        rows: PagedRows,
        scale: float,
    ) -> Tensor:
        k_PGBD, v_PGBD = kv_PGBD
        num_tokens, heads, _ = q_THD.shape
        groups = k_PGBD.shape[1]
        num_chosen = blocks_GTK.shape[-1]
        _check_attention(q_THD, k_PGBD, v_PGBD, blocks_GTK)
        out_THD = torch.empty_like(q_THD)
        if num_tokens == 0:
            return out_THD
        arguments = AttendArgs(
            q=q_THD.data_ptr(),
            k=k_PGBD.data_ptr(),
            v=v_PGBD.data_ptr(),
            k_scale=None if scales_PG[0] is None else scales_PG[0].data_ptr(),
            v_scale=None if scales_PG[1] is None else scales_PG[1].data_ptr(),
            blocks=blocks_GTK.data_ptr(),
            out=out_THD.data_ptr(),
            k_page_stride=k_PGBD.stride(0),
            k_group_stride=k_PGBD.stride(1),
            k_token_stride=k_PGBD.stride(2),
            v_page_stride=v_PGBD.stride(0),
            v_group_stride=v_PGBD.stride(1),
            v_token_stride=v_PGBD.stride(2),
            scale_log2=scale * math.log2(math.e),
            num_rows=num_tokens,
            groups=groups,
            heads_per_group=heads // groups,
            num_chosen=num_chosen,
            **row_fields(rows),
        )
        is_fp8 = int(k_PGBD.dtype == torch.float8_e4m3fn)
        lines = num_tokens * groups
        serves_blocks = not is_fp8 and num_chosen <= CLUSTER_SPLITS
        plan = attention_plan(lines, self.library.num_processors, serves_blocks=serves_blocks)
        arguments.splits = plan.splits
        if plan.merge is Merge.BLOCKS:
            self.library.launch("m3_attend_block", arguments)
            return out_THD
        if plan.merge is Merge.MEMORY:
            partials = q_THD.new_empty(
                plan.splits * num_tokens * heads * (HEAD_DIM + 2), dtype=torch.float32
            )
            arguments.partials = partials.data_ptr()
            arguments.arrived = self._arrived.data_ptr()
        self.library.launch("m3_attend", arguments, is_fp8, plan.teams, plan.merge)
        return out_THD


class Merge(IntEnum):
    """How the blocks of a (row, group) line bring their outputs together."""

    ALONE = 0
    CLUSTER = 1
    MEMORY = 2
    # a kernel of its own: a chosen block for each thread block, heads sent to their owners
    BLOCKS = 3


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Teams of warps a block, blocks a line, and how they merge."""

    teams: int
    splits: int
    merge: Merge


def attention_plan(lines: int, num_processors: int, *, serves_blocks: bool = True) -> AttentionPlan:
    """The plan with the least time for this many (row, group) lines.

    A block of two teams fills a processor and is the fastest on its own; two blocks of one team
    keep more lines in flight. Large clusters merge fastest but leave processors idle, so they
    serve only the smallest batches.

    Args:
        lines: (row, group) pairs of the step.
        num_processors: of the GPU.
        serves_blocks: bf16, and no more chosen blocks than a cluster has thread blocks.
    """
    if lines > num_processors:
        return AttentionPlan(1, 1, Merge.ALONE)
    if lines <= BLOCK_LINES and serves_blocks:
        return AttentionPlan(1, CLUSTER_SPLITS, Merge.BLOCKS)
    if lines <= CLUSTER_LINES:
        return AttentionPlan(2, CLUSTER_SPLITS, Merge.CLUSTER)
    splits = min(MAX_SPLITS, num_processors // lines)
    return AttentionPlan(2, splits, Merge.MEMORY if splits > 1 else Merge.ALONE)


def coprime_at_least(value: int, other: int) -> int:
    """Smallest number not below `value` that shares no factor with `other`."""
    while math.gcd(value, other) != 1:
        value += 1
    return value


def score_workspace(lines: int, rows: PagedRows, device: torch.device) -> Tensor:
    """Uninitialised int32 [lines, J'] with J' a multiple of four, as the kernels read vectors."""
    width = -(-max(1, rows.max_seq_len) // BLOCK_TOKENS)
    return torch.empty((lines, -(-width // 4) * 4), dtype=torch.int32, device=device)


def row_fields(rows: PagedRows) -> dict[str, int]:
    """The fields by which every kernel finds the rows of the step."""
    return {
        "query_start": rows.query_start_S1.data_ptr(),
        "seq_lens": rows.seq_lens_S.data_ptr(),
        "page_table": rows.page_table_SJ.data_ptr(),
        "table_stride": rows.page_table_SJ.stride(0),
        "num_seqs": rows.seq_lens_S.shape[0],
    }


def _require(holds: bool, what: str, value: object) -> None:
    if not holds:
        raise UnsupportedShapeError(f"{what}, got {value}")


def check_index(q_TGD: Tensor, k_PBD: Tensor, rows: PagedRows, num_blocks: int) -> None:
    """Raises `UnsupportedShapeError` unless the scoring kernels serve these inputs."""
    columns = rows.max_query_len * q_TGD.shape[1]
    _require(q_TGD.dtype == torch.bfloat16, "index q must be bf16", q_TGD.dtype)
    _require(k_PBD.dtype == torch.bfloat16, "index k must be bf16", k_PBD.dtype)
    _require(q_TGD.is_contiguous(), "index q must be contiguous", q_TGD.stride())
    shape = (BLOCK_TOKENS, HEAD_DIM)
    _require(tuple(k_PBD.shape[1:]) == shape, f"index pages must be {shape}", k_PBD.shape)
    _require(k_PBD.stride()[1:] == (HEAD_DIM, 1), "index pages must be dense", k_PBD.stride())
    _require(columns <= MAX_COLUMNS, f"query rows x groups at most {MAX_COLUMNS}", columns)
    _require(num_blocks <= MAX_CHOSEN, f"chosen blocks at most {MAX_CHOSEN}", num_blocks)
    num_seqs = rows.seq_lens_S.shape[0]
    _require(num_seqs <= MAX_SEQUENCES, f"sequences at most {MAX_SEQUENCES}", num_seqs)
    check_rows(rows)


def check_rows(rows: PagedRows) -> None:
    """Raises `UnsupportedShapeError` unless the index tensors are int32 with dense rows."""
    for name, tensor in (
        ("query_start", rows.query_start_S1),
        ("seq_lens", rows.seq_lens_S),
        ("page_table", rows.page_table_SJ),
    ):
        _require(tensor.dtype == torch.int32, f"{name} must be int32", tensor.dtype)
        _require(tensor.stride(-1) == 1, f"{name} must be dense", tensor.stride())


def _check_attention(q_THD: Tensor, k_PGBD: Tensor, v_PGBD: Tensor, blocks_GTK: Tensor) -> None:
    groups = k_PGBD.shape[1]
    per_group = q_THD.shape[1] // groups
    _require(q_THD.dtype == torch.bfloat16, "q must be bf16", q_THD.dtype)
    _require(q_THD.is_contiguous(), "q must be contiguous", q_THD.stride())
    _require(
        1 <= per_group <= MAX_HEADS_PER_GROUP and per_group * groups == q_THD.shape[1],
        f"heads a group must be whole and at most {MAX_HEADS_PER_GROUP}",
        (q_THD.shape[1], groups),
    )
    for pool in (k_PGBD, v_PGBD):
        shape = (groups, BLOCK_TOKENS, HEAD_DIM)
        _require(tuple(pool.shape[1:]) == shape, f"pages must be {shape}", tuple(pool.shape))
        aligned = pool.stride(3) == 1 and all(step % 16 == 0 for step in pool.stride()[:3])
        _require(aligned, "page strides must be multiples of 16, head dim dense", pool.stride())
    _require(blocks_GTK.is_contiguous(), "blocks must be contiguous", blocks_GTK.stride())
    chosen = blocks_GTK.shape[-1]
    _require(chosen <= MAX_CHOSEN, f"chosen blocks at most {MAX_CHOSEN}", chosen)
