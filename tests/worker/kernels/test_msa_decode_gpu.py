"""The MSA decode kernels on a GPU against the plain reference: ragged, tied, poisoned, replayed."""

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
    written_slots,
)
from m3stack.bench.kernels.harness import require_close, require_equal
from m3stack.bench.kernels.selection_check import check_selection
from m3stack.kernels.interface import NO_BLOCK, LayerPages
from m3stack.kernels.msa import reference
from m3stack.kernels.msa.decode import two_stage, with_cuda
from m3stack.kernels.msa.decode.cuda_library import DecodeLibrary
from m3stack.kernels.msa.decode.fp8_pages import Fp8Pages, quantise_pages
from m3stack.kernels.msa.decode.two_stage import choose_blocks_two_stage
from m3stack.kernels.msa.decode.with_cuda import (
    AttentionPlan,
    CudaDecode,
    Merge,
    UnsupportedShapeError,
)
from m3stack.kernels.msa.index_copy import IndexCopy, copy_index_keys

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

CHOSEN, LOCAL = 16, 1
SCALE = 128**-0.5
# bf16 weights and outputs against an fp64 softmax: 2^-9 rounding of each, seen 2 to 3e-3
ATTENTION_LIMIT = 6e-3

EDGE_LENGTHS = (1, 127, 128, 129, 2047, 2048, 2049, 16 * 128 - 1, 16 * 128 + 1, 0, 5000, 40_001)


@pytest.fixture(scope="module")
def decode() -> CudaDecode:
    return CudaDecode(DecodeLibrary())


def choose(decode: CudaDecode, batch: MsaBatch, chosen: int = CHOSEN, local: int = LOCAL):
    assert batch.pages.index_k_PBD is not None
    return decode.choose_blocks(
        batch.index_q_TGD, batch.pages.index_k_PBD, batch.rows, chosen, local
    )


def attend(decode: CudaDecode, batch: MsaBatch, blocks_GTK: torch.Tensor) -> torch.Tensor:
    return decode.block_attention(batch.q_THD, batch.pages, blocks_GTK, batch.rows, SCALE)


def exact_attention(batch: MsaBatch, blocks_GTK: torch.Tensor) -> torch.Tensor:
    return reference.block_attention(
        batch.q_THD.float(), batch.pages, blocks_GTK, batch.rows, SCALE
    )


def with_small_integers(batch: MsaBatch) -> MsaBatch:
    """Products of small integers sum exactly in any order, so lists must agree, ties included."""
    index_k = batch.pages.index_k_PBD
    assert index_k is not None
    index_k.copy_(torch.randint(-2, 3, index_k.shape, device="cuda").to(index_k.dtype))
    index_q = torch.randint(-1, 2, batch.index_q_TGD.shape, device="cuda")
    poison_unwritten(batch.pages, batch.rows)
    return dataclasses.replace(batch, index_q_TGD=index_q.to(torch.bfloat16))


def reference_choice(batch: MsaBatch, chosen: int = CHOSEN, local: int = LOCAL):
    assert batch.pages.index_k_PBD is not None
    return reference.choose_blocks(
        batch.index_q_TGD, batch.pages.index_k_PBD, batch.rows, chosen, local
    )


SHAPES = {
    "edges": BatchShape(seq_lens=EDGE_LENGTHS),
    "edges_one_group": BatchShape(seq_lens=EDGE_LENGTHS, groups=1),
    "edges_two_groups": BatchShape(seq_lens=EDGE_LENGTHS, groups=2, heads_per_group=8),
    "drafts": BatchShape(
        seq_lens=(5000, 129, 2049, 8, 0, 2176, 131, 30_000), num_rows=(8, 3, 2, 8, 1, 5, 7, 1)
    ),
    "padded_rows": BatchShape(seq_lens=(3000, 0, 0, 0), max_seq_len=9000),
    "all_empty": BatchShape(seq_lens=(0, 0), max_seq_len=4096),
    "shared_prefix": BatchShape(
        seq_lens=(9000, 8200, 8193, 12_000, 64 * 128), shared_pages=64, num_rows=(1, 2, 1, 4, 1)
    ),
    "wide_batch": BatchShape(seq_lens=tuple(range(1, 4000, 21))),
    "one_long": BatchShape(seq_lens=(300_001,)),
    "long_and_short": BatchShape(seq_lens=(140_000, *([700] * 30))),
}


@pytest.mark.parametrize("name", SHAPES)
def test_chosen_blocks_reach_the_cut_of_the_exact_scores(decode, name):
    batch = make_batch(SHAPES[name], device="cuda", seed=11)
    blocks_GTK = choose(decode, batch)
    assert batch.pages.index_k_PBD is not None
    check_selection(blocks_GTK, batch.index_q_TGD, batch.pages.index_k_PBD, batch.rows, LOCAL)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("chosen", "local"), [(16, 1), (16, 3), (5, 0), (1, 1), (32, 2)])
def test_ties_of_exact_sums_fall_to_the_lower_block(decode, name, chosen, local):
    batch = with_small_integers(make_batch(SHAPES[name], device="cuda", seed=12))
    actual = choose(decode, batch, chosen, local)
    require_equal(actual, reference_choice(batch, chosen, local), what=name)


def test_equal_keys_choose_the_first_blocks_and_the_local_one(decode):
    for length in (3000, 1_048_576):  # the second overflows the candidate list
        batch = make_batch(BatchShape(seq_lens=(length,)), device="cuda")
        batch.pages.index_k_PBD.fill_(1.0)
        expected = [*range(15), (length - 1) // BLOCK_TOKENS]
        assert choose(decode, batch).tolist() == [[expected]] * 4


def test_nan_loses_infinity_wins_and_zero_has_no_sign(decode):
    batch = with_small_integers(make_batch(BatchShape(seq_lens=(8000,)), device="cuda"))
    index_k, table = batch.pages.index_k_PBD, batch.rows.page_table_SJ[0].long()
    batch.index_q_TGD.fill_(1.0)
    index_k[table[7], 5, 3] = float("nan")
    index_k[table[9], 64] = float("inf")
    index_k[table[11], 127] = float("-inf")
    index_k[table[12]] = -0.0
    index_k[table[13]] = 0.0
    require_equal(choose(decode, batch), reference_choice(batch), what="special values")
    index_k[table[:50]] = -1.0
    index_k[table[10:40]] = 0.0
    index_k[table[20]] = -0.0
    require_equal(choose(decode, batch), reference_choice(batch), what="signed zeros")
    index_k.fill_(float("nan"))
    assert choose(decode, batch).tolist() == [[[*range(15), 62]]] * 4


@pytest.mark.parametrize("name", SHAPES)
def test_attention_over_chosen_blocks_matches_fp64(decode, name):
    batch = make_batch(SHAPES[name], device="cuda", seed=13)
    blocks_GTK = choose(decode, batch)
    actual = attend(decode, batch, blocks_GTK)
    expected = exact_attention(batch, blocks_GTK)
    if bool((expected != 0).any()):
        require_close(actual, expected, limit=ATTENTION_LIMIT, what=name)
    empty_T = reference.row_positions(batch.rows, actual.shape[0], actual.device) < 0
    assert bool((actual[empty_T] == 0).all())


ADVERSARIAL = {
    "first_block_only": [0] + [NO_BLOCK] * 15,
    "same_sixteen": [*range(3, 19)],
    "own_block_only": [NO_BLOCK] * 15 + [31],
    "holes": [2, NO_BLOCK, 5, NO_BLOCK, NO_BLOCK, 9, 31, NO_BLOCK] + [NO_BLOCK] * 8,
    "none": [NO_BLOCK] * 16,
    "after_the_row": [1, 2, 31, 33, 40] + [NO_BLOCK] * 11,
}


@pytest.mark.parametrize("name", ADVERSARIAL)
@pytest.mark.parametrize("num_seqs", [1, 5, 70])
def test_attention_serves_any_list_of_blocks(decode, name, num_seqs):
    shape = BatchShape(seq_lens=(31 * 128 + 17,) * num_seqs, max_seq_len=6000)
    batch = make_batch(shape, device="cuda", seed=14)
    blocks_K = torch.tensor(ADVERSARIAL[name], dtype=torch.int32, device="cuda")
    blocks_GTK = blocks_K.expand(4, num_seqs, 16).contiguous()
    actual = attend(decode, batch, blocks_GTK)
    # the reference reads the table before it masks: keep blocks after the row out of its sight
    seen_GTK = torch.where(blocks_GTK > 31, NO_BLOCK, blocks_GTK)
    expected = exact_attention(batch, seen_GTK)
    if name == "none":
        assert bool((actual == 0).all())
    else:
        require_close(actual, expected, limit=ATTENTION_LIMIT, what=name)


def test_token_major_pools_are_read_in_place(decode):
    batch = make_batch(BatchShape(seq_lens=(5000, 333)), device="cuda", seed=15)

    def token_major(pool):
        return pool.transpose(1, 2).contiguous().transpose(1, 2)

    pages = LayerPages(
        token_major(batch.pages.k_PGBD),
        token_major(batch.pages.v_PGBD),
        batch.pages.index_k_PBD,
    )
    blocks_GTK = choose(decode, batch)
    expected = attend(decode, batch, blocks_GTK)
    actual = attend(decode, dataclasses.replace(batch, pages=pages), blocks_GTK)
    require_equal(actual, expected, what="token-major pool")


def test_results_are_the_same_bit_for_bit_every_time(decode):
    batch = make_batch(SHAPES["drafts"], device="cuda", seed=16)
    blocks = [choose(decode, batch) for _ in range(3)]
    outputs = [attend(decode, batch, blocks[0]) for _ in range(3)]
    for other in (1, 2):
        require_equal(blocks[other], blocks[0], what="blocks")
        require_equal(outputs[other], outputs[0], what="output")


def test_the_grid_does_not_change_the_selection(decode):
    batch = make_batch(SHAPES["long_and_short"], device="cuda", seed=17)
    expected = choose(decode, batch)
    processors = decode.library.num_processors
    try:
        for count in (1, 7, 64):
            decode.library.num_processors = count
            require_equal(choose(decode, batch), expected, what=f"{count} processors")
    finally:
        decode.library.num_processors = processors


def test_a_hundred_graph_replays_follow_changing_lengths(decode):
    lengths = (6000, 2049, 130, 20_000)
    shape = BatchShape(seq_lens=lengths, max_seq_len=20_480, num_rows=(1, 2, 1, 3))
    batch = with_small_integers(make_batch(shape, device="cuda", seed=18))
    blocks_GTK = choose(decode, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        blocks_GTK = choose(decode, batch)
        output = attend(decode, batch, blocks_GTK)
    generator = torch.Generator().manual_seed(19)
    for replay in range(100):
        now = [int(torch.randint(0, most + 1, (1,), generator=generator)) for most in lengths]
        now = [max(length, 3) if length else 0 for length in now]
        fresh, _ = make_rows(dataclasses.replace(shape, seq_lens=now), "cuda", seed=replay)
        batch.rows.seq_lens_S.copy_(fresh.seq_lens_S)
        batch.rows.page_table_SJ.copy_(fresh.page_table_SJ)
        index_k = batch.pages.index_k_PBD
        index_k.copy_(torch.randint(-2, 3, index_k.shape, device="cuda").to(index_k.dtype))
        batch.pages.k_PGBD.normal_()
        batch.pages.v_PGBD.normal_()
        poison_unwritten(batch.pages, batch.rows)
        output.fill_(float("nan"))
        blocks_GTK.fill_(12345)
        graph.replay()
        require_equal(blocks_GTK, reference_choice(batch), what=f"replay {replay}, lengths {now}")
        expected = exact_attention(batch, blocks_GTK)
        assert bool(torch.isfinite(output).all())
        if any(now):
            require_close(output, expected, limit=ATTENTION_LIMIT, what=f"replay {replay}")


def test_offsets_past_two_to_the_31_elements_are_reached(decode):
    rows, _ = make_rows(BatchShape(seq_lens=(4000,)), "cuda", seed=20)
    num_pages = (1 << 31) // (BLOCK_TOKENS * 128) + 64
    table_J = torch.arange(num_pages - 32, num_pages, dtype=torch.int32, device="cuda")
    rows.page_table_SJ[0, :32] = table_J
    index_k = torch.full((num_pages, 128, 128), float("nan"), dtype=torch.bfloat16, device="cuda")
    index_k[-32:].normal_()
    index_q = torch.randn(1, 4, 128, dtype=torch.bfloat16, device="cuda")
    blocks_GTK = decode.choose_blocks(index_q, index_k, rows, CHOSEN, LOCAL)
    check_selection(blocks_GTK, index_q, index_k, rows, LOCAL)
    del index_k
    kv = torch.full(
        (num_pages // 4, 4, 128, 128), float("nan"), dtype=torch.bfloat16, device="cuda"
    )
    kv[-32:].normal_()
    rows.page_table_SJ[0, :32] = table_J - table_J[0] + num_pages // 4 - 32
    q = torch.randn(1, 64, 128, dtype=torch.bfloat16, device="cuda")
    pages = LayerPages(kv, kv, None)
    actual = decode.block_attention(q, pages, blocks_GTK, rows, SCALE)
    expected = reference.block_attention(q.float(), pages, blocks_GTK, rows, SCALE)
    require_close(actual, expected, limit=ATTENTION_LIMIT, what="far pages")


def test_shapes_outside_the_limits_are_named(decode):
    batch = make_batch(BatchShape(seq_lens=(500,), num_rows=(9,)), device="cuda")
    with pytest.raises(UnsupportedShapeError, match="query rows x groups at most 32, got 36"):
        choose(decode, batch)
    with pytest.raises(UnsupportedShapeError, match="q must be bf16"):
        decode.block_attention(
            batch.q_THD.float(), batch.pages, torch.zeros(4, 9, 16).int().cuda(), batch.rows, 1.0
        )


def test_two_stages_name_the_batch_that_is_too_wide_for_them(decode):
    batch = make_batch(SHAPES["wide_batch"], device="cuda")
    with pytest.raises(UnsupportedShapeError, match="query rows x index heads at most 256, got 76"):
        two_stages(decode, batch)


def two_stages(decode: CudaDecode, batch: MsaBatch, chosen: int = CHOSEN, local: int = LOCAL):
    index_k = batch.pages.index_k_PBD
    assert index_k is not None
    copy = IndexCopy.of(index_k)
    return choose_blocks_two_stage(
        decode, batch.index_q_TGD, index_k, copy, batch.rows, chosen, local
    )


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "wide_batch"])
@pytest.mark.parametrize(("chosen", "local"), [(16, 1), (5, 0), (1, 1), (32, 2)])
def test_two_stages_choose_what_one_stage_chooses(decode, name, chosen, local):
    batch = make_batch(SHAPES[name], device="cuda", seed=21)
    blocks_GTK, _ = two_stages(decode, batch, chosen, local)
    require_equal(blocks_GTK, choose(decode, batch, chosen, local), what="normal keys")
    batch = with_small_integers(batch)
    blocks_GTK, _ = two_stages(decode, batch, chosen, local)
    require_equal(blocks_GTK, choose(decode, batch, chosen, local), what="ties")


def adversarial_keys(kind: str, index_k: torch.Tensor) -> None:
    generator = torch.Generator(device="cuda").manual_seed(22)
    normal = torch.randn(index_k.shape, generator=generator, device="cuda")
    if kind == "equal":
        index_k.fill_(1.0)
    elif kind == "zero":
        index_k.zero_()
    elif kind == "one_more_in_each_block":  # two tokens of a block within the bound of each other
        index_k.copy_(normal)
        index_k[:, 77] = index_k[:, 5]
        index_k[:, 90] = index_k[:, 5] * (1 + 2.0**-8)
    elif kind == "outlier_channels":
        normal[..., :4] *= 64.0
        index_k.copy_(normal)
    elif kind == "near_ties":  # all blocks within the bound of one another
        index_k.copy_(1.0 + normal * 2.0**-8)
    elif kind == "tiny":
        index_k.copy_(normal * 1e-30)
    elif kind == "huge":
        index_k.copy_(normal * 1e25)
    elif kind == "mixed_sizes":
        size = 10.0 ** torch.randint(-12, 13, index_k.shape[:2], device="cuda")
        index_k.copy_(normal * size[..., None])
    elif kind == "nan_and_infinity":
        index_k.copy_(normal)
        index_k[::7, 3, 5] = float("nan")
        index_k[::5, 9, 1] = float("inf")
        index_k[::3, 11, 2] = float("-inf")


@pytest.mark.parametrize(
    ("kind", "most_rescored"),
    [
        ("normal", 0.10),
        ("equal", 1.0),
        ("zero", 1.0),
        ("one_more_in_each_block", 1.0),
        ("outlier_channels", 1.0),
        ("near_ties", 1.0),
        ("tiny", 1.0),
        ("huge", 1.0),
        ("mixed_sizes", 1.0),
        ("nan_and_infinity", 1.0),
    ],
)
def test_two_stages_fall_back_visibly_on_adversarial_keys(decode, kind, most_rescored):
    shape = BatchShape(seq_lens=(120_001, 60_000), num_rows=(1, 3))
    batch = make_batch(shape, device="cuda", seed=23, poison=False)
    adversarial_keys(kind, batch.pages.index_k_PBD)
    poison_unwritten(batch.pages, batch.rows)
    expected = choose(decode, batch)
    blocks_GTK, rescored_TG = two_stages(decode, batch)
    require_equal(blocks_GTK, expected, what=kind)
    share = rescored_TG[0].float().mean().item() / (120_001 // 128)
    assert share <= most_rescored
    if kind in ("equal", "zero", "huge"):
        assert share > 0.99


@pytest.mark.parametrize("kind", ["equal", "huge", "near_ties", "normal"])
def test_two_stages_agree_where_the_list_of_candidates_overflows(decode, kind):
    shape = BatchShape(seq_lens=(400_000, 200_100), num_rows=(2, 1))
    batch = make_batch(shape, device="cuda", seed=26, poison=False)
    adversarial_keys(kind, batch.pages.index_k_PBD)
    poison_unwritten(batch.pages, batch.rows)
    expected = choose(decode, batch)
    for _ in range(3):
        blocks_GTK, rescored_TG = two_stages(decode, batch)
        require_equal(blocks_GTK, expected, what=kind)
    if kind in ("equal", "huge"):
        assert rescored_TG[0].tolist() == [400_000 // 128 - 1] * 4


def test_two_stages_give_the_same_for_any_number_of_blocks_a_line(decode, monkeypatch):
    batch = make_batch(SHAPES["drafts"], device="cuda", seed=27)
    expected = choose(decode, batch)
    for splits in (1, 2, 4, 8, 16):
        monkeypatch.setattr(two_stage, "settle_splits", lambda *_, count=splits: count)
        blocks_GTK, _ = two_stages(decode, batch)
        require_equal(blocks_GTK, expected, what=f"{splits} blocks a line")


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("splits", [2, 4, 8, 16])
def test_a_block_for_each_chosen_block_gives_the_same_attention(decode, monkeypatch, name, splits):
    plan = AttentionPlan(1, splits, Merge.BLOCKS)
    monkeypatch.setattr(with_cuda, "attention_plan", lambda *_, **__: plan)
    batch = make_batch(SHAPES[name], device="cuda", seed=28)
    blocks_GTK = choose(decode, batch, splits)
    actual = attend(decode, batch, blocks_GTK)
    expected = exact_attention(batch, blocks_GTK)
    if bool((expected != 0).any()):
        require_close(actual, expected, limit=ATTENTION_LIMIT, what=name)
    assert bool(torch.isfinite(actual).all())


def test_bounds_of_the_copy_hold_in_fp64():
    keys = torch.randn(4096, 128, device="cuda")
    keys *= 10.0 ** torch.randint(-8, 9, (4096, 1), device="cuda")
    keys = keys.to(torch.bfloat16)
    copy, meta = copy_index_keys(keys)
    scale = ((meta & 0xFFFF) << 16).view(torch.float32).double()
    bound = (meta & ~0xFFFF).view(torch.float32).double()
    residual = (keys.double() - copy.double() * scale[:, None]).norm(dim=-1)
    assert bool((residual + 2.0**-11 * keys.double().norm(dim=-1) <= bound).all())
    assert bool((bound < 0.012 * keys.double().norm(dim=-1) + 1e-14).all())


@pytest.mark.parametrize("name", SHAPES)
def test_fp8_attention_matches_its_dequantised_pages(decode, name):
    batch = make_batch(SHAPES[name], device="cuda", seed=24, poison=False)
    size = torch.rand(batch.pages.k_PGBD.shape[:2], device="cuda")[..., None, None]
    k, k_scale = quantise_pages(batch.pages.k_PGBD * (0.5 + size))
    v, v_scale = quantise_pages(batch.pages.v_PGBD * (0.01 + 30 * size))
    exact = LayerPages(
        k.float() * k_scale[..., None, None],
        v.float() * v_scale[..., None, None],
        batch.pages.index_k_PBD,
    )
    blocks_GTK = reference_choice(batch)
    expected = exact_attention(dataclasses.replace(batch, pages=exact), blocks_GTK)
    bytes_of = LayerPages(k.view(torch.uint8), v.view(torch.uint8), None)
    unwritten_page, unwritten_slot = unwritten(batch)
    for pool in (bytes_of.k_PGBD, bytes_of.v_PGBD):
        pool[unwritten_page, :, unwritten_slot] = 0x7F  # NaN in e4m3
    pages = Fp8Pages(k, v, k_scale, v_scale)
    actual = decode.block_attention_fp8(batch.q_THD, pages, blocks_GTK, batch.rows, SCALE)
    if bool((expected != 0).any()):
        require_close(actual, expected, limit=ATTENTION_LIMIT, what=name)
    assert bool(torch.isfinite(actual).all())


def unwritten(batch: MsaBatch) -> tuple[torch.Tensor, torch.Tensor]:
    written_PB = written_slots(batch.rows, batch.pages.k_PGBD.shape[0])
    page, slot = (~written_PB).nonzero(as_tuple=True)
    return page.cuda(), slot.cuda()
