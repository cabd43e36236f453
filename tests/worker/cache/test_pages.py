"""Pages are never lost and never owned by mistake."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m3stack.cache.pages import PageAllocator


@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 11)), max_size=80))
def test_any_sequence_of_calls_keeps_every_page_either_free_or_owned(
    num_pages: int, calls: list[tuple[int, int]]
) -> None:
    pages = PageAllocator(num_pages)
    owned: list[int] = []
    for kind, number in calls:
        if kind == 0 and number <= pages.num_free:
            taken = pages.take(number)
            assert not set(taken) & set(owned), "a page was handed out twice"
            owned.extend(taken)
        elif kind == 1 and owned:
            page = owned[number % len(owned)]
            pages.share(page)
            owned.append(page)
        elif kind == 2 and owned:
            page = owned.pop(number % len(owned))
            assert pages.give_back(page) == owned.count(page)
        pages.check(owned)
        assert pages.num_free == num_pages - len(set(owned))


def test_a_page_given_back_twice_is_caught() -> None:
    pages = PageAllocator(2)
    (page,) = pages.take(1)
    pages.give_back(page)
    with pytest.raises(AssertionError, match="once too often"):
        pages.give_back(page)


def test_taking_more_than_is_free_is_caught() -> None:
    pages = PageAllocator(2)
    with pytest.raises(AssertionError, match="3 pages asked, 2 free"):
        pages.take(3)


def test_a_lost_page_is_caught_by_the_check() -> None:
    pages = PageAllocator(2)
    pages.take(1)
    with pytest.raises(AssertionError):
        pages.check([])
