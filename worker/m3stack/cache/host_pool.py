"""Host memory for pages that the device has no room for, and the copies to and from it."""

from __future__ import annotations

import torch
from torch import Tensor

from m3stack.batch import LayerCache
from m3stack.cache.host import CopyDirection, PageCopy
from m3stack.cache.pool import KvPool, PageShape


def slots_within(num_bytes: int, shape: PageShape) -> int:
    """Pages that a budget of host memory holds."""
    return num_bytes // shape.whole_bytes_per_page


class HostPool:
    """Slots of host memory, one page of all layers each; pinned where the pool is on a GPU.

    Copies are queued on the current stream in the order they are asked for, which is also the
    order in which later steps see them; nothing here waits for the device.

    Args:
        pool: where pages live.
        num_slots: pages held at most.
    """

    def __init__(self, pool: KvPool, num_slots: int) -> None:
        self._shape = pool.shape
        self._keys_values, self._index_keys = _tensors(pool.layers)
        is_pinned = self._keys_values[0].device.type == "cuda"

        def slots(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(
                torch.empty((num_slots, *part.shape[1:]), dtype=part.dtype, pin_memory=is_pinned)
                for part in tensors
            )

        self._host_keys_values, self._host_index_keys = (
            slots(self._keys_values),
            slots(self._index_keys),
        )
        self.num_slots = num_slots
        self.bytes_per_page = pool.shape.whole_bytes_per_page

    def copy(self, copy: PageCopy) -> None:
        """Moves K, V and, as far as they are held here, index-K and its copy, of all layers."""
        is_out = copy.direction is CopyDirection.TO_HOST
        parts = [(self._keys_values, self._host_keys_values, copy.page)]
        index_page = self._shape.index_page(copy.page)
        if index_page is not None:
            parts.append((self._index_keys, self._host_index_keys, index_page))
        for device_tensors, host_tensors, page in parts:
            for device, host in zip(device_tensors, host_tensors, strict=True):
                source, target = device[page], host[copy.slot]
                if not is_out:
                    source, target = target, source
                target.copy_(source, non_blocking=True)


def _tensors(layers: LayerCache) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    keys_values = tuple(part for layer in layers for part in (layer.k_PGBD, layer.v_PGBD))
    index = (part for layer in layers for part in (layer.index_k_PBD, layer.index_copy_PX))
    return keys_values, tuple(part for part in index if part is not None)
