"""Block choice and block attention for prefill chunks, by the sm_90a kernels."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn import functional

from m3stack.kernels.interface import LayerPages, PagedRows
from m3stack.kernels.msa.decode.fp8_pages import Fp8Pages
from m3stack.kernels.msa.prefill.cuda_library import (
    AttendArguments,
    InvertArguments,
    PrefillLibrary,
    ScoreArguments,
    TensorMaps,
)
from m3stack.kernels.msa.prefill.limits import (
    BLOCK_TOKENS,
    HEAD_DIM,
    HEADS_PER_GROUP,
    MAX_CHOSEN,
    SCORE_TILE_ROWS,
    check_attention,
    check_choice,
    row_fields,
)

CHUNK_ROWS = 128
PIECE_TOKENS = 64
SLICE_BUCKETS = 1024
PIECE_WORDS = 8
COUNTERS = 8


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
        load_limit: the union arm is taken while it loads at most this many blocks for each block
            that a row chose; 1 over the tile size is the least there can be.
        tile_tokens: rows of a tile, 4 or 8; by the size of the step where None.
        min_key_major_rows: smaller steps always take the union arm: they fill too few rows a block.
        slab_rows: rows the key-major arm treats at once; its partials need 256 KiB for each row
            of 64 heads.
    """

    arm: Arm = Arm.MEASURED
    load_limit: float = 0.34
    tile_tokens: int | None = None
    min_key_major_rows: int = 1024
    slab_rows: int = 8192


@dataclass(frozen=True, slots=True)
class Overlap:
    """How far neighbouring rows agreed: sums over all tiles since the counters were made."""

    union_blocks: int
    chosen_blocks: int

    @property
    def loads(self) -> float:
        """Blocks loaded for each block that a row chose: 1 where no neighbours agree."""
        return self.union_blocks / max(1, self.chosen_blocks)


@dataclass(frozen=True, slots=True)
class UnionLists:
    """Tiles of rows and the union of each tile's blocks.

    Attributes:
        selections_C2: int64 [8, 2], union sizes and chosen blocks; their sums count.
        tiles_N4: int32 [N, 4]: first row, rows, its position, sequence length.
        sizes_GN: int32 [G, N].
        unions_GNE2: int32 [G, N, E, 2]: page, and block with a bit a row from bit 24 up.
    """

    selections_C2: Tensor
    tiles_N4: Tensor
    sizes_GN: Tensor
    unions_GNE2: Tensor


@dataclass(frozen=True, slots=True)
class KeyMajorLists:
    """Rows by the block they chose, and what the attention leaves for each of them.

    Attributes:
        counts: int32 [chunks, G, J], then their prefix over the chunks of a sequence.
        buckets: int32 [G * S * J, 4]: first edge and piece inside the slice, edges, 0.
        slices: int32 [slices + 1, 2]: first edge and piece; all of them last.
        edges: int32, row * 16 + slot, ascending inside a bucket.
        pieces: int32 [pieces, 8], work items: see `m3::KeyPiece`.
        partial_TKHD, partial_lse_TKH: normalised sums and base-2 log-sums of a row's slots.
    """

    counts: Tensor
    buckets: Tensor
    slices: Tensor
    edges: Tensor
    pieces: Tensor
    partial_TKHD: Tensor
    partial_lse_TKH: Tensor


@dataclass(frozen=True, slots=True)
class ScoredTiles:
    """What scoring leaves: the arguments for the kernels that merge it, and what they point to."""

    arguments: ScoreArguments
    integers: Tensor
    lists: Tensor


class CudaPrefill:
    """The two prefill operations, bound to one built library."""

    def __init__(
        self,
        library: PrefillLibrary,
        policy: AttendPolicy | None = None,
        *,
        device: torch.device | str = "cuda",
    ) -> None:
        self.library = library
        self.policy = policy or AttendPolicy()
        # summed on the device by every run
        self._totals_2 = torch.zeros(2, dtype=torch.int64, device=device)

    def overlap(self) -> Overlap:
        """Counters of all runs of the union lists so far. Waits for the device."""
        return Overlap(*self._totals_2.tolist())

    @staticmethod
    def serves(q_THD: Tensor, pages: LayerPages, num_blocks: int, num_local_blocks: int) -> bool:
        """Whether dtype and sizes are those the kernels are written for."""
        _, groups, block, dim = pages.k_PGBD.shape
        return (
            q_THD.dtype == pages.k_PGBD.dtype == torch.bfloat16
            and (block, dim) == (BLOCK_TOKENS, HEAD_DIM)
            and q_THD.shape[1] == groups * HEADS_PER_GROUP
            and 1 <= num_local_blocks <= num_blocks <= MAX_CHOSEN
        )

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
        check_choice(index_q_TGD, index_k_PBD, num_blocks, num_local_blocks)
        num_tokens, groups, _ = index_q_TGD.shape
        chosen_GTK = torch.empty(
            groups, num_tokens, num_blocks, dtype=torch.int32, device=index_q_TGD.device
        )
        if num_tokens == 0:
            return chosen_GTK
        scored = self.score(index_q_TGD, index_k_PBD, rows, num_blocks, num_local_blocks)
        scored.arguments.chosen = chosen_GTK.data_ptr()
        self.library.launch("m3_prefill_rank", scored.arguments)
        return chosen_GTK

    def score(
        self,
        index_q_TGD: Tensor,
        index_k_PBD: Tensor,
        rows: PagedRows,
        num_blocks: int,
        num_local_blocks: int,
    ) -> ScoredTiles:
        """Scores every block of at least one row; lists of the best are left, not yet merged.

        Raises:
            UnsupportedShapeError: as `choose_blocks`.
        """
        check_choice(index_q_TGD, index_k_PBD, num_blocks, num_local_blocks)
        num_tokens, groups, _ = index_q_TGD.shape
        device = index_q_TGD.device
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
            num_tokens=num_tokens,
            num_groups=groups,
            num_tiles=num_tiles,
            num_workers=workers,
            num_blocks=num_blocks,
            num_local=num_local_blocks,
            **row_fields(rows),
        )
        maps = self.library.encode([(index_k_PBD, (1, BLOCK_TOKENS, 64))])
        self.library.launch("m3_prefill_plan", arguments)
        self.library.launch("m3_prefill_score", arguments, maps.address)
        return ScoredTiles(arguments, integers, lists)

    def block_attention(
        self, q_THD: Tensor, pages: LayerPages, blocks_GTK: Tensor, rows: PagedRows, scale: float
    ) -> Tensor:
        """See `interface.BlockAttention`; bf16, 128 x 128 pages, at most 16 heads a group.

        Fewer heads, as ranks have that share a group, are filled up to 16.

        Raises:
            UnsupportedShapeError: a shape, dtype or stride outside the limits above.
        """
        groups, heads = blocks_GTK.shape[0], q_THD.shape[1]
        if _has_idle_heads(groups, heads):
            full_THD = _with_idle_heads(q_THD, groups)
            out_THD = self.block_attention(full_THD, pages, blocks_GTK, rows, scale)
            return _without_idle_heads(out_THD, groups, heads)
        check_attention(q_THD, pages, blocks_GTK)
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        num_tokens = q_THD.shape[0]
        if num_tokens == 0:
            return out_THD
        arm = self.policy.arm
        if arm == Arm.MEASURED and num_tokens < self.policy.min_key_major_rows:
            arm = Arm.UNION
        arguments = self._arguments(blocks_GTK, rows, arm)
        arguments.out, arguments.scale = out_THD.data_ptr(), scale
        if arm != Arm.KEY_MAJOR:
            unions = self._list_unions(arguments, q_THD.device)
            maps = self._maps(q_THD, pages, arguments.tile_tokens)
            workers = min(self.library.num_processors, unions.sizes_GN.numel())
            self.library.launch("m3_prefill_attend_unions", arguments, maps.address, workers)
        if arm != Arm.UNION:
            self._attend_key_major(q_THD, pages, rows, arguments)
        return out_THD

    def block_attention_fp8(
        self, q_THD: Tensor, pages: Fp8Pages, blocks_GTK: Tensor, rows: PagedRows, scale: float
    ) -> Tensor:
        """The same over e4m3 pages, widened as they load, by query tiles whatever their overlap.

        Products are of f16, which holds e4m3 exactly and queries up to 65,504.

        Raises:
            UnsupportedShapeError: a shape, dtype or stride outside the limits above.
        """
        groups, heads = blocks_GTK.shape[0], q_THD.shape[1]
        if _has_idle_heads(groups, heads):
            full_THD = _with_idle_heads(q_THD, groups)
            out_THD = self.block_attention_fp8(full_THD, pages, blocks_GTK, rows, scale)
            return _without_idle_heads(out_THD, groups, heads)
        check_attention(q_THD, pages, blocks_GTK)
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        if len(q_THD) == 0:
            return out_THD
        arguments = self._arguments(blocks_GTK, rows, Arm.UNION)
        arguments.out, arguments.scale = out_THD.data_ptr(), scale
        unions = self._list_unions(arguments, q_THD.device)
        page_box = (1, 1, BLOCK_TOKENS, HEAD_DIM)
        maps = self.library.encode(
            [
                (q_THD, (arguments.tile_tokens, HEADS_PER_GROUP, 64)),
                (pages.k_PGBD, page_box),
                (pages.v_PGBD, page_box),
            ]
        )
        scales = [
            None if scale_PG is None else scale_PG.data_ptr()
            for scale_PG in (pages.k_scale_PG, pages.v_scale_PG)
        ]
        workers = min(self.library.num_processors, unions.sizes_GN.numel())
        self.library.launch(
            "m3_prefill_attend_coded_unions", arguments, maps.address, *scales, workers
        )
        return out_THD

    def list_unions(self, blocks_GTK: Tensor, rows: PagedRows) -> UnionLists:
        """The lists of the union arm, for a look at what rows agree on."""
        return self._list_unions(self._arguments(blocks_GTK, rows, Arm.MEASURED), blocks_GTK.device)

    def invert(self, blocks_GTK: Tensor, rows: PagedRows) -> KeyMajorLists:
        """The lists of the key-major arm over all rows; the partials are not computed."""
        arguments = self._arguments(blocks_GTK, rows, Arm.KEY_MAJOR)
        _, num_tokens, _ = blocks_GTK.shape
        lists = _key_major_lists(arguments, num_tokens, rows.max_seq_len, blocks_GTK.device)
        self.library.launch("m3_prefill_invert", _invert_arguments(arguments, lists, 0, num_tokens))
        return lists

    def _tile_tokens(self, num_tokens: int, groups: int) -> int:
        """Small tiles when large ones would leave processors idle."""
        if self.policy.tile_tokens is not None:
            return self.policy.tile_tokens
        return 4 if num_tokens * groups <= 8 * self.library.num_processors else 8

    def _arguments(self, blocks_GTK: Tensor, rows: PagedRows, arm: Arm) -> AttendArguments:
        groups, num_tokens, num_blocks = blocks_GTK.shape
        tile_tokens = self._tile_tokens(num_tokens, groups)
        return AttendArguments(
            blocks=blocks_GTK.data_ptr(),
            totals=self._totals_2.data_ptr(),
            num_tokens=num_tokens,
            num_heads=groups * HEADS_PER_GROUP,
            num_groups=groups,
            num_tiles=-(-num_tokens // tile_tokens) + rows.seq_lens_S.shape[0],
            num_blocks=num_blocks,
            tile_tokens=tile_tokens,
            arm=int(arm),
            load_limit=round(1024 * self.policy.load_limit),
            **row_fields(rows),
        )

    def _list_unions(self, arguments: AttendArguments, device: torch.device) -> UnionLists:
        groups, num_tiles = arguments.num_groups, arguments.num_tiles
        entries = arguments.tile_tokens * MAX_CHOSEN
        integer = {"dtype": torch.int32, "device": device}
        lists = UnionLists(
            selections_C2=torch.empty(COUNTERS, 2, dtype=torch.int64, device=device),
            tiles_N4=torch.empty(num_tiles, 4, **integer),
            sizes_GN=torch.empty(groups, num_tiles, **integer),
            unions_GNE2=torch.empty(groups, num_tiles, entries, 2, **integer),
        )
        arguments.selections = lists.selections_C2.data_ptr()
        arguments.tiles = lists.tiles_N4.data_ptr()
        arguments.union_sizes = lists.sizes_GN.data_ptr()
        arguments.unions = lists.unions_GNE2.data_ptr()
        self.library.launch("m3_prefill_build_unions", arguments)
        return lists

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
        num_tokens = q_THD.shape[0]
        slab = min(num_tokens, self.policy.slab_rows)
        lists = _key_major_lists(base, slab, rows.max_seq_len, q_THD.device)
        maps = self._maps(q_THD, pages, 1)
        workers = self.library.num_processors
        for first in range(0, num_tokens, slab):
            count = min(slab, num_tokens - first)
            arguments = _invert_arguments(base, lists, first, count)
            self.library.launch("m3_prefill_invert", arguments)
            self.library.launch("m3_prefill_attend_key_major", arguments, maps.address, workers)


def _has_idle_heads(groups: int, heads: int) -> bool:
    return 0 < heads < groups * HEADS_PER_GROUP and heads % groups == 0


def _with_idle_heads(q_THD: Tensor, groups: int) -> Tensor:
    """Queries of 16 heads a group, those that are not there zero."""
    by_group = q_THD.unflatten(1, (groups, -1))
    missing = HEADS_PER_GROUP - by_group.shape[2]
    return functional.pad(by_group, (0, 0, 0, missing)).flatten(1, 2)


def _without_idle_heads(out_THD: Tensor, groups: int, heads: int) -> Tensor:
    by_group = out_THD.unflatten(1, (groups, HEADS_PER_GROUP))
    return by_group[:, :, : heads // groups].flatten(1, 2)


def _key_major_lists(
    base: AttendArguments, slab: int, max_seq_len: int, device: torch.device
) -> KeyMajorLists:
    """Room for any selection of `slab` rows."""
    groups, num_sequences = base.num_groups, base.num_sequences
    max_blocks = max(1, -(-max_seq_len // BLOCK_TOKENS))
    num_chunks = -(-slab // CHUNK_ROWS) + num_sequences + 1
    buckets = groups * num_sequences * max_blocks
    num_edges = slab * groups * MAX_CHOSEN
    integer = {"dtype": torch.int32, "device": device}
    return KeyMajorLists(
        counts=torch.empty(num_chunks, groups, max_blocks, **integer),
        buckets=torch.empty(buckets, 4, **integer),
        slices=torch.empty(
            groups * num_sequences * -(-max_blocks // SLICE_BUCKETS) + 1, 2, **integer
        ),
        edges=torch.empty(num_edges, **integer),
        pieces=torch.empty(
            min(num_edges, num_edges // PIECE_TOKENS + buckets), PIECE_WORDS, **integer
        ),
        partial_TKHD=torch.empty(
            slab, MAX_CHOSEN, base.num_heads, HEAD_DIM, dtype=torch.bfloat16, device=device
        ),
        partial_lse_TKH=torch.empty(
            slab, MAX_CHOSEN, base.num_heads, dtype=torch.float32, device=device
        ),
    )


def _invert_arguments(
    base: AttendArguments, lists: KeyMajorLists, first: int, count: int
) -> InvertArguments:
    return InvertArguments(
        base=base,
        counts=lists.counts.data_ptr(),
        buckets=lists.buckets.data_ptr(),
        slices=lists.slices.data_ptr(),
        edges=lists.edges.data_ptr(),
        pieces=lists.pieces.data_ptr(),
        partial=lists.partial_TKHD.data_ptr(),
        partial_lse=lists.partial_lse_TKH.data_ptr(),
        first_token=first,
        num_tokens=count,
        max_blocks=lists.counts.shape[2],
        num_chunks=lists.counts.shape[0],
        num_slices=lists.slices.shape[0] - 1,
    )
