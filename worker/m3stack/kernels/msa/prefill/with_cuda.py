"""Block choice and block attention for prefill chunks, by the sm_90a kernels."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from m3stack.kernels.interface import LayerPages, PagedRows
from m3stack.kernels.msa.prefill.cuda_library import (
    AttendArguments,
    InvertArguments,
    PrefillLibrary,
    ScoreArguments,
    TensorMaps,
)

BLOCK_TOKENS = 128
HEAD_DIM = 128
HEADS_PER_GROUP = 16
MAX_CHOSEN = 16
SCORE_TILE_ROWS = 256
CHUNK_ROWS = 128
PIECE_TOKENS = 64
SLICE_BUCKETS = 1024
PIECE_BYTES = 32
# a block id shares a word with the bits of eight tokens
MAX_BLOCKS_OF_SEQUENCE = 1 << 24


class UnsupportedShapeError(ValueError):
    """The prefill kernels do not serve this shape; the message names the value and the limit."""


class Arm(IntEnum):
    """How block attention walks: by what the selections measure, or one of the two designs."""

    MEASURED = 0
    UNION = 1
    KEY_MAJOR = 2


@dataclass(frozen=True, slots=True)
class AttendPolicy:
    """What decides between the arms.

    Attributes:
        arm: `MEASURED` counts the unions on the device and lets them decide there.
        load_limit: the union arm is taken while a tile's union is at most this many times the
            blocks of one token.
        min_key_major_rows: smaller steps always take the union arm: they fill too few rows a block.
        slab_rows: rows the key-major arm treats at once; its partials need 256 KiB for each row
            of 64 heads.
    """

    arm: Arm = Arm.MEASURED
    load_limit: float = 3.0
    min_key_major_rows: int = 1024
    slab_rows: int = 8192


@dataclass(frozen=True, slots=True)
class Overlap:
    """How far neighbouring rows agreed: sums over all tiles since the counters were made."""

    union_blocks: int
    chosen_blocks: int
    tile_tokens: int

    @property
    def load_factor(self) -> float:
        """Blocks a tile loads over the blocks of one of its tokens: 1 if all agree."""
        return self.tile_tokens * self.union_blocks / max(1, self.chosen_blocks)


class CudaPrefill:
    """The two prefill operations, bound to one built library."""

    def __init__(self, library: PrefillLibrary, policy: AttendPolicy | None = None) -> None:
        self.library = library
        self.policy = policy or AttendPolicy()
        # int64 [2, 2]: tiles of 4 and of 8 tokens; summed on the device by every run
        self._totals = torch.zeros(2, 2, dtype=torch.int64, device="cuda")

    def overlap(self) -> tuple[Overlap, Overlap]:
        """Counters of all runs so far, for tiles of 4 and of 8 tokens. Waits for the device."""
        four, eight = self._totals.tolist()
        return Overlap(four[0], four[1], 4), Overlap(eight[0], eight[1], 8)

    def choose_blocks(
        self,
        index_q_TGD: Tensor,
        index_k_PBD: Tensor,
        rows: PagedRows,
        num_blocks: int,
        num_local_blocks: int,
    ) -> Tensor:
        """See `interface.ChooseBlocks`; bf16, 128 x 128 pages, at least one local block.

        Raises:
            UnsupportedShapeError: a shape, dtype or stride outside the limits above.
        """
        _check_choice(index_q_TGD, index_k_PBD, num_blocks, num_local_blocks)
        num_tokens, groups, _ = index_q_TGD.shape
        device = index_q_TGD.device
        chosen_GTK = torch.empty(groups, num_tokens, num_blocks, dtype=torch.int32, device=device)
        if num_tokens == 0:
            return chosen_GTK
        num_sequences = rows.seq_lens_S.shape[0]
        num_tiles = -(-num_tokens * groups // SCORE_TILE_ROWS) + num_sequences
        workers = self.library.num_processors
        integers = torch.empty(
            4 * num_tiles + num_sequences + 2 + num_tiles + 1, dtype=torch.int32, device=device
        )
        lists = torch.empty(
            num_tiles + workers, SCORE_TILE_ROWS, MAX_CHOSEN, dtype=torch.int64, device=device
        )
        arguments = ScoreArguments(
            index_q=index_q_TGD.data_ptr(),
            tiles=integers.data_ptr(),
            sequence_tiles=integers[4 * num_tiles :].data_ptr(),
            work_start=integers[4 * num_tiles + num_sequences + 2 :].data_ptr(),
            lists=lists.data_ptr(),
            chosen=chosen_GTK.data_ptr(),
            num_tokens=num_tokens,
            num_groups=groups,
            num_tiles=num_tiles,
            num_workers=workers,
            num_blocks=num_blocks,
            num_local=num_local_blocks,
            **_row_fields(rows),
        )
        maps = self.library.encode([(index_k_PBD, (1, BLOCK_TOKENS, 64))])
        self.library.launch("m3_prefill_choose", arguments, maps.address)
        return chosen_GTK

    def block_attention(
        self, q_THD: Tensor, pages: LayerPages, blocks_GTK: Tensor, rows: PagedRows, scale: float
    ) -> Tensor:
        """See `interface.BlockAttention`; bf16, 128 x 128 pages, 16 heads a group.

        Raises:
            UnsupportedShapeError: a shape, dtype or stride outside the limits above.
        """
        _check_attention(q_THD, pages, blocks_GTK)
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        num_tokens = q_THD.shape[0]
        if num_tokens == 0:
            return out_THD
        arm = self.policy.arm
        if arm == Arm.MEASURED and num_tokens < self.policy.min_key_major_rows:
            arm = Arm.UNION
        tile_tokens = self._tile_tokens(num_tokens, blocks_GTK.shape[0])
        arguments, workspace = self._attend_arguments(
            q_THD, out_THD, blocks_GTK, rows, scale, arm, tile_tokens
        )
        if arm != Arm.KEY_MAJOR:
            self.library.launch("m3_prefill_build_unions", arguments)
            maps = self._maps(q_THD, pages, tile_tokens)
            workers = min(self.library.num_processors, arguments.num_tiles * arguments.num_groups)
            self.library.launch("m3_prefill_attend_unions", arguments, maps.address, workers)
        if arm != Arm.UNION:
            self._attend_key_major(q_THD, pages, rows, arguments)
        del workspace
        return out_THD

    def _tile_tokens(self, num_tokens: int, groups: int) -> int:
        """Tiles of 4 when tiles of 8 would leave processors idle."""
        return 4 if num_tokens * groups <= 8 * self.library.num_processors else 8

    def _attend_arguments(
        self,
        q_THD: Tensor,
        out_THD: Tensor,
        blocks_GTK: Tensor,
        rows: PagedRows,
        scale: float,
        arm: Arm,
        tile_tokens: int,
    ) -> tuple[AttendArguments, list[Tensor]]:
        groups, num_tokens, num_blocks = blocks_GTK.shape
        num_tiles = -(-num_tokens // tile_tokens) + rows.seq_lens_S.shape[0]
        device = q_THD.device
        selections = torch.empty(2, dtype=torch.int64, device=device)
        tiles = torch.empty(num_tiles, 4, dtype=torch.int32, device=device)
        sizes = torch.empty(groups, num_tiles, dtype=torch.int32, device=device)
        unions = torch.empty(
            groups, num_tiles, tile_tokens * MAX_CHOSEN, 2, dtype=torch.int32, device=device
        )
        arguments = AttendArguments(
            out=out_THD.data_ptr(),
            blocks=blocks_GTK.data_ptr(),
            selections=selections.data_ptr(),
            totals=self._totals[0 if tile_tokens == 4 else 1].data_ptr(),
            tiles=tiles.data_ptr(),
            union_sizes=sizes.data_ptr(),
            unions=unions.data_ptr(),
            scale=scale,
            num_tokens=num_tokens,
            num_heads=q_THD.shape[1],
            num_groups=groups,
            num_tiles=num_tiles,
            num_blocks=num_blocks,
            tile_tokens=tile_tokens,
            arm=int(arm),
            load_limit=round(16 * self.policy.load_limit),
            **_row_fields(rows),
        )
        return arguments, [selections, tiles, sizes, unions]

    def _maps(self, q_THD: Tensor, pages: LayerPages, rows_of_box: int) -> TensorMaps:
        page_box = (1, 1, BLOCK_TOKENS, 64)
        return self.library.encode(
            [
                (q_THD, (rows_of_box, HEADS_PER_GROUP, 64)),
                (pages.k_PGBD, page_box),
                (pages.v_PGBD, page_box),
            ]
        )

    def _attend_key_major(
        self, q_THD: Tensor, pages: LayerPages, rows: PagedRows, base: AttendArguments
    ) -> None:
        num_tokens, heads, dim = q_THD.shape
        groups, device = base.num_groups, q_THD.device
        num_sequences = base.num_sequences
        slab = min(num_tokens, self.policy.slab_rows)
        max_blocks = max(1, -(-rows.max_seq_len // BLOCK_TOKENS))
        num_chunks = -(-slab // CHUNK_ROWS) + num_sequences + 1
        slices = groups * num_sequences * -(-max_blocks // SLICE_BUCKETS)
        buckets = groups * num_sequences * max_blocks
        num_edges = slab * groups * MAX_CHOSEN
        most_pieces = min(num_edges, num_edges // PIECE_TOKENS + buckets)
        integer = {"dtype": torch.int32, "device": device}
        counts = torch.empty(num_chunks * groups * max_blocks, **integer)
        bucket_records = torch.empty(buckets, 4, **integer)
        slice_records = torch.empty(slices + 1, 2, **integer)
        edges = torch.empty(num_edges, **integer)
        pieces = torch.empty(most_pieces, PIECE_BYTES // 4, **integer)
        partial = torch.empty(slab, MAX_CHOSEN, heads, dim, dtype=q_THD.dtype, device=device)
        partial_lse = torch.empty(slab, MAX_CHOSEN, heads, dtype=torch.float32, device=device)
        maps = self._maps(q_THD, pages, 1)
        for first in range(0, num_tokens, slab):
            arguments = InvertArguments(
                base=base,
                counts=counts.data_ptr(),
                buckets=bucket_records.data_ptr(),
                slices=slice_records.data_ptr(),
                edges=edges.data_ptr(),
                pieces=pieces.data_ptr(),
                partial=partial.data_ptr(),
                partial_lse=partial_lse.data_ptr(),
                first_token=first,
                num_tokens=min(slab, num_tokens - first),
                max_blocks=max_blocks,
                num_chunks=num_chunks,
                num_slices=slices,
            )
            self.library.launch("m3_prefill_invert", arguments)
            self.library.launch(
                "m3_prefill_attend_key_major",
                arguments,
                maps.address,
                self.library.num_processors,
            )


def _row_fields(rows: PagedRows) -> dict[str, int]:
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


def _check_choice(
    index_q_TGD: Tensor, index_k_PBD: Tensor, num_blocks: int, num_local_blocks: int
) -> None:
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


def _check_attention(q_THD: Tensor, pages: LayerPages, blocks_GTK: Tensor) -> None:
    groups, num_tokens, num_blocks = blocks_GTK.shape
    k_PGBD, v_PGBD = pages.k_PGBD, pages.v_PGBD
    if {q_THD.dtype, k_PGBD.dtype, v_PGBD.dtype} != {torch.bfloat16}:
        raise UnsupportedShapeError(f"bf16 only, not {q_THD.dtype} and {k_PGBD.dtype}")
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
