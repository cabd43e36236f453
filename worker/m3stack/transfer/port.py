"""Moves pages and features between this process's tensors and bytes, on one rank or on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from m3stack.cache.pool import KvPool
from m3stack.transfer.layout import PageForm, Part


@dataclass(frozen=True, slots=True)
class ReadPage:
    """Asks for a rank's part of a page."""

    page: int


@dataclass(frozen=True, slots=True)
class WritePage:
    """Brings a whole page, of which a rank takes its part."""

    page: int
    content: bytes


@dataclass(frozen=True, slots=True)
class KeepFeatures:
    """Brings the features of a media item.

    Attributes:
        evicted: items whose features are to be dropped before.
    """

    key: bytes
    content: bytes
    evicted: tuple[bytes, ...]


Order = ReadPage | WritePage | KeepFeatures


class Features(Protocol):
    """The encoder, as far as features come and go."""

    def features(self, key: bytes) -> Tensor: ...

    def adopt(self, key: bytes, features: Tensor) -> None: ...

    def drop(self, keys: Sequence[bytes]) -> None: ...


class Port(Protocol):
    """Pages and features of a whole worker. Belongs to the engine thread."""

    def read_page(self, page: int) -> bytes:
        """All heads and index keys of a page."""
        ...

    def write_page(self, page: int, content: bytes) -> None:
        """Fills a page that nobody else owns."""
        ...

    def read_features(self, key: bytes) -> bytes:
        """The features of an item that is encoded."""
        ...

    def keep_features(self, order: KeepFeatures) -> None:
        """Takes features of a pinned item over, as if they had been encoded here."""
        ...


class RankPort:
    """One rank's side; the whole port of a worker that has one rank.

    Args:
        pool: this rank's pages.
        form: of a page on the wire.
        heads: KV heads that this rank holds.
        features: of this rank.
        width: values of a feature row.
        device: where pages and features are.
    """

    def __init__(
        self,
        pool: KvPool,
        form: PageForm,
        heads: range,
        *,
        features: Features,
        width: int,
        device: torch.device,
    ) -> None:
        self._pool = pool
        self._form = form
        self._heads = heads
        self._features = features
        self._width = width
        self._device = device

    def parts(self, page: int) -> tuple[Part, ...]:
        """What `read` gives of a page."""
        has_index = self._pool.shape.index_page(page) is not None
        return self._form.parts(self._heads, with_index=has_index)

    @torch.inference_mode()
    def read(self, page: int) -> bytes:
        """This rank's parts of a page, one behind the other."""
        rows = [row.view(torch.uint8).flatten() for row in self._rows(page)]
        # one copy to the host; it waits for whatever still writes to the page
        return torch.cat(rows).cpu().numpy().tobytes()

    @torch.inference_mode()
    def write_page(self, page: int, content: bytes) -> None:
        if len(content) != self._form.num_bytes:
            raise ValueError(f"{len(content)} bytes for a page of {self._form.num_bytes}")
        view = memoryview(content)
        own = b"".join(view[part.offset : part.offset + part.length] for part in self.parts(page))
        given = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(self._device)
        first = 0
        for row in self._rows(page):
            size = row.numel() * row.element_size()
            row.copy_(given[first : first + size].view(row.dtype).view(row.shape))
            first += size

    def read_page(self, page: int) -> bytes:
        return self.read(page)

    def read_features(self, key: bytes) -> bytes:
        return self._features.features(key).contiguous().view(torch.uint8).cpu().numpy().tobytes()

    def keep_features(self, order: KeepFeatures) -> None:
        self._features.drop(order.evicted)
        given = torch.frombuffer(bytearray(order.content), dtype=torch.uint8)
        rows = given.view(self._pool.shape.dtype).view(-1, self._width)
        self._features.adopt(order.key, rows.to(self._device))

    def _rows(self, page: int) -> list[Tensor]:
        """This rank's tensors of a page, in the order of its parts."""
        rows: list[Tensor] = []
        index_page = self._pool.shape.index_page(page)
        for layer in self._pool.layers:
            rows += [layer.k_PGBD[page], layer.v_PGBD[page]]
            for tensor in (layer.index_k_PBD, layer.index_copy_PX):
                if tensor is not None and index_page is not None:
                    rows.append(tensor[index_page])
        return rows


class FollowerPort:
    """What a rank that follows does with the leader's orders.

    Args:
        own: of this rank.
        answer: gives the leader what it asked for.
    """

    def __init__(self, own: RankPort, answer: Callable[[object], None]) -> None:
        self._own = own
        self._answer = answer

    def obey(self, order: Order) -> None:
        if isinstance(order, ReadPage):
            self._answer((self._own.parts(order.page), self._own.read(order.page)))
        elif isinstance(order, WritePage):
            self._own.write_page(order.page, order.content)
        else:
            self._own.keep_features(order)


class LeaderPort:
    """The port of a worker of several ranks.

    Args:
        own: of the leading rank.
        form: of a page on the wire.
        tell: gives an order to all other ranks.
        gather: what each of them answers, and the leader's own answer.
    """

    def __init__(
        self,
        own: RankPort,
        form: PageForm,
        *,
        tell: Callable[[Order], None],
        gather: Callable[[object], Sequence[tuple[tuple[Part, ...], bytes]]],
    ) -> None:
        self._own = own
        self._form = form
        self._tell = tell
        self._gather = gather

    def read_page(self, page: int) -> bytes:
        self._tell(ReadPage(page))
        content = bytearray(self._form.num_bytes)
        for parts, data in self._gather((self._own.parts(page), self._own.read(page))):
            first = 0
            for part in parts:
                content[part.offset : part.offset + part.length] = data[first : first + part.length]
                first += part.length
        return bytes(content)

    def write_page(self, page: int, content: bytes) -> None:
        self._tell(WritePage(page, content))
        self._own.write_page(page, content)

    def read_features(self, key: bytes) -> bytes:
        return self._own.read_features(key)

    def keep_features(self, order: KeepFeatures) -> None:
        self._tell(order)
        self._own.keep_features(order)
