"""Small tensors to the device and results back, without making the host wait for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(
    values: Sequence[int] | Sequence[float] | Tensor,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The values on the device, in order behind what is queued; on a CPU nothing is copied."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if device.type == "cpu":
        return tensor
    # pinned memory lets the copy run beside the host; torch keeps it alive until done
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """A copy of a tensor that is on its way to the host.

    Args:
        tensor: must not be changed before `get`, if it is on the host already.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            self._copy = tensor
            return
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._copy.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def get(self) -> Tensor:
        """The copy, once it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy
