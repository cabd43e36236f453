"""Shapes and sizes of the cache tensors."""

from __future__ import annotations

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


def test_dense_layers_have_no_index_keys() -> None:
    pool = KvPool(PageShape((False, True), 2, 8, 4, 16, torch.bfloat16), 3, torch.device("cpu"))
    dense, sparse = pool.layers
    assert dense.index_k_PBD is None
    assert sparse.index_k_PBD is not None
    assert sparse.index_k_PBD.shape == (3, 16, 4)
    assert sparse.k_PGBD.shape == sparse.v_PGBD.shape == (3, 2, 16, 8)
