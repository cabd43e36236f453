"""What the prefix cache finds, keeps and evicts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from m3stack.cache.pages import PageAllocator
from m3stack.cache.prefix import ROOT_KEY, MediaMark, PrefixCache, page_chain, page_key

IDS = list(range(128))


def chain(*pages: list[int], root: bytes = ROOT_KEY) -> list[bytes]:
    keys: list[bytes] = []
    for ids in pages:
        keys.append(page_key(keys[-1] if keys else root, ids))
    return keys


def test_key_depends_on_everything_before_the_page() -> None:
    assert chain([1], [2])[1] != chain([3], [2])[1]
    assert chain([1], [2])[1] != chain([1], [2], root=b"tenant")[1]
    assert chain([1, 2])[0] != chain([1], [2])[1]


def test_a_chain_at_once_has_the_keys_of_its_pages_one_by_one() -> None:
    pages = [[7 * page + index for index in range(5)] for page in range(4)]
    whole = [token for page in pages for token in page]
    assert page_chain(ROOT_KEY, whole, 5) == chain(*pages)
    keys = chain(*pages, root=b"tenant")
    assert page_chain(keys[1], whole[10:], 5) == keys[2:]
    assert page_chain(ROOT_KEY, [], 5) == []


def test_key_depends_on_which_media_stands_where() -> None:
    def key(*marks: MediaMark) -> bytes:
        return page_key(ROOT_KEY, IDS, marks)

    base = MediaMark(b"a" * 32, 0, 4, 8)
    variants = [
        key(),
        key(base),
        key(MediaMark(b"b" * 32, 0, 4, 8)),
        key(MediaMark(b"a" * 32, 1, 4, 8)),
        key(MediaMark(b"a" * 32, 0, 5, 8)),
        key(MediaMark(b"a" * 32, 0, 4, 9)),
        key(base, MediaMark(b"b" * 32, 0, 20, 8)),
    ]
    assert len(set(variants)) == len(variants)
    assert key(base) == key(MediaMark(b"a" * 32, 0, 4, 8))


def test_match_stops_at_the_first_unknown_page() -> None:
    cache = PrefixCache(PageAllocator(4))
    keys = chain([1], [2], [3])
    pages = cache.take(3)
    cache.register(pages[0], keys[0])
    cache.register(pages[2], keys[2])
    cache.release(pages)
    assert cache.match(keys) == pages[:1]


def test_released_pages_stay_findable_until_they_are_needed() -> None:
    cache = PrefixCache(PageAllocator(3))
    keys = chain([1], [2])
    pages = cache.take(2)
    for page, key in zip(pages, keys, strict=True):
        cache.register(page, key)
    cache.release(pages)
    assert cache.num_available == 3
    assert cache.num_cached == 2
    cache.take(2)
    # the tail went first: without its parent a page cannot be reached
    assert cache.match(keys) == pages[:1]
    cache.check([*cache.match([]), pages[0], *(set(range(3)) - {pages[0]})])


def test_pages_in_use_are_never_evicted() -> None:
    cache = PrefixCache(PageAllocator(2))
    (page,) = cache.take(1)
    cache.register(page, b"k")
    cache.release([page])
    assert cache.match([b"k"]) == [page]
    assert cache.num_available == 1
    assert page not in cache.take(1)


def test_least_recently_used_page_is_evicted_first() -> None:
    cache = PrefixCache(PageAllocator(3))
    pages = cache.take(3)
    for page in pages:
        cache.register(page, bytes([page]))
        cache.release([page])
    cache.release(cache.match([bytes([pages[0]])]))
    cache.take(1)
    assert cache.match([bytes([pages[1]])]) == []
    assert cache.match([bytes([pages[0]])]) == [pages[0]]


def test_second_copy_of_known_content_stays_private() -> None:
    cache = PrefixCache(PageAllocator(3))
    pages = cache.take(2)
    cache.register(pages[0], b"k")
    cache.register(pages[1], b"k")
    cache.release(pages)
    assert cache.match([b"k"]) == [pages[0]]
    cache.check([pages[0]])


def test_reset_forgets_pages_in_use_as_well() -> None:
    cache = PrefixCache(PageAllocator(3))
    pages = cache.take(2)
    for page in pages:
        cache.register(page, bytes([page]))
    cache.release(pages[1:])
    assert cache.reset() == 1
    assert cache.match([bytes([pages[0]])]) == []
    cache.release(pages[:1])
    cache.check([])
    assert cache.num_available == 3
    assert cache.num_cached == 0


def test_disabled_cache_keeps_nothing() -> None:
    cache = PrefixCache(PageAllocator(2), enabled=False)
    pages = cache.take(1)
    cache.register(pages[0], b"k")
    cache.release(pages)
    assert cache.match([b"k"]) == []
    assert cache.num_cached == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(1, 4)), max_size=60))
@settings(deadline=None)
def test_any_use_keeps_ownership_exact_and_content_true(
    calls: list[tuple[int, int, int]],
) -> None:
    cache = PrefixCache(PageAllocator(8))
    held: list[list[int]] = []
    content: dict[int, bytes] = {}
    for kind, number, count in calls:
        if kind == 0 and count <= cache.num_available:
            pages = cache.take(count)
            assert not {p for group in held for p in group} & set(pages)
            for page in pages:
                content.pop(page, None)
            held.append(pages)
        elif kind == 1 and held:
            page = held[number % len(held)][0]
            key = bytes([number])
            if page not in content and key not in content.values():
                cache.register(page, key)
                content[page] = key
        elif kind == 2 and held:
            cache.release(held.pop(number % len(held)))
        elif kind == 3:
            found = cache.match([bytes([number])])
            assert all(content[page] == bytes([number]) for page in found)
            if found:
                held.append(found)
        cache.check([page for group in held for page in group])
