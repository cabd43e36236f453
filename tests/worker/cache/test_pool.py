"""Shapes and sizes of the cache tensors."""

from __future__ import annotations

from dataclasses import replace

import torch

from m3stack.cache.pool import KvPool, PageShape


def test_page_bytes_are_what_the_tensors_take() -> None:
    shape = PageShape((False, True, True), 4, 32, 16, 128, torch.float32)
    pool = KvPool(shape, 5, torch.device("cpu"))
    tensors = [
        tensor
        for layer in pool.layers
        for tensor in (layer.k_PGBD, layer.v_PGBD, layer.index_k_PBD)
        if tensor is not None
    ]
    assert pool.num_bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert shape.bytes_per_page * 5 == pool.num_bytes


def test_released_model_takes_the_published_bytes_a_token() -> None:
    shape = PageShape((False,) * 3 + (True,) * 57, 4, 128, 128, 128, torch.bfloat16)
    assert shape.bytes_per_page == 128 * 137_472


def test_a_copy_of_the_index_keys_counts_in_a_page() -> None:
    plain = PageShape((False, True, True), 4, 32, 16, 128, torch.float32)
    shape = replace(plain, index_copy=True)
    assert shape.bytes_per_page == plain.bytes_per_page + 2 * 128 * (16 + 4)
    pool = KvPool(shape, 5, torch.device("cpu"))
    assert [layer.index_copy_PX is not None for layer in pool.layers] == [False, True, True]
    copies = [layer.index_copy_PX for layer in pool.layers if layer.index_copy_PX is not None]
    assert {tuple(copy.shape) for copy in copies} == {(5, 128 * 20)}
    released = PageShape((False,) * 3 + (True,) * 57, 4, 128, 128, 128, torch.bfloat16)
    with_copy = replace(released, index_copy=True)
    assert with_copy.bytes_per_page == 128 * (137_472 + 57 * 132)


def test_e4m3_keys_and_values_of_sparse_layers_take_half_the_bytes() -> None:
    plain = PageShape((False, True, True), 4, 32, 16, 128, torch.bfloat16)
    shape = replace(plain, kv_dtype=torch.float8_e4m3fn)
    assert plain.bytes_per_page - shape.bytes_per_page == 2 * 2 * 4 * 32 * 128
    pool = KvPool(shape, 3, torch.device("cpu"))
    assert [layer.k_PGBD.dtype for layer in pool.layers] == [torch.bfloat16] + [
        torch.float8_e4m3fn
    ] * 2
    assert pool.num_bytes == sum(
        part.nbytes
        for layer in pool.layers
        for part in (layer.k_PGBD, layer.v_PGBD, layer.index_k_PBD)
        if part is not None
    )


def test_dense_layers_have_no_index_keys() -> None:
    pool = KvPool(PageShape((False, True), 2, 8, 4, 16, torch.bfloat16), 3, torch.device("cpu"))
    dense, sparse = pool.layers
    assert dense.index_k_PBD is None
    assert sparse.index_k_PBD is not None
    assert sparse.index_k_PBD.shape == (3, 16, 4)
    assert sparse.k_PGBD.shape == sparse.v_PGBD.shape == (3, 2, 16, 8)


def test_index_keys_held_in_parts_stand_on_one_rank_each_and_end_in_a_row_of_nothing() -> None:
    shapes = [
        PageShape((True,), 1, 8, 6, 16, torch.bfloat16, index_rank=rank, index_ranks=3)
        for rank in range(3)
    ]
    for page in range(8):
        rows = [shape.index_page(page) for shape in shapes]
        assert rows == [page // 3 if rank == page % 3 else None for rank in range(3)]
    pool = KvPool(shapes[1], 7, torch.device("cpu"))
    (layer,) = pool.layers
    assert layer.index_k_PBD is not None
    assert layer.index_k_PBD.shape == (4, 16, 6)
    assert layer.index_k_PBD[-1].isnan().all()
    assert shapes[1].bytes_per_page == (2 * 8 + 2) * 16 * 2
    assert shapes[1].whole_bytes_per_page == (2 * 8 + 6) * 16 * 2
