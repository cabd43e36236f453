"""Free list and reference counts of page numbers; knows neither tensors nor tokens."""

from __future__ import annotations

from collections.abc import Iterable


class PageAllocator:
    """Hands out page numbers `0 .. num_pages - 1` and takes them back.

    A page is free (count 0) or owned (count of owners). The engine thread owns the allocator.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0
        # a stack: the page freed last is handed out first, its memory is most likely still warm
        self._free = list(range(num_pages - 1, -1, -1))
        self._owners = [0] * num_pages

    @property
    def num_pages(self) -> int:
        return len(self._owners)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def owners(self, page: int) -> int:
        """How many owners a page has."""
        return self._owners[page]

    def take(self, count: int) -> list[int]:
        """`count` free pages, each with one owner. The caller has checked `num_free`."""
        assert 0 <= count <= len(self._free), f"{count} pages asked, {len(self._free)} free"
        if count == 0:
            return []
        pages = self._free[-count:][::-1]
        del self._free[-count:]
        for page in pages:
            self._owners[page] = 1
        return pages

    def share(self, page: int) -> None:
        """Adds an owner to an owned page."""
        assert self._owners[page] > 0, f"page {page} has no owner to share with"
        self._owners[page] += 1

    def share_all(self, pages: Iterable[int]) -> None:
        """Adds an owner to each of some owned pages."""
        owners = self._owners
        for page in pages:
            assert owners[page] > 0, f"page {page} has no owner to share with"
            owners[page] += 1

    def give_back(self, page: int) -> int:
        """Removes an owner and returns how many are left; without owners the page is free."""
        left = self._owners[page] - 1
        assert left >= 0, f"page {page} was given back once too often"
        self._owners[page] = left
        if left == 0:
            self._free.append(page)
        return left

    def check(self, owned: Iterable[int]) -> None:
        """Raises AssertionError unless `owned`, one entry an owner, is all that is not free."""
        counts = [0] * self.num_pages
        for page in owned:
            counts[page] += 1
        assert counts == self._owners, "owners and counts disagree"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert free == {page for page, count in enumerate(counts) if count == 0}
