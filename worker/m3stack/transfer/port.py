"""Moves pages and features between this process's tensors and bytes, on one rank or on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from m3stack.cache.pool import KvPool
from m3stack.transfer.layout import PageForm, Part

Data = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class ReadPage:
    """Asks for a rank's part of a page."""

    page: int


@dataclass(frozen=True, slots=True)
class WritePage:
    """Brings a whole page, of which a rank takes its part."""

    page: int
    content: Data


@dataclass(frozen=True, slots=True)
class KeepFeatures:
    """Brings the features of a media item.

    Attributes:
        evicted: items whose features are to be dropped before.
    """

    key: bytes
    content: Data
    evicted: tuple[bytes, ...]


Order = ReadPage | WritePage | KeepFeatures


class Features(Protocol):
    """The encoder, as far as features come and go."""

    def features(self, key: bytes) -> Tensor: ...

    def adopt(self, key: bytes, features: Tensor) -> None: ...

    def drop(self, keys: Sequence[bytes]) -> None: ...


class Port(Protocol):
    """Pages and features of a whole worker. Belongs to the engine thread."""

    def read_page(self, page: int) -> Data:
        """All heads and index keys of a page."""
        ...

    def write_page(self, page: int, content: Data) -> None:
        """Fills a page that nobody else owns."""
        ...

    def read_features(self, key: bytes) -> Data:
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
    def read(self, page: int) -> memoryview:
        """This rank's parts of a page, one behind the other."""
        rows = [row.view(torch.uint8).flatten() for row in self._rows(page)]
        # one copy to the host; it waits for whatever still writes to the page
        return _bytes_of(torch.cat(rows))

    @torch.inference_mode()
    def write_page(self, page: int, content: Data) -> None:
        if len(content) != self._form.num_bytes:
            raise ValueError(f"{len(content)} bytes for a page of {self._form.num_bytes}")
        given = torch.frombuffer(_writable(content), dtype=torch.uint8)
        parts = [given[part.offset : part.offset + part.length] for part in self.parts(page)]
        if self._device.type != "cpu":
            # one copy over the bus instead of some hundred
            sizes = [part.length for part in self.parts(page)]
            parts = list(torch.cat(parts).to(self._device).split(sizes))
        for row, part in zip(self._rows(page), parts, strict=True):
            row.copy_(part.view(row.dtype).view(row.shape))

    def read_page(self, page: int) -> Data:
        return self.read(page)

    def read_features(self, key: bytes) -> Data:
        rows = self._features.features(key).contiguous().view(torch.uint8)
        return _bytes_of(rows.flatten())

    def keep_features(self, order: KeepFeatures) -> None:
        self._features.drop(order.evicted)
        # the features outlive what they came in
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
            self._answer((self._own.parts(order.page), bytes(self._own.read(order.page))))
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
        gather: Callable[[object], Sequence[tuple[tuple[Part, ...], Data]]],
    ) -> None:
        self._own = own
        self._form = form
        self._tell = tell
        self._gather = gather

    def read_page(self, page: int) -> Data:
        self._tell(ReadPage(page))
        content = bytearray(self._form.num_bytes)
        for parts, data in self._gather((self._own.parts(page), bytes(self._own.read(page)))):
            first = 0
            for part in parts:
                content[part.offset : part.offset + part.length] = data[first : first + part.length]
                first += part.length
        return content

    def write_page(self, page: int, content: Data) -> None:
        self._tell(WritePage(page, content))
        self._own.write_page(page, content)

    def read_features(self, key: bytes) -> Data:
        return self._own.read_features(key)

    def keep_features(self, order: KeepFeatures) -> None:
        self._tell(order)
        self._own.keep_features(order)


def _writable(content: Data) -> bytearray | memoryview:
    """The same bytes in memory that torch takes without a word."""
    return bytearray(content) if isinstance(content, bytes) else content


def _bytes_of(values: Tensor) -> memoryview:
    """The memory of a uint8 vector, brought to the host."""
    return memoryview(values.cpu().numpy())  # type: ignore[arg-type]
