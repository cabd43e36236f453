"""The MSA prefill kernels on a GPU against the plain reference: every arm, any list, any shape."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from m3stack.bench.kernels.batches import (
    BLOCK_TOKENS,
    BatchShape,
    MsaBatch,
    make_batch,
    make_rows,
    poison_unwritten,
)
from m3stack.bench.kernels.harness import require_close, require_equal
from m3stack.bench.kernels.prefill_selections import rolling_selection
from m3stack.bench.kernels.selection_check import check_row, exact_scores
from m3stack.kernels.interface import NO_BLOCK, LayerPages
from m3stack.kernels.msa import reference
from m3stack.kernels.msa.prefill import with_triton
from m3stack.kernels.msa.prefill.cuda_library import PrefillLibrary
from m3stack.kernels.msa.prefill.limits import UnsupportedShapeError
from m3stack.kernels.msa.prefill.lists import cut_rows, invert_blocks, load_factor, tile_union
from m3stack.kernels.msa.prefill.with_cuda import Arm, AttendPolicy, CudaPrefill

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

CHOSEN, LOCAL = 16, 1
TILES = (4, 8)
SCALE = 128**-0.5
# bf16 weights and outputs against an fp32 softmax: 2^-9 rounding of each, seen 2 to 3e-3
ATTENTION_LIMIT = 6e-3

SHAPES = {
    "edges": BatchShape(
        seq_lens=(1, 127, 128, 129, 2047, 2048, 2049, 2047, 0, 5000, 4001, 640),
        num_rows=(1, 127, 1, 129, 100, 2048, 3, 2047, 2, 300, 77, 512),
    ),
    "one_group": BatchShape(seq_lens=(3000, 700), num_rows=(901, 700), groups=1),
    "two_groups": BatchShape(seq_lens=(3000, 9000), num_rows=(901, 1300), groups=2),
    "with_decode_rows": BatchShape(
        seq_lens=(9000, 4097, 2500, 0, 129, 6000), num_rows=(700, 1, 1, 1, 2, 1)
    ),
    "short_turn": BatchShape(seq_lens=(64 * 1024 + 128 + 5,), num_rows=(128,)),
    "all_empty": BatchShape(seq_lens=(0, 0), num_rows=(3, 40), max_seq_len=4096),
    "shared_prefix": BatchShape(seq_lens=(9000, 8200, 8193), num_rows=(600, 8, 1), shared_pages=64),
    "many_sequences": BatchShape(
        seq_lens=tuple(range(30, 4030, 40)), num_rows=tuple(1 + n % 23 for n in range(100))
    ),
    # more sequences than a worker plans for itself
    "decode_crowd": BatchShape(seq_lens=(*([700] * 599), 3000), num_rows=(*([1] * 599), 200)),
    "long": BatchShape(seq_lens=(200_123,), num_rows=(2000,)),
}


@pytest.fixture(scope="module")
def library() -> PrefillLibrary:
    return PrefillLibrary()


@pytest.fixture(scope="module")
def prefill(library) -> CudaPrefill:
    return CudaPrefill(library)


def attention_arms(library):
    """Name and function of every attention arm."""
    policies = {
        f"unions of {size}": AttendPolicy(arm=Arm.UNION, tile_tokens=size) for size in TILES
    }
    policies["measured"] = AttendPolicy()
    policies["key-major"] = AttendPolicy(arm=Arm.KEY_MAJOR)
    policies["key-major in slabs"] = AttendPolicy(arm=Arm.KEY_MAJOR, slab_rows=300)
    arms = {
        f"cuda {name}": CudaPrefill(library, policy).block_attention
        for name, policy in policies.items()
    }
    for rows in (1, 4, 8):

        def portable(*arguments, rows=rows):
            return with_triton.block_attention(*arguments, tile_rows=rows)

        arms[f"triton {rows}"] = portable
    return arms


def choose(prefill: CudaPrefill, batch: MsaBatch, chosen: int = CHOSEN, local: int = LOCAL):
    return prefill.choose_blocks(
        batch.index_q_TGD, batch.pages.index_k_PBD, batch.rows, chosen, local
    )


def reference_choice(batch: MsaBatch, chosen: int = CHOSEN, local: int = LOCAL):
    return reference.choose_blocks(
        batch.index_q_TGD, batch.pages.index_k_PBD, batch.rows, chosen, local
    )


def with_small_integers(batch: MsaBatch, seed: int = 0) -> MsaBatch:
    """Products of small integers sum exactly in any order, so lists must agree, ties included."""
    generator = torch.Generator("cuda").manual_seed(seed)
    index_k = batch.pages.index_k_PBD
    index_k.copy_(torch.randint(-2, 3, index_k.shape, generator=generator, device="cuda"))
    index_q = torch.randint(-1, 2, batch.index_q_TGD.shape, generator=generator, device="cuda")
    poison_unwritten(batch.pages, batch.rows)
    return dataclasses.replace(batch, index_q_TGD=index_q.to(torch.bfloat16))


def check_attention(arms, batch: MsaBatch, blocks_GTK: torch.Tensor, what: str) -> None:
    own_T = reference.row_positions(batch.rows, batch.q_THD.shape[0], blocks_GTK.device) // 128
    seen_GTK = torch.where(blocks_GTK > own_T[None, :, None], NO_BLOCK, blocks_GTK)
    expected = reference.block_attention(
        batch.q_THD.float(), batch.pages, seen_GTK, batch.rows, SCALE
    )
    silent_T = (seen_GTK < 0).all(-1).all(0)
    for name, attend in arms.items():
        actual = attend(batch.q_THD, batch.pages, blocks_GTK, batch.rows, SCALE)
        assert bool(torch.isfinite(actual).all()), f"{what}, {name}: not finite"
        assert bool((actual[silent_T] == 0).all()), f"{what}, {name}: rows without keys"
        if bool((expected != 0).any()):
            require_close(actual, expected, limit=ATTENTION_LIMIT, what=f"{what}, {name}")


@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("name", ["edges", "one_group", "short_turn"])
def test_ranks_that_share_a_group_attend_with_the_heads_they_have(library, name, heads):
    shape = dataclasses.replace(SHAPES[name], heads_per_group=heads)
    batch = make_batch(shape, device="cuda", seed=40)
    for arm in Arm:
        prefill = CudaPrefill(library, AttendPolicy(arm=arm))
        blocks_GTK = choose(prefill, batch)
        inputs = (batch.pages, blocks_GTK, batch.rows, SCALE)
        actual = prefill.block_attention(batch.q_THD, *inputs)
        expected = reference.block_attention(batch.q_THD.float(), *inputs)
        assert actual.shape == expected.shape
        require_close(actual, expected, limit=ATTENTION_LIMIT, what=arm.name)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("chosen", "local"), [(16, 1), (16, 3), (5, 2), (1, 1)])
def test_ties_of_exact_sums_fall_to_the_lower_block(prefill, name, chosen, local):
    batch = with_small_integers(make_batch(SHAPES[name], device="cuda", seed=12))
    expected = reference_choice(batch, chosen, local)
    require_equal(choose(prefill, batch, chosen, local), expected, what=name)


@pytest.mark.parametrize("local", [0, 1])
def test_the_portable_choice_is_the_same(local):
    for name in ("edges", "two_groups", "with_decode_rows", "many_sequences"):
        batch = with_small_integers(make_batch(SHAPES[name], device="cuda", seed=12))
        actual = with_triton.choose_blocks(
            batch.index_q_TGD, batch.pages.index_k_PBD, batch.rows, CHOSEN, local
        )
        require_equal(actual, reference_choice(batch, CHOSEN, local), what=name)


@pytest.mark.parametrize("length", [40_001, 1_048_576])
def test_chosen_blocks_reach_the_cut_of_the_exact_scores(prefill, length):
    rows = 1500
    batch = make_batch(BatchShape(seq_lens=(length,), num_rows=(rows,)), device="cuda", seed=11)
    blocks_GTK = choose(prefill, batch)
    table_J = batch.rows.page_table_SJ[0].long()
    for row in (0, 1, 255, 256, 700, 1023, rows - 1):
        position = length - rows + row
        own = position // BLOCK_TOKENS
        scores_GJ = exact_scores(
            batch.index_q_TGD[row], batch.pages.index_k_PBD, table_J[: own + 1], position
        )
        slack_G = 2.0**-12 * batch.index_q_TGD[row].double().norm(dim=-1) * 16
        check_row(blocks_GTK[:, row], scores_GJ, slack_G, own, LOCAL)


def test_equal_keys_choose_the_first_blocks_and_the_local_one(prefill):
    batch = make_batch(BatchShape(seq_lens=(70_000,), num_rows=(600,)), device="cuda")
    batch.pages.index_k_PBD.fill_(1.0)
    for row in (0, 255, 256, 599):
        expected = [*range(15), (70_000 - 600 + row) // BLOCK_TOKENS]
        assert choose(prefill, batch)[:, row].tolist() == [expected] * 4


def test_nan_loses_infinity_wins_and_zero_has_no_sign(prefill):
    batch = make_batch(BatchShape(seq_lens=(8000,), num_rows=(300,)), device="cuda")
    batch = with_small_integers(batch)
    index_k, table = batch.pages.index_k_PBD, batch.rows.page_table_SJ[0].long()
    batch.index_q_TGD.fill_(1.0)
    index_k[table[7], 5, 3] = float("nan")
    index_k[table[9], 64] = float("inf")
    index_k[table[11], 127] = float("-inf")
    index_k[table[12]] = -0.0
    index_k[table[13]] = 0.0
    require_equal(choose(prefill, batch), reference_choice(batch), what="special values")
    index_k[table[:50]] = -1.0
    index_k[table[10:40]] = 0.0
    index_k[table[20]] = -0.0
    require_equal(choose(prefill, batch), reference_choice(batch), what="signed zeros")
    index_k.fill_(float("nan"))
    assert choose(prefill, batch)[0, -1].tolist() == [*range(15), 62]


def test_the_split_of_the_work_does_not_change_the_selection(library):
    batch = make_batch(BatchShape(seq_lens=(90_000, 3000), num_rows=(700, 900)), device="cuda")
    expected = choose(CudaPrefill(library), batch)
    processors = library.num_processors
    try:
        for count in (1, 7, 64, 131):
            library.num_processors = count
            actual = choose(CudaPrefill(library), batch)
            require_equal(actual, expected, what=f"{count} workers")
    finally:
        library.num_processors = processors


@pytest.mark.parametrize("name", SHAPES)
def test_every_arm_attends_the_blocks_it_chose(library, prefill, name):
    batch = make_batch(SHAPES[name], device="cuda", seed=13)
    blocks_GTK = choose(prefill, batch)
    check_attention(attention_arms(library), batch, blocks_GTK, name)


def adversarial_lists(num_rows: int, own: torch.Tensor) -> dict[str, torch.Tensor]:
    """int32 [rows, 16] lists, some of them nothing a scorer would choose."""
    row = torch.arange(num_rows)[:, None]
    slot = torch.arange(16)
    none = torch.full((num_rows, 16), NO_BLOCK)
    before = int(own.min())
    sink = none.clone()
    sink[:, 0], sink[:, 1] = 0, own
    disjoint = (15 * row + slot) % before
    disjoint[:, 15] = own
    heavy = torch.where(slot == 0, 5, (7 + 11 * row + slot) % before)
    heavy[1:, 1:] = NO_BLOCK
    lists = {
        "sink": sink,
        "same sixteen": (3 + slot).expand(num_rows, -1),
        "disjoint": disjoint,
        "reversed": disjoint.flip(1),
        "alternating": torch.where(row % 2 == 0, slot, 20 + slot),
        "own block only": torch.where(slot == 15, own[:, None], NO_BLOCK),
        "holes": torch.where(slot % 3 == 0, 2 * slot, NO_BLOCK).expand(num_rows, -1),
        "one heavy block": heavy,
        "none": none,
        "every other row none": torch.where(row % 2 == 0, slot, NO_BLOCK),
        "after the row": torch.where(slot < 8, slot, own[:, None] + slot - 8),
    }
    return {name: blocks.to(torch.int32) for name, blocks in lists.items()}


def test_every_arm_serves_any_list_of_blocks(library):
    num_rows, length = 333, 40_000 + 77
    batch = make_batch(
        BatchShape(seq_lens=(length, 129), num_rows=(num_rows, 1), max_seq_len=50_000),
        device="cuda",
        seed=14,
    )
    own = (length - num_rows + torch.arange(num_rows)) // 128
    last = torch.tensor([[0, 1, *[NO_BLOCK] * 14]], dtype=torch.int32)
    for name, blocks in adversarial_lists(num_rows, own).items():
        blocks_GTK = torch.cat([blocks, last]).expand(4, -1, -1).contiguous().cuda()
        check_attention(attention_arms(library), batch, blocks_GTK, name)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("new_blocks", [0, 2, 15])
def test_overlap_is_counted_and_decides_the_arm(library, new_blocks, tile):
    batch = make_batch(BatchShape(seq_lens=(50_000,), num_rows=(2048,)), device="cuda", seed=15)
    blocks_GTK = rolling_selection(batch.rows, 2048, 4, new_blocks, seed=1)
    expected = load_factor(blocks_GTK.cpu(), cpu_rows(batch), tile) / tile
    outputs = {}
    for arm in Arm:
        prefill = CudaPrefill(library, AttendPolicy(arm=arm, tile_tokens=tile))
        for _ in range(2):
            outputs[arm] = prefill.block_attention(
                batch.q_THD, batch.pages, blocks_GTK, batch.rows, SCALE
            )
        if arm != Arm.KEY_MAJOR:
            assert prefill.overlap().chosen_blocks == 2 * blocks_GTK.numel()
            assert prefill.overlap().loads == pytest.approx(expected)
    chosen = Arm.KEY_MAJOR if expected > AttendPolicy().load_limit else Arm.UNION
    require_equal(outputs[Arm.MEASURED], outputs[chosen], what=f"loads {expected:.3f}")


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", ["edges", "two_groups", "many_sequences"])
def test_union_lists_are_those_of_the_definition(library, prefill, name, tile):
    batch = make_batch(SHAPES[name], device="cuda", seed=21)
    blocks_GTK = choose(prefill, batch)
    rows = cpu_rows(batch)
    lists = CudaPrefill(library, AttendPolicy(tile_tokens=tile)).list_unions(blocks_GTK, batch.rows)
    sizes, unions, blocks = lists.sizes_GN.cpu(), lists.unions_GNE2.cpu(), blocks_GTK.cpu()
    tiles = [tuple(row) for row in lists.tiles_N4.tolist()]
    expected_tiles = cut_rows(rows, tile)
    for expected in expected_tiles:
        length = rows.seq_lens_S[expected.sequence].item()
        index = tiles.index((expected.first_row, expected.num_rows, expected.position, length))
        for group in range(blocks.shape[0]):
            union = tile_union(blocks[group], expected)
            found = unions[group, index, : sizes[group, index]]
            words = [word & 0xFFFFFFFF for word in found[:, 1].tolist()]
            assert tuple(word & 0xFFFFFF for word in words) == union.blocks
            assert tuple(word >> 24 for word in words) == union.members
            table = rows.page_table_SJ[expected.sequence]
            assert found[:, 0].tolist() == table[list(union.blocks)].tolist()
    others = [row for row in tiles if row[2] < 0]
    assert len(others) + len(expected_tiles) == len(tiles)


@pytest.mark.parametrize("name", ["edges", "two_groups", "many_sequences", "all_empty"])
def test_the_inversion_is_that_of_the_definition(prefill, name):
    batch = make_batch(SHAPES[name], device="cuda", seed=22)
    blocks_GTK = choose(prefill, batch)
    blocks_GTK[:, ::7, 2:5] = NO_BLOCK
    lists = prefill.invert(blocks_GTK, batch.rows)
    groups, max_blocks = blocks_GTK.shape[0], lists.counts.shape[2]
    expected = invert_blocks(blocks_GTK.cpu(), cpu_rows(batch), max_blocks)
    num_edges, num_pieces = lists.slices[-1].tolist()
    assert num_edges == len(expected.edges_E)
    assert lists.edges[:num_edges].tolist() == expected.edges_E.tolist()
    per_sequence = -(-max_blocks // 1024)
    bucket = torch.arange(len(expected.starts_N1) - 1)
    slice_of = bucket // max_blocks * per_sequence + bucket % max_blocks // 1024
    records, slices = lists.buckets.cpu().long(), lists.slices.cpu().long()
    starts = slices[slice_of, 0] + records[:, 0]
    full = records[:, 2] > 0
    assert torch.equal(records[:, 2], expected.starts_N1.diff())
    assert torch.equal(starts[full], expected.starts_N1[:-1][full])
    # pieces cover every edge once, in order
    pieces = lists.pieces[:num_pieces].cpu().long()
    assert bool((pieces[:, 5] > 0).all())
    assert bool((pieces[:, 5] <= 64).all())
    ends = (pieces[:, 4] + pieces[:, 5]).tolist()
    assert [0, *ends[:-1]] == pieces[:, 4].tolist() or num_pieces == 0
    assert sum(pieces[:, 5].tolist()) == num_edges
    assert set(pieces[:, 1].tolist()) <= set(range(groups))


def cpu_rows(batch: MsaBatch):
    rows = batch.rows
    return dataclasses.replace(
        rows,
        query_start_S1=rows.query_start_S1.cpu(),
        seq_lens_S=rows.seq_lens_S.cpu(),
        page_table_SJ=rows.page_table_SJ.cpu(),
    )


def test_token_major_pools_are_read_in_place(library):
    batch = make_batch(BatchShape(seq_lens=(5000,), num_rows=(400,)), device="cuda", seed=15)
    blocks_GTK = rolling_selection(batch.rows, 400, 4, 2, seed=1)

    def token_major(pool):
        return pool.transpose(1, 2).contiguous().transpose(1, 2)

    k, v = batch.pages.k_PGBD, batch.pages.v_PGBD
    pages = LayerPages(token_major(k), token_major(v), None)
    for name, attend in attention_arms(library).items():
        expected = attend(batch.q_THD, batch.pages, blocks_GTK, batch.rows, SCALE)
        actual = attend(batch.q_THD, pages, blocks_GTK, batch.rows, SCALE)
        require_equal(actual, expected, what=f"token-major pool, {name}")


def test_results_are_the_same_bit_for_bit_every_time(library, prefill):
    batch = make_batch(SHAPES["edges"], device="cuda", seed=16)
    blocks = [choose(prefill, batch) for _ in range(3)]
    for name, attend in attention_arms(library).items():
        outputs = [attend(batch.q_THD, batch.pages, blocks[0], batch.rows, SCALE) for _ in range(3)]
        for other in (1, 2):
            require_equal(blocks[other], blocks[0], what="blocks")
            require_equal(outputs[other], outputs[0], what=name)


def test_a_hundred_graph_replays_follow_changing_lengths(library):
    lengths, num_rows = (6000, 2049, 700, 20_000), (300, 2049, 1, 900)
    shape = BatchShape(seq_lens=lengths, max_seq_len=20_480, num_rows=num_rows)
    batch = with_small_integers(make_batch(shape, device="cuda", seed=18))
    prefill = CudaPrefill(library, AttendPolicy(load_limit=0.25))
    choose(prefill, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        blocks_GTK = choose(prefill, batch)
        output = prefill.block_attention(batch.q_THD, batch.pages, blocks_GTK, batch.rows, SCALE)
    generator = torch.Generator().manual_seed(19)
    for replay in range(100):
        now = [
            int(torch.randint(count, most + 1, (1,), generator=generator))
            for most, count in zip(lengths, num_rows, strict=True)
        ]
        if replay % 5 == 0:
            now[replay // 5 % 4] = 0
        fresh, _ = make_rows(dataclasses.replace(shape, seq_lens=now), "cuda", seed=replay)
        batch.rows.seq_lens_S.copy_(fresh.seq_lens_S)
        batch.rows.page_table_SJ.copy_(fresh.page_table_SJ)
        batch.pages.k_PGBD.normal_()
        batch.pages.v_PGBD.normal_()
        index_k = batch.pages.index_k_PBD
        index_k.copy_(torch.randint(-2, 3, index_k.shape, device="cuda"))
        poison_unwritten(batch.pages, batch.rows)
        output.fill_(float("nan"))
        blocks_GTK.fill_(12345)
        graph.replay()
        require_equal(blocks_GTK, reference_choice(batch), what=f"replay {replay}, lengths {now}")
        assert bool(torch.isfinite(output).all())
        if replay % 10 == 0:
            expected = reference.block_attention(
                batch.q_THD.float(), batch.pages, blocks_GTK, batch.rows, SCALE
            )
            require_close(output, expected, limit=ATTENTION_LIMIT, what=f"replay {replay}")


def test_offsets_past_two_to_the_31_elements_are_reached(library, prefill):
    shape = BatchShape(seq_lens=(4000,), num_rows=(40,))
    rows, _ = make_rows(shape, "cuda", seed=20)
    num_pages = (1 << 31) // (BLOCK_TOKENS * 128) + 64
    table_J = torch.arange(num_pages - 32, num_pages, dtype=torch.int32, device="cuda")
    rows.page_table_SJ[0, :32] = table_J
    index_k = torch.full((num_pages, 128, 128), float("nan"), dtype=torch.bfloat16, device="cuda")
    index_k[-32:] = torch.randint(-2, 3, (32, 128, 128), device="cuda")
    index_q = torch.randint(-1, 2, (40, 4, 128), device="cuda").to(torch.bfloat16)
    blocks_GTK = prefill.choose_blocks(index_q, index_k, rows, CHOSEN, LOCAL)
    expected = reference.choose_blocks(index_q, index_k, rows, CHOSEN, LOCAL)
    require_equal(blocks_GTK, expected, what="far index pages")
    del index_k
    kv = torch.full(
        (num_pages // 4, 4, 128, 128), float("nan"), dtype=torch.bfloat16, device="cuda"
    )
    kv[-32:].normal_()
    rows.page_table_SJ[0, :32] = table_J - table_J[0] + num_pages // 4 - 32
    q = torch.randn(40, 64, 128, dtype=torch.bfloat16, device="cuda")
    batch = MsaBatch(q, index_q, LayerPages(kv, kv, None), rows)
    check_attention(attention_arms(library), batch, blocks_GTK, "far pages")


def test_partials_past_two_to_the_31_elements_are_reached(library):
    # 17,000 rows x 16 slots x 64 heads x 128 dims = 2.2e9 partial values
    num_rows = 17_000
    batch = make_batch(BatchShape(seq_lens=(30_000,), num_rows=(num_rows,)), device="cuda")
    blocks_GTK = rolling_selection(batch.rows, num_rows, 4, 15, seed=3)
    policy = AttendPolicy(arm=Arm.KEY_MAJOR, slab_rows=num_rows)
    key_major = CudaPrefill(library, policy).block_attention
    union = CudaPrefill(library, AttendPolicy(arm=Arm.UNION)).block_attention
    arguments = (batch.q_THD, batch.pages, blocks_GTK, batch.rows, SCALE)
    require_close(key_major(*arguments), union(*arguments), limit=ATTENTION_LIMIT, what="partials")


def test_shapes_outside_the_limits_are_named(prefill):
    batch = make_batch(BatchShape(seq_lens=(500,), num_rows=(9,)), device="cuda")
    with pytest.raises(UnsupportedShapeError, match="local blocks"):
        choose(prefill, batch, 16, 0)
    with pytest.raises(UnsupportedShapeError, match="at most 16"):
        prefill.block_attention(
            batch.q_THD, batch.pages, torch.zeros(4, 9, 32).int().cuda(), batch.rows, 1.0
        )
    with pytest.raises(UnsupportedShapeError, match="bf16 only"):
        prefill.block_attention(
            batch.q_THD.float(), batch.pages, torch.zeros(4, 9, 16).int().cuda(), batch.rows, 1.0
        )
