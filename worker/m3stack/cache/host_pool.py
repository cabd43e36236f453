"""Host memory for pages that the device has no room for, and the copies to and from it."""

from __future__ import annotations

import torch
from torch import Tensor

from m3stack.batch import LayerCache
from m3stack.cache.host import CopyDirection, PageCopy
from m3stack.cache.pool import KvPool, PageShape


def slots_within(num_bytes: int, shape: PageShape) -> int:
    """Pages that a budget of host memory holds."""
    return num_bytes // shape.bytes_per_page


class HostPool:
    """Slots of host memory, one page of all layers each; pinned where the pool is on a GPU.

    Copies are queued on the current stream in the order they are asked for, which is also the
    order in which later steps see them; nothing here waits for the device.

    Args:
        pool: where pages live.
        num_slots: pages held at most.
    """

    def __init__(self, pool: KvPool, num_slots: int) -> None:
        self._device = _tensors(pool.layers)
        is_pinned = self._device[0].device.type == "cuda"
        self._host = tuple(
            torch.empty((num_slots, *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=is_pinned)
            for tensor in self._device
        )
        self.num_slots = num_slots
        self.bytes_per_page = pool.shape.bytes_per_page

    def copy(self, copy: PageCopy) -> None:
        """Moves K, V and index-K of all layers of one page."""
        is_out = copy.direction is CopyDirection.TO_HOST
        for device, host in zip(self._device, self._host, strict=True):
            source, target = device[copy.page], host[copy.slot]
            if not is_out:
                source, target = target, source
            target.copy_(source, non_blocking=True)


def _tensors(layers: LayerCache) -> tuple[Tensor, ...]:
    found: list[Tensor] = []
    for layer in layers:
        found += [layer.k_PGBD, layer.v_PGBD]
        if layer.index_k_PBD is not None:
            found.append(layer.index_k_PBD)
    return tuple(found)
