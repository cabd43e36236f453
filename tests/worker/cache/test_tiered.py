"""Cold pages in host memory change nothing but where keys and values are."""

from __future__ import annotations

import copy
import itertools
import random
from pathlib import Path

import pytest
import torch

from m3stack.cache.pool import PageShape
from m3stack.cache.tiered import (
    PageMoves,
    PageTier,
    TieredPages,
    TieredPool,
    hot_pages_at_least,
    with_tier,
)
from m3stack.checkpoints import builtin_checkpoint
from m3stack.kernels import page_fetch, page_moves
from m3stack.kernels.reference_table import reference_kernels
from m3stack.models.minimax_m3.model import M3Model
from tests.worker.support import PagedRunner, Track, load

TINY = Path(builtin_checkpoint("tiny"))
CPU = torch.device("cpu")
BOTH: tuple[PageMoves, PageMoves] = (page_moves, page_fetch)


def page_value(page: int, part: int) -> float:
    return float(1000 * part + page)


def check_tables(tier: PageTier) -> set[int]:
    """Raises unless pages and slots agree; gives the hot pages."""
    tables = tier.tables
    hot = {page: slot for page, slot in enumerate(tables.slot_of_P.tolist()) if slot >= 0}
    taken = {slot: page for slot, page in enumerate(tables.page_of_N.tolist())}
    assert len(set(hot.values())) == len(hot), "two pages in one slot"
    assert {slot: page for slot, page in taken.items() if page < tier.num_pages} == {
        slot: page for page, slot in hot.items()
    }
    assert not tables.wanted_P.any()
    for page, slot in hot.items():
        for group in range(tables.is_here_NG.shape[1]):
            if tables.is_here_NG[slot, group]:
                for part in range(2):
                    value = page_value(page, part) + group / 4
                    assert (tier.hot[part][slot, group] == value).all()
    return set(hot)


@pytest.mark.parametrize("moves", [page_moves, page_fetch], ids=["plain", "kernels"])
@pytest.mark.parametrize(("num_pages", "share", "seed"), [(4, 1.0, 0), (17, 0.4, 1), (30, 0.8, 2)])
def test_what_is_brought_is_there_and_old_pages_make_room(
    moves: PageMoves, num_pages: int, share: float, seed: int
) -> None:
    rng = random.Random(seed)
    num_hot = max(2, int(num_pages * share))
    tier = PageTier(torch.empty(2, 2, 3), num_pages, num_hot, moves)
    for part, host in enumerate(tier.host):
        for page in range(num_pages):
            for group in range(2):
                host[page, group] = page_value(page, part) + group / 4
    last_use: dict[int, int] = {}
    fetched = asked = 0
    for step in range(8):
        wanted = rng.sample(range(num_pages), rng.randint(0, num_hot))
        choice = [[page for page in wanted if rng.random() < 0.7] for _ in range(2)]
        wanted = sorted({*choice[0], *choice[1]})
        width = max(map(len, choice)) + rng.randint(1, 3)
        padded = [rng.sample([*one, *[num_pages] * (width - len(one))], width) for one in choice]
        before = check_tables(tier)
        tables = tier.tables
        was_here = {
            (page, group)
            for page in before
            for group in range(2)
            if tables.is_here_NG[tables.slot_of_P[page], group]
        }
        tier.bring(torch.tensor(padded, dtype=torch.int32))
        named = {(page, group) for group, pages in enumerate(choice) for page in pages}
        asked += len(named)
        fetched += len(named - was_here)
        last_use |= dict.fromkeys(wanted, step)
        hot = check_tables(tier)
        assert set(wanted) <= hot
        for page, group in named:
            assert tables.is_here_NG[tables.slot_of_P[page], group]
        gone, kept = before - hot, hot & before - set(wanted)
        if gone and kept and moves is page_moves:
            assert max(last_use[page] for page in gone) <= min(last_use[page] for page in kept)
        free = sum(page == num_pages for page in tables.page_of_N.tolist())
        assert not gone or not free, "a page made room while there was some"
    assert tier.counts() == (asked, fetched)


def test_pages_in_steady_use_stay_hot_while_others_pass_by() -> None:
    tier = PageTier(torch.empty(1, 2, 3), 100, 12, page_fetch)
    steady = [3, 50, 7, 99]
    for step in range(16):
        passing = [10 + (3 * step + index) % 39 for index in range(3)]
        tier.bring(torch.tensor([[*steady, *passing]], dtype=torch.int32))
    asked, fetched = tier.counts()
    assert asked == 16 * 7
    assert fetched <= 4 + 16 * 3, "a page in steady use was fetched again"


def tiered_runner(num_hot: int, *, num_pages: int = 64) -> PagedRunner:
    """The tiny model over a pool with few hot pages, everything unwritten being NaN."""
    model = load(TINY, kernels=with_tier(reference_kernels()))
    config = model.config
    shape = PageShape(
        config.sparse_layers,
        config.num_kv_heads,
        config.head_dim,
        config.index_dim,
        config.block_tokens,
        torch.float32,
    )
    pool = TieredPool(shape, num_pages, CPU, num_hot=num_hot)
    for layer in pool.layers:
        if layer.index_k_PBD is not None:
            layer.index_k_PBD.fill_(float("nan"))
        for tensor in (layer.k_PGBD, layer.v_PGBD):
            # but for the slot that is kept at zero
            tensor[:num_hot].fill_(float("nan"))
        if isinstance(layer, TieredPages):
            assert layer.tier is not None
            assert layer.k_PGBD.shape[0] == num_hot + 1
            for host in layer.tier.host:
                host.fill_(float("nan"))
    runner = PagedRunner(model, num_pages=num_pages)
    runner.cache = pool.layers
    return runner


def fewest(model: M3Model) -> int:
    return model.config.num_kv_heads * model.config.topk_blocks


def take_over(tiered: PagedRunner, plain: PagedRunner) -> None:
    """Puts what a plain pool holds into a tiered one, all of it cold."""
    for mine, theirs in zip(tiered.cache, plain.cache, strict=True):
        if not isinstance(mine, TieredPages):
            mine.k_PGBD.copy_(theirs.k_PGBD)
            mine.v_PGBD.copy_(theirs.v_PGBD)
            continue
        assert mine.tier is not None
        assert mine.index_k_PBD is not None
        assert theirs.index_k_PBD is not None
        mine.index_k_PBD.copy_(theirs.index_k_PBD)
        for host, pages in zip(mine.tier.host, (theirs.k_PGBD, theirs.v_PGBD), strict=True):
            host.copy_(pages)


@pytest.mark.parametrize("spare", [0, 40])
def test_logits_are_those_of_a_pool_that_holds_everything(spare: int) -> None:
    plain = PagedRunner(load(TINY), num_pages=64)
    tracks = [Track() for _ in range(9)]
    generator = torch.Generator().manual_seed(2)
    for track in tracks:
        plain.feed(track, torch.randint(300, (130,), generator=generator).tolist())
    tiered = tiered_runner(fewest(plain.model) + spare)
    take_over(tiered, plain)
    tiered._free = list(plain._free)
    copies = copy.deepcopy(tracks)
    # a prompt goes on, then all of them decode
    steps = [
        [(0, list(range(10)))],
        *[[(n, [7 * step + n]) for n in range(9)] for step in range(3)],
    ]
    for step in steps:
        left = plain.step([(tracks[number], tokens) for number, tokens in step])
        right = tiered.step([(copies[number], tokens) for number, tokens in step])
        for one, other in zip(left, right, strict=True):
            assert one.isfinite().all()
            # rows are attended to in groups, and may be summed in another order
            torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
            assert one.argmax(-1).equal(other.argmax(-1))
    for layer in tiered.cache:
        if isinstance(layer, TieredPages):
            assert layer.tier is not None
            asked, missed = layer.tier.counts()
            assert 15 < missed < asked
            if spare == 0:
                assert missed > 20, "nothing was fetched twice"


def test_pages_for_which_there_is_no_slot_are_counted_and_can_come_later() -> None:
    tier = PageTier(torch.empty(1, 2, 3), 20, 4, page_fetch)
    for part, host in enumerate(tier.host):
        for page in range(20):
            host[page] = page_value(page, part)
    tier.bring(torch.tensor([[1, 2, 3, 4, 5, 6]], dtype=torch.int32))
    assert tier.num_left_out() == 2
    assert len(check_tables(tier)) == 4
    tier.bring(torch.tensor([[5, 6, 7]], dtype=torch.int32))
    assert {5, 6, 7} <= check_tables(tier)
    assert tier.num_left_out() == 2
    # all slots but one are in use: a page more than that has no place to go
    tier.bring(torch.tensor([[5, 6, 7, 8, 9]], dtype=torch.int32))
    assert tier.num_left_out() == 3
    assert {5, 6, 7} <= check_tables(tier)


@pytest.mark.parametrize(("tokens", "rows"), [(4096, 64), (100, 3), (1, 1)])
def test_the_fewest_slots_hold_what_a_step_can_write(tokens: int, rows: int) -> None:
    shape = PageShape((True,), 1, 1, 1, 128, torch.float32)
    least = hot_pages_at_least(shape, num_blocks=1, step_tokens=tokens, rows=rows)
    # each sequence begins with the last row of a page, and reaches into the next ones
    rng = random.Random(tokens)
    for _ in range(200):
        cuts = sorted(rng.choices(range(tokens + 1), k=rows - 1))
        lengths = [end - start for start, end in itertools.pairwise([0, *cuts, tokens])]
        offsets = [rng.choice([0, 127, rng.randrange(128)]) for _ in lengths]
        pages = sum(-(-(n + o) // 128) for n, o in zip(lengths, offsets, strict=True) if n)
        assert pages <= least


@pytest.mark.parametrize("moves", [page_moves, page_fetch], ids=["plain", "kernels"])
def test_padded_rows_ask_for_nothing(moves: PageMoves) -> None:
    tier = PageTier(torch.empty(1, 2, 3), 8, 4, moves)
    tier.bring(torch.full((1, 5), 8, dtype=torch.int32))
    assert tier.rows_to_write(torch.full((3,), -1), 2).tolist() == [-1, -1, -1]
    assert tier.counts() == (0, 0)
    assert not check_tables(tier)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_move_what_plain_indexing_moves(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    given: list[PageTier] = []
    host, hot = [draw(9, 2, 8, 24) for _ in range(2)], [draw(6, 2, 8, 24) for _ in range(2)]
    for moves in BOTH:
        tier = PageTier(torch.empty(2, 8, 24, dtype=dtype), 9, 5, moves)
        for target, source in zip((*tier.host, *tier.hot), (*host, *hot), strict=True):
            target.copy_(source)
        rows = torch.tensor([0, 71, -1, 35])
        hot_rows = tier.rows_to_write(rows, 8)
        assert (hot_rows < 0).tolist() == [False, False, True, False]
        tier.save(rows, hot_rows)
        given.append(tier)
        for row, hot_row in zip(rows.tolist(), hot_rows.tolist(), strict=True):
            for kept, written in zip(tier.host, tier.hot, strict=True):
                if row >= 0:
                    there = kept[row // 8, :, row % 8]
                    assert there.equal(written[hot_row // 8, :, hot_row % 8])
    for kept, source in zip(given[1].host, host, strict=True):
        changed = (kept != source).any(-1).any(1)
        assert changed.nonzero().tolist() == [[0, 0], [4, 3], [8, 7]]


def test_the_kernels_look_up_what_plain_indexing_looks_up() -> None:
    generator = torch.Generator().manual_seed(5)
    blocks = torch.randint(-1, 6, (2, 3, 4), generator=generator, dtype=torch.int32)
    table = torch.randint(0, 20, (3, 6), generator=generator, dtype=torch.int32)
    wild = table.clone()
    wild[1, 2:] = 1 << 30
    tiers = [PageTier(torch.empty(1, 2, 3), 20, 7, moves) for moves in BOTH]
    for seqs in (None, torch.tensor([2, 0, 0])):
        plain, kernels = (tier.pages_of(blocks, table, seqs) for tier in tiers)
        assert plain.equal(kernels)
    for tier in tiers:
        tier.bring(torch.tensor([[4, 11, 2]], dtype=torch.int32))
        slots = tier.hot_table(wild)
        for page, slot in zip(wild.flatten().tolist(), slots.flatten().tolist(), strict=True):
            assert slot == (tier.tables.slot_of_P[page] if page in (4, 11, 2) else 7)


@pytest.mark.gpu
def test_logits_on_a_gpu_are_those_of_a_pool_that_holds_everything() -> None:
    device = torch.device("cuda")
    generator = torch.Generator().manual_seed(6)
    shape = (96, 4, 128, 64)
    plain = PageTier(torch.empty(shape[1:]), 96, 30, page_moves)
    kernels = PageTier(torch.empty(shape[1:], device=device), 96, 30, page_fetch)
    for one, other in zip(plain.host, kernels.host, strict=True):
        one.copy_(torch.randn(shape, generator=generator))
        other.copy_(one)
    for _ in range(50):
        pages = torch.randint(0, 97, (4, 7), generator=generator, dtype=torch.int32)
        for tier in (plain, kernels):
            tier.bring(pages.to(tier.tables.slot_of_P.device))
            table = tier.hot_table(pages.to(tier.tables.slot_of_P.device)).long().cpu()
            for group in range(4):
                is_page = pages[group] < 96
                for kept, hot in zip(tier.host, tier.hot, strict=True):
                    there = hot.cpu()[table[group][is_page], group]
                    assert there.equal(kept[pages[group][is_page].long(), group])
    assert kernels.counts()[0] == plain.counts()[0]
    assert kernels.counts()[1] <= 1.3 * plain.counts()[1]
