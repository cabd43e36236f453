"""A page is the same bytes on the wire, whatever ranks it came from and goes to."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from m3stack.cache.pool import KvPool, PageShape
from m3stack.engine.encoder import FollowerBook
from m3stack.engine.plan import FatalStepError
from m3stack.models.minimax_m3.config import M3Config
from m3stack.transfer.layout import feature_layout, page_form, page_layout, weights_id
from m3stack.transfer.port import FollowerPort, LeaderPort, Order, RankPort
from tests.parity import golden

CPU = torch.device("cpu")
HEADS, PAGES = 4, 6
WIDTH = 8


class Features:
    """Features by key, as an encoder keeps them."""

    def __init__(self) -> None:
        self.held: dict[bytes, Tensor] = {}

    def features(self, key: bytes) -> Tensor:
        return self.held[key]

    def adopt(self, key: bytes, features: Tensor) -> None:
        self.held[key] = features

    def drop(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.held.pop(key, None)


class Together:
    """A sum over ranks that are threads."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks)
        self.given: list[Tensor] = []

    def all_reduce(self, x: Tensor) -> Tensor:
        self.given.append(x.clone())
        self.barrier.wait(100)
        total = torch.stack(self.given).sum(0, dtype=x.dtype)
        # none may begin the next one before all have this one's sum
        if self.barrier.wait(100) == 0:
            self.given.clear()
        self.barrier.wait(100)
        return total


class Group:
    """The ranks of a worker in one process: what the leader tells is done by the others."""

    def __init__(self, shape: PageShape, ranks: int, *, in_parts: bool) -> None:
        self.form = page_form(shape, HEADS)
        self.pools: list[KvPool] = []
        self.features = [Features() for _ in range(ranks)]
        self.books = [FollowerBook() for _ in range(ranks - 1)]
        self.threads: list[threading.Thread] = []
        ports: list[RankPort] = []
        for rank in range(ranks):
            own = dataclasses.replace(
                shape,
                num_kv_heads=max(1, HEADS // ranks),
                index_rank=rank if in_parts else 0,
                index_ranks=ranks if in_parts else 1,
            )
            pool = KvPool(own, PAGES, CPU)
            first = rank * HEADS // ranks
            self.pools.append(pool)
            ports.append(
                RankPort(
                    pool,
                    self.form,
                    range(first, first + own.num_kv_heads),
                    features=self.features[rank],
                    width=WIDTH,
                    device=CPU,
                    gives_heads=rank % max(1, ranks // HEADS) == 0,
                    gives_index=in_parts or rank == 0,
                )
            )
            # on the wire every rank's pages have one form
            assert page_form(own, HEADS) == self.form
        mesh = Together(ranks)
        self.followers = [
            FollowerPort(port, mesh, book) for port, book in zip(ports[1:], self.books, strict=True)
        ]
        self.port = LeaderPort(ports[0], mesh, self.tell) if ranks > 1 else ports[0]

    def tell(self, order: Order) -> None:
        for thread in self.threads:
            thread.join(20)
        self.threads = [
            threading.Thread(target=follower.obey, args=(order,)) for follower in self.followers
        ]
        for thread in self.threads:
            thread.start()

    def settle(self) -> None:
        """Waits until all ranks have done what they were told."""
        for thread in self.threads:
            thread.join(20)

    def heads(self, layer: int, page: int) -> list[bytes]:
        """K of each head of a page, then V."""
        found: dict[tuple[str, int], bytes] = {}
        for rank, pool in enumerate(self.pools):
            first = rank * HEADS // len(self.pools)
            for name in ("k_PGBD", "v_PGBD"):
                for place, head in enumerate(getattr(pool.layers[layer], name)[page]):
                    data = head.contiguous().view(torch.uint8).numpy().tobytes()
                    assert found.setdefault((name, first + place), data) == data
        return [found[key] for key in sorted(found)]

    def index(self, layer: int, page: int) -> set[tuple[bytes, ...]]:
        """Index keys and copy of a page, wherever they are held."""
        found: set[tuple[bytes, ...]] = set()
        for pool in self.pools:
            row = pool.shape.index_page(page)
            pages = pool.layers[layer]
            if row is None or pages.index_k_PBD is None:
                continue
            tensors = [pages.index_k_PBD[row]]
            if pages.index_copy_PX is not None:
                tensors.append(pages.index_copy_PX[row])
            found.add(tuple(t.view(torch.uint8).numpy().tobytes() for t in tensors))
        return found


SHAPES = {
    "float32": PageShape((False, True, True), HEADS, 16, 8, 4, torch.float32),
    "bfloat16 with a copy": PageShape(
        (False, True), HEADS, 16, 8, 4, torch.bfloat16, index_copy=True
    ),
    "e4m3 on sparse layers": PageShape(
        (True, False), HEADS, 16, 8, 4, torch.bfloat16, kv_dtype=torch.float8_e4m3fn
    ),
    "dense alone": PageShape((False,), HEADS, 16, 8, 4, torch.float32),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize(
    ("source", "target"),
    [((1, False), (2, False)), ((2, False), (4, True)), ((4, True), (1, False)),
     ((2, True), (2, True)), ((8, False), (2, True)), ((1, False), (8, False))],
)  # fmt: skip
def test_any_ranks_to_any_ranks(
    shape: PageShape, source: tuple[int, bool], target: tuple[int, bool]
) -> None:
    if shape.index_copy and (source[1] or target[1]):
        pytest.skip("index keys in parts have no copy")
    torch.manual_seed(3)
    first = Group(shape, source[0], in_parts=source[1])
    second = Group(shape, target[0], in_parts=target[1])
    content = torch.randint(0, 256, (first.form.num_bytes,), dtype=torch.uint8)
    data = content.numpy().tobytes()
    # every page number: of index keys in parts, another rank holds each
    for page in range(PAGES):
        first.port.write_page(page, data)
        assert first.port.read_page(page) == data
        moved = PAGES - 1 - page
        second.port.write_page(moved, first.port.read_page(page))
        assert second.port.read_page(moved) == data
        first.settle()
        second.settle()
        for layer in range(len(shape.sparse_layers)):
            assert first.heads(layer, page) == second.heads(layer, moved)
            assert len(first.heads(layer, page)) == 2 * HEADS
            assert first.index(layer, page) == second.index(layer, moved)
            assert len(first.index(layer, page)) == int(shape.sparse_layers[layer])


def test_a_page_of_another_size_is_not_written() -> None:
    group = Group(SHAPES["float32"], 2, in_parts=False)
    with pytest.raises(ValueError, match="bytes, expected"):
        group.port.write_page(0, bytes(group.form.num_bytes - 1))


def test_features_reach_every_rank_and_its_book() -> None:
    group = Group(SHAPES["bfloat16 with a copy"], 2, in_parts=False)
    given = torch.randn(5, WIDTH).to(torch.bfloat16)
    data = given.view(torch.uint8).numpy().tobytes()
    group.port.keep_features(b"new", data)
    group.settle()
    for features in group.features:
        assert torch.equal(features.held[b"new"], given)
    assert group.books[0].is_encoded(b"new")
    assert group.port.read_features(b"new", slice(0, 100)) == data
    assert group.port.read_features(b"new", slice(16, 24)) == data[16:24]
    group.port.drop_features(b"new")
    group.settle()
    assert [features.held for features in group.features] == [{}, {}]
    # it would be uploaded again, and encoded on every rank
    assert not group.books[0].is_encoded(b"new")


def test_ranks_that_fall_out_of_step_end_the_worker() -> None:
    group = Group(SHAPES["float32"], 2, in_parts=False)

    class Broken:
        def all_reduce(self, x: Tensor) -> Tensor:
            raise RuntimeError("a rank is gone")

    own = group.port._own
    port = LeaderPort(own, Broken(), lambda order: None)
    with pytest.raises(FatalStepError, match="a rank is gone"):
        port.read_page(0)
    with pytest.raises(FatalStepError):
        port.write_page(0, bytes(group.form.num_bytes))


def test_layouts_tell_apart_all_that_pages_depend_on(tmp_path: Path) -> None:
    model = M3Config.from_dir(golden.DIRECTORY)
    shape = PageShape(model.sparse_layers, 4, 16, 8, 128, torch.bfloat16)
    variants = [
        shape,
        dataclasses.replace(shape, dtype=torch.float32),
        dataclasses.replace(shape, kv_dtype=torch.float8_e4m3fn),
        dataclasses.replace(shape, index_copy=True),
        dataclasses.replace(shape, sparse_layers=(True,) * 4),
        dataclasses.replace(shape, page_tokens=64),
    ]
    texts = [page_layout(variant, model, "w") for variant in variants]
    texts += [page_layout(shape, model, "other weights")]
    texts += [feature_layout(model, dtype, "w") for dtype in (torch.float32, torch.bfloat16)]
    assert len(set(texts)) == len(texts)
    # how a worker divides its heads and index keys is nobody else's business
    divided = dataclasses.replace(shape, num_kv_heads=1, index_rank=2, index_ranks=4)
    assert page_layout(divided, model, "w") == texts[0]


def test_weights_of_equal_shapes_are_told_apart_by_samples(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    content = bytearray(b"w" * 1_000_000)
    file.write_bytes(content)
    names = {weights_id(tmp_path)}
    assert names == {weights_id(tmp_path)}
    for place in (0, 350_000, 700_000, 999_999):
        content[place] ^= 1
        file.write_bytes(content)
        names.add(weights_id(tmp_path))
    (tmp_path / "config.json").write_text("{ }")
    names.add(weights_id(tmp_path))
    assert len(names) == 6
