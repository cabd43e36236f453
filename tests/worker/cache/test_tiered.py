"""Cold pages in host memory change nothing but where keys and values are."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m3stack.cache.pool import PageShape
from m3stack.cache.tiered import Mover, PageTier, TieredPages, TieredPool, with_tier
from m3stack.checkpoints import builtin_checkpoint
from m3stack.kernels import page_fetch, page_moves
from m3stack.kernels.reference_table import reference_kernels
from m3stack.models.minimax_m3.model import M3Model
from tests.worker.support import PagedRunner, Track, load

TINY = Path(builtin_checkpoint("tiny"))
CPU = torch.device("cpu")
PLAIN = Mover(page_moves.fetch_pages, page_moves.save_rows)


def page_value(page: int, part: int) -> float:
    return float(1000 * part + page)


@settings(max_examples=15, deadline=None)
@given(
    num_pages=st.integers(4, 30),
    share=st.floats(0.1, 1.0),
    seed=st.integers(0, 1 << 20),
)
def test_what_is_held_is_there_and_the_oldest_makes_room(
    num_pages: int, share: float, seed: int
) -> None:
    rng = random.Random(seed)
    num_hot = max(2, int(num_pages * share))
    tier = PageTier(torch.empty(1, 2, 3), num_pages, num_hot, PLAIN)
    for part, host in enumerate(tier._host):
        for page in range(num_pages):
            host[page] = page_value(page, part)
    last_use: dict[int, int] = {}
    missed = asked = 0
    for step in range(20):
        wanted = rng.sample(range(num_pages), rng.randint(0, num_hot))
        padded = [*wanted, *rng.choices([num_pages, *wanted], k=rng.randint(1, 4))]
        hot_before = {page for page in range(num_pages) if tier._slot_of_P1[page] >= 0}
        tier.hold(torch.tensor(padded))
        asked += len(wanted)
        missed += len(set(wanted) - hot_before)
        last_use |= dict.fromkeys(wanted, step)
        hot = {page for page in range(num_pages) if tier._slot_of_P1[page] >= 0}
        assert set(wanted) <= hot
        assert len(hot) <= num_hot
        slots = tier.slots_of(torch.tensor(sorted(hot), dtype=torch.int64))
        assert len(set(slots.tolist())) == len(hot), "two pages in one slot"
        for page, slot in zip(sorted(hot), slots.tolist(), strict=True):
            for part in range(2):
                assert (tier.hot[part][slot] == page_value(page, part)).all()
        gone = hot_before - hot
        kept = hot & hot_before - set(wanted)
        if gone and kept:
            assert max(last_use[page] for page in gone) <= min(last_use[page] for page in kept)
    assert tier.counts() == (asked, missed)


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
            for host in layer.tier._host:
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
        for host, pages in zip(mine.tier._host, (theirs.k_PGBD, theirs.v_PGBD), strict=True):
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


def test_padded_rows_ask_for_nothing() -> None:
    tier = PageTier(torch.empty(1, 2, 3), 8, 4, PLAIN)
    tier.hold(torch.full((5,), 8))
    assert tier.counts() == (0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_move_what_plain_indexing_moves(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    host, hot = draw(9, 2, 8, 24), draw(5, 2, 8, 24)
    pages, slots = torch.tensor([3, 9, 8, 9]), torch.tensor([4, 0, 1, 2])
    expected, given = hot.clone(), hot.clone()
    page_moves.fetch_pages(host, expected, pages, slots)
    page_fetch.fetch_pages(host, given, pages, slots)
    assert given.equal(expected)
    assert not given.equal(hot)
    rows, hot_rows = torch.tensor([0, 71, -1, 35]), torch.tensor([39, 3, -1, 17])
    expected, given = host.clone(), host.clone()
    page_moves.save_rows(expected, hot, rows, hot_rows)
    page_fetch.save_rows(given, hot, rows, hot_rows)
    assert given.equal(expected)
    assert not given.equal(host)
