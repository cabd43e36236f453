"""News of the cache: a reader that applies them knows exactly what the cache holds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from m3stack.cache.host import HostTier
from m3stack.cache.journal import PageJournal, Place, short_key
from m3stack.cache.pages import PageAllocator
from m3stack.cache.prefix import PrefixCache


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


class Reader:
    """Someone who follows a journal."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.epoch = 0
        self.restarts = 0
        self._place: Place | None = None

    def read(self, journal: PageJournal) -> None:
        news = journal.news(self._place)
        if news.is_restart:
            self.held.clear()
            self.restarts += 1
        assert not set(news.added) & set(news.removed)
        self.held |= set(news.added)
        self.held -= set(news.removed)
        self.epoch = news.epoch
        self._place = news.place


def test_what_comes_and_goes_between_two_looks_is_no_news() -> None:
    journal, reader = PageJournal(), Reader()
    reader.read(journal)

    journal.note(key(1), is_held=True)
    journal.note(key(2), is_held=True)
    journal.note(key(1), is_held=False)
    reader.read(journal)

    assert (reader.held, reader.restarts) == ({2}, 1)
    assert not journal.news(reader._place)


def test_a_reader_that_is_too_far_behind_is_told_everything_anew() -> None:
    journal, slow, quick = PageJournal(max_entries=10), Reader(), Reader()
    slow.read(journal)
    for number in range(25):
        journal.note(key(number), is_held=True)
        quick.read(journal)
    slow.read(journal)

    assert slow.held == quick.held == set(range(25))
    assert (slow.restarts, quick.restarts) == (2, 1)


def test_a_flush_voids_everything_told_before() -> None:
    cache, reader = PrefixCache(PageAllocator(4)), Reader()
    assert cache.journal is not None
    pages = cache.take(2)
    for number, page in enumerate(pages):
        cache.register(page, key(number))
    cache.release(pages)
    reader.read(cache.journal)
    assert reader.held == {0, 1}

    cache.reset()
    reader.read(cache.journal)

    assert (reader.held, reader.epoch) == (set(), 1)


def test_a_cache_that_shares_nothing_tells_nothing() -> None:
    assert PrefixCache(PageAllocator(4), enabled=False).journal is None


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 11)), max_size=80),
    num_slots=st.integers(0, 3),
)
def test_readers_know_exactly_what_either_tier_holds(
    steps: list[tuple[int, int]], num_slots: int
) -> None:
    host = HostTier(num_slots) if num_slots else None
    cache, often, seldom = PrefixCache(PageAllocator(4), host=host), Reader(), Reader()
    assert cache.journal is not None
    owned: list[int] = []
    for action, number in steps:
        if action <= 1 and cache.num_available:
            (page,) = cache.take(1)
            cache.register(page, key(number))
            owned.append(page)
        elif action == 2 and owned:
            cache.release([owned.pop()])
        elif action == 3 and (found := cache.fetch(key(number))) is not None:
            owned.append(found[0])
        elif action == 4:
            cache.forget([key(number)])
        elif action == 5 and number == 0:
            cache.take_copies()
            cache.reset()
        cache.check(owned)
        often.read(cache.journal)
    seldom.read(cache.journal)

    known = {short_key(key(number)) for number in range(12) if cache.knows(key(number))}
    assert often.held == seldom.held == known
    assert often.epoch == seldom.epoch
