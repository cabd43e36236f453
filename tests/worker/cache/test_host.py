"""The books and the bytes of pages in host memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m3stack.cache.host import CopyDirection, HostTier, PageCopy
from m3stack.cache.host_pool import HostPool, slots_within
from m3stack.cache.pages import PageAllocator
from m3stack.cache.pool import KvPool, PageShape
from m3stack.cache.prefix import PrefixCache, Salt, page_key

SHAPE = PageShape((False, True, True), 2, 4, 3, 5, torch.float32)


def random_pool(num_pages: int) -> KvPool:
    pool = KvPool(SHAPE, num_pages, torch.device("cpu"))
    for layer in pool.layers:
        for tensor in (layer.k_PGBD, layer.v_PGBD, layer.index_k_PBD):
            if tensor is not None:
                tensor.normal_()
    return pool


def content(pool: KvPool, page: int) -> list[torch.Tensor]:
    parts = [(layer.k_PGBD, layer.v_PGBD, layer.index_k_PBD) for layer in pool.layers]
    return [tensor[page].clone() for layer in parts for tensor in layer if tensor is not None]


def test_a_copy_moves_keys_values_and_index_keys_of_every_layer_and_nothing_else() -> None:
    pool = random_pool(4)
    host = HostPool(pool, 2)
    before = [content(pool, page) for page in range(4)]
    host.copy(PageCopy(CopyDirection.TO_HOST, 2, 1))
    for tensor in content(pool, 2):
        assert not tensor.isnan().any()
    for layer in pool.layers:
        layer.k_PGBD[0].fill_(7)
        layer.v_PGBD[0].fill_(7)
    host.copy(PageCopy(CopyDirection.TO_DEVICE, 0, 1))
    for page, expected in ((0, before[2]), (1, before[1]), (2, before[2]), (3, before[3])):
        for got, want in zip(content(pool, page), expected, strict=True):
            assert torch.equal(got, want)
    # 3 layers of K and V, 2 of index keys
    assert len(before[0]) == 8
    assert host.bytes_per_page == sum(tensor.nbytes for tensor in before[0])
    assert slots_within(3 * host.bytes_per_page + 1, SHAPE) == 3


def test_the_copy_of_index_keys_moves_with_them() -> None:
    pool = KvPool(replace(SHAPE, index_copy=True), 3, torch.device("cpu"))
    copies = [layer.index_copy_PX for layer in pool.layers if layer.index_copy_PX is not None]
    for copy in copies:
        copy.random_(0, 256)
    before = [copy[1].clone() for copy in copies]
    host = HostPool(pool, 1)
    host.copy(PageCopy(CopyDirection.TO_HOST, 1, 0))
    host.copy(PageCopy(CopyDirection.TO_DEVICE, 2, 0))
    assert [torch.equal(copy[2], kept) for copy, kept in zip(copies, before, strict=True)] == [
        True,
        True,
    ]
    assert host.bytes_per_page == pool.shape.bytes_per_page


def test_least_recently_used_copy_gives_way_and_pinned_ones_never_do() -> None:
    tier = HostTier(2)
    first, second = tier.put(b"a"), tier.put(b"b")
    assert {first, second} == {0, 1}
    assert tier.put(b"a") is None, "held already"
    assert tier.put(b"c") == second
    assert tier.holds(b"a")
    assert not tier.holds(b"b")
    tier.pin([b"a", b"c"])
    assert tier.put(b"d") is None, "every slot is pinned"
    tier.unpin([b"a"])
    assert tier.put(b"d") == first
    tier.unpin([b"c"])
    tier.check()


def test_cost_rule_keeps_only_pages_that_are_dearer_to_compute() -> None:
    tier = HostTier(1, restore_cost_tokens=16)
    assert not tier.is_worth(16)
    assert tier.is_worth(17)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), max_size=80))
@settings(deadline=None)
def test_any_use_of_slots_keeps_the_books(calls: list[tuple[int, int]]) -> None:
    tier = HostTier(3)
    pinned: list[bytes] = []
    for kind, number in calls:
        key = bytes([number])
        if kind == 0:
            tier.put(key)
        elif kind == 1:
            tier.pin([key])
            pinned.append(key)
        elif kind == 2 and pinned:
            tier.unpin([pinned.pop(number % len(pinned))])
        elif kind == 3:
            held = tier.holds(key)
            assert (tier.use(key) is not None) == held
        elif kind == 4:
            tier.drop(key)
        elif kind == 5:
            tier.drop_slot(number % 3)
        tier.check()
        assert tier.num_pinned == len(set(pinned))
    assert tier.reset() <= 3
    assert tier.num_held == 0


def keyed_cache(num_pages: int, num_slots: int) -> tuple[PrefixCache, list[bytes]]:
    cache = PrefixCache(PageAllocator(num_pages), host=HostTier(num_slots))
    keys: list[bytes] = []
    for number in range(num_pages):
        keys.append(page_key(keys[-1] if keys else cache.root_key(Salt(), 0), [number]))
    pages = cache.take(num_pages)
    for page, key in zip(pages, keys, strict=True):
        cache.register(page, key)
    cache.release(pages)
    return cache, keys


def test_evicted_pages_go_to_the_host_and_come_back_under_their_key() -> None:
    cache, keys = keyed_cache(3, 3)
    taken = cache.take(2)
    out = cache.take_copies()
    assert [copy.page for copy in out] == taken[::-1] or {c.page for c in out} == set(taken)
    assert all(copy.direction is CopyDirection.TO_HOST for copy in out)
    assert cache.known_length(keys) == 3
    assert len(cache.match(keys)) == 1
    cache.release(taken)
    found = cache.fetch(keys[1])
    assert found is not None
    (back,) = cache.take_copies()
    assert back == PageCopy(CopyDirection.TO_DEVICE, found[0], back.slot)
    assert back.slot in {copy.slot for copy in out}
    assert cache.fetch(keys[1]) == (found[0], False), "now it is on the device"


def test_copies_stand_in_the_order_in_which_slots_and_pages_are_used() -> None:
    cache, keys = keyed_cache(2, 1)
    cache.take(1)
    (first,) = cache.take_copies()
    # the one slot is read before it is written again
    found = cache.fetch(keys[1])
    assert found is not None
    kinds = [copy.direction for copy in cache.take_copies()]
    assert first.direction is CopyDirection.TO_HOST
    assert kinds in (
        [CopyDirection.TO_DEVICE],
        [CopyDirection.TO_HOST, CopyDirection.TO_DEVICE],
    )


def test_failed_copies_are_forgotten_on_both_sides() -> None:
    cache, keys = keyed_cache(2, 2)
    taken = cache.take(2)
    out = cache.take_copies()
    cache.distrust(out[:1])
    assert sum(cache.knows(key) for key in keys) == 1
    cache.release(taken)
    known = next(key for key in keys if cache.knows(key))
    found = cache.fetch(known)
    assert found is not None
    assert cache.distrust(cache.take_copies()) == {found[0]}
    assert cache.num_cached == 0
    assert cache.knows(known), "the host copy itself is good"
    cache.check([found[0]])


def test_reset_empties_both_tiers_and_changes_the_roots() -> None:
    cache, keys = keyed_cache(2, 2)
    cache.take(1)
    cache.take_copies()
    before = cache.root_key(Salt("t", "s"), 1)
    assert cache.reset() == 1
    assert not any(cache.knows(key) for key in keys)
    assert cache.num_host == 0
    assert cache.root_key(Salt("t", "s"), 1) != before


@pytest.mark.parametrize("enabled", [True, False])
def test_roots_are_equal_only_for_requests_that_may_share(enabled: bool) -> None:
    cache = PrefixCache(PageAllocator(1), enabled=enabled, host=HostTier(1))
    salts = [Salt(), Salt("a"), Salt("", "a"), Salt("a", "b"), Salt("ab"), Salt("", "ab")]
    roots = [cache.root_key(salt, 1) for salt in salts]
    assert len(set(roots)) == len(roots)
    assert (cache.root_key(Salt("a"), 1) == cache.root_key(Salt("a"), 2)) is enabled


def test_a_copy_moves_index_keys_held_in_parts_where_they_are() -> None:
    for rank in range(2):
        shape = PageShape((True,), 1, 2, 2, 2, torch.float32, index_rank=rank, index_ranks=2)
        pool = KvPool(shape, 4, torch.device("cpu"))
        (layer,) = pool.layers
        assert layer.index_k_PBD is not None
        layer.k_PGBD.normal_()
        layer.v_PGBD.normal_()
        layer.index_k_PBD.normal_()
        before = layer.index_k_PBD.clone()
        host = HostPool(pool, 1)
        host.copy(PageCopy(CopyDirection.TO_HOST, 1, 0))
        host.copy(PageCopy(CopyDirection.TO_DEVICE, 3, 0))
        assert torch.equal(layer.k_PGBD[3], layer.k_PGBD[1])
        if rank == 1:
            # pages 1 and 3 are this rank's rows 0 and 1
            before[1] = before[0]
        assert torch.equal(layer.index_k_PBD, before)
        assert host.bytes_per_page == shape.whole_bytes_per_page
