"""Moves pages and features between this process's tensors and bytes, on one rank or on all.

Ranks exchange what they hold by one sum over all of them: who has nothing to give gives zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from m3stack.cache.pool import KvPool
from m3stack.engine.plan import FatalStepError
from m3stack.transfer.layout import PageForm, Part

Data = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class ReadPage:
    """Asks every rank for its parts of a page."""

    page: int


@dataclass(frozen=True, slots=True)
class WritePage:
    """Says that a page is about to come."""

    page: int


@dataclass(frozen=True, slots=True)
class KeepFeatures:
    """Says that the features of a media item are about to come."""

    key: bytes
    num_rows: int


@dataclass(frozen=True, slots=True)
class DropFeatures:
    """Says that nobody wants the features of a media item after all."""

    key: bytes


Order = ReadPage | WritePage | KeepFeatures | DropFeatures


class Features(Protocol):
    """The encoder, as far as features come and go."""

    def features(self, key: bytes) -> Tensor: ...

    def adopt(self, key: bytes, features: Tensor) -> None: ...

    def drop(self, keys: Sequence[bytes]) -> None: ...


class Book(Protocol):
    """What a rank that follows knows of features (`engine.encoder.FollowerBook`)."""

    def mark_encoded(self, key: bytes, num_parts: int = 1, *, is_whole: bool = True) -> None: ...

    def forget(self, keys: Sequence[bytes]) -> None: ...


class Adder(Protocol):
    """All ranks together (`parallel.Mesh`)."""

    def all_reduce(self, x: Tensor) -> Tensor: ...


class Port(Protocol):
    """Pages and features of a whole worker. Belongs to the engine thread."""

    @property
    def page_bytes(self) -> int:
        """Of a page on the wire."""
        ...

    def read_page(self, page: int) -> Data:
        """All heads and index keys of a page."""
        ...

    def write_page(self, page: int, content: Data) -> None:
        """Fills a page that nobody else owns."""
        ...

    def read_features(self, key: bytes, part: slice) -> Data:
        """Some bytes of the features of an item that is encoded."""
        ...

    def keep_features(self, key: bytes, content: Data) -> None:
        """Takes features of an item over, as if they had been encoded here."""
        ...

    def drop_features(self, key: bytes) -> None:
        """Lets go of features that `keep_features` took over."""
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
        gives_heads, gives_index: False where another rank holds the same and gives it.
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
        gives_heads: bool = True,
        gives_index: bool = True,
    ) -> None:
        self._pool = pool
        self._form = form
        self._heads = heads
        self._features = features
        self._width = width
        self._gives = (gives_heads, gives_index)
        self.device = device

    @property
    def page_bytes(self) -> int:
        return self._form.num_bytes

    @torch.inference_mode()
    def give(self, page: int, content: Tensor) -> None:
        """Writes this rank's parts of a page into the page on the wire, uint8 on the device."""
        gives_heads, gives_index = self._gives
        for row, part, is_index in self._rows(page):
            if gives_index if is_index else gives_heads:
                piece = content[part.offset : part.offset + part.length]
                piece.copy_(row.view(torch.uint8).flatten())

    @torch.inference_mode()
    def take(self, page: int, content: Tensor) -> None:
        """The other way round."""
        for row, part, _ in self._rows(page):
            piece = content[part.offset : part.offset + part.length]
            row.copy_(piece.view(row.dtype).view(row.shape))

    def keep(self, key: bytes, content: Tensor) -> None:
        """Takes over the features of an item, uint8 on the device."""
        rows = content.view(self._pool.shape.dtype).view(-1, self._width)
        self._features.adopt(key, rows)

    def num_rows(self, content: Data) -> int:
        """Feature rows in so many bytes."""
        return len(content) // self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Of a feature row."""
        return self._width * self._pool.shape.dtype.itemsize

    def read_page(self, page: int) -> Data:
        content = torch.empty(self.page_bytes, dtype=torch.uint8, device=self.device)
        self.give(page, content)
        return _to_host(content)

    def write_page(self, page: int, content: Data) -> None:
        self.take(page, _to_device(content, self.page_bytes, self.device))

    def read_features(self, key: bytes, part: slice) -> Data:
        rows = self._features.features(key).contiguous()
        return _to_host(rows.view(torch.uint8).flatten()[part])

    def keep_features(self, key: bytes, content: Data) -> None:
        # the features outlive what they came in
        own = bytearray(content)
        self.keep(key, _to_device(own, len(own), self.device))

    def drop_features(self, key: bytes) -> None:
        self._features.drop([key])

    def _rows(self, page: int) -> Iterator[tuple[Tensor, Part, bool]]:
        """This rank's tensors of a page, where they stand on the wire, and which are index keys."""
        index_page = self._pool.shape.index_page(page)
        parts = iter(self._form.parts(self._heads, with_index=index_page is not None))
        for layer in self._pool.layers:
            yield layer.k_PGBD[page], next(parts), False
            yield layer.v_PGBD[page], next(parts), False
            for tensor in (layer.index_k_PBD, layer.index_copy_PX):
                if tensor is not None and index_page is not None:
                    yield tensor[index_page], next(parts), True


class FollowerPort:
    """What a rank that follows does with the leader's orders.

    Args:
        own: of this rank.
        mesh: all ranks.
        book: of its encoder.
    """

    def __init__(self, own: RankPort, mesh: Adder, book: Book) -> None:
        self._own = own
        self._mesh = mesh
        self._book = book

    def obey(self, order: Order) -> None:
        if isinstance(order, DropFeatures):
            self._own.drop_features(order.key)
            self._book.forget([order.key])
            return
        is_page = not isinstance(order, KeepFeatures)
        size = self._own.page_bytes if is_page else order.num_rows * self._own.row_bytes
        content = torch.zeros(size, dtype=torch.uint8, device=self._own.device)
        if isinstance(order, ReadPage):
            self._own.give(order.page, content)
        content = self._mesh.all_reduce(content)
        if isinstance(order, WritePage):
            self._own.take(order.page, content)
        elif isinstance(order, KeepFeatures):
            self._own.keep(order.key, content)
            self._book.mark_encoded(order.key)


class LeaderPort:
    """The port of a worker of several ranks.

    Args:
        own: of the leading rank.
        mesh: all ranks.
        tell: gives an order to all other ranks.
    """

    def __init__(self, own: RankPort, mesh: Adder, tell: Callable[[Order], None]) -> None:
        self._own = own
        self._mesh = mesh
        self._tell = tell

    @property
    def page_bytes(self) -> int:
        return self._own.page_bytes

    def read_page(self, page: int) -> Data:
        content = torch.zeros(self.page_bytes, dtype=torch.uint8, device=self._own.device)
        self._own.give(page, content)
        with self._all(ReadPage(page)):
            return _to_host(self._mesh.all_reduce(content))

    def write_page(self, page: int, content: Data) -> None:
        whole = _own_copy(_to_device(content, self.page_bytes, self._own.device))
        with self._all(WritePage(page)):
            self._own.take(page, self._mesh.all_reduce(whole))

    def read_features(self, key: bytes, part: slice) -> Data:
        # every rank has them whole
        return self._own.read_features(key, part)

    def keep_features(self, key: bytes, content: Data) -> None:
        num_rows = self._own.num_rows(content)
        whole = _own_copy(_to_device(content, num_rows * self._own.row_bytes, self._own.device))
        with self._all(KeepFeatures(key, num_rows)):
            self._own.keep(key, self._mesh.all_reduce(whole))

    def drop_features(self, key: bytes) -> None:
        with self._all(DropFeatures(key)):
            self._own.drop_features(key)

    @contextmanager
    def _all(self, order: Order) -> Iterator[None]:
        """Something that all ranks do; what fails here has left them out of step for good."""
        self._tell(order)
        try:
            yield
        except Exception as error:
            raise FatalStepError(
                f"the ranks could not {type(order).__name__}: {type(error).__name__}: {error}"
            ) from error


def _to_device(content: Data, num_bytes: int, device: torch.device) -> Tensor:
    if len(content) != num_bytes:
        raise ValueError(f"a content has {len(content)} bytes, expected {num_bytes}")
    # torch takes memory that can be written to without a word
    memory = bytearray(content) if memoryview(content).readonly else content
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(memory, dtype=torch.uint8).to(device)


def _own_copy(content: Tensor) -> Tensor:
    """The same where a sum over the ranks may write."""
    return content.clone() if content.device.type == "cpu" else content


def _to_host(content: Tensor) -> memoryview:
    """The memory of a uint8 vector, brought to the host behind whatever still writes to it."""
    return memoryview(content.cpu().numpy())  # type: ignore[arg-type]
