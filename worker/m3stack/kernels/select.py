"""Which back end serves each operation: chosen once at start, checked, and said aloud."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from enum import StrEnum

import torch

from m3stack.kernels.build import KernelUnavailableError
from m3stack.kernels.interface import Kernels
from m3stack.kernels.reference_table import reference_kernels
from m3stack.kernels.self_check import check_operation
from m3stack.kernels.shape import KernelShape

logger = logging.getLogger(__name__)


class BackEnd(StrEnum):
    """Back ends, the most special first. `torch` is torch's own fused attention."""

    FLASHINFER = "flashinfer"
    CUDA = "cuda"
    TRITON = "triton"
    TORCH = "torch"
    REFERENCE = "reference"


NAMES = ("auto", "reference", "triton", "cuda", "flashinfer")
# what a name may use: itself, and below it whatever serves the operations it does not have
LADDERS = {
    "auto": tuple(BackEnd),
    "flashinfer": tuple(BackEnd),
    "cuda": (BackEnd.CUDA, BackEnd.TRITON, BackEnd.TORCH, BackEnd.REFERENCE),
    "triton": (BackEnd.TRITON, BackEnd.TORCH, BackEnd.REFERENCE),
    "reference": (BackEnd.REFERENCE,),
}


def build_kernels(name: str, *, shape: KernelShape, device: torch.device) -> Kernels:
    """The table of operations for a model on a device.

    `auto` takes for each operation the first back end that runs and passes its check, and logs
    every one that does not. Another name makes that back end a duty for all operations it has.

    Args:
        name: one of `NAMES`.
        shape: what the model needs.
        device: where the kernels run; on a CPU `auto` is `reference`.

    Raises:
        KernelUnavailableError: an unknown name, or a named back end that cannot run here; the
            message holds the operation, the device and the reason.
    """
    if name not in NAMES:
        raise KernelUnavailableError(f"kernels is {name!r}, expected one of {', '.join(NAMES)}")
    reference = reference_kernels()
    if device.type == "cpu" and name in ("auto", "reference"):
        return reference
    if device.type != "cuda" and name != "reference":
        raise KernelUnavailableError(f"back end {name} needs a CUDA device, got {device.type}")
    supply = {rung: _supply(rung, name, shape, device) for rung in LADDERS[name]}
    chosen: dict[str, tuple[BackEnd, Callable]] = {}
    for field in dataclasses.fields(Kernels):
        if field.name != "name":
            chosen[field.name] = _choose(field.name, supply, name, shape, device)
    for operation, (rung, _) in chosen.items():
        logger.info("kernel op=%s back_end=%s", operation, rung)
    used = sorted({rung for _, (rung, _) in chosen.items()}, key=list(BackEnd).index)
    return Kernels(
        name=f"{name} ({', '.join(used)})",
        **{operation: run for operation, (_, run) in chosen.items()},
    )


def _supply(
    rung: BackEnd, name: str, shape: KernelShape, device: torch.device
) -> dict[str, Callable]:
    """The operations a back end has here; none, with a warning, where it cannot run."""
    try:
        return _operations(rung, shape, device)
    except KernelUnavailableError as reason:
        if rung == name:
            raise KernelUnavailableError(
                f"kernels = {name!r} cannot run on {_describe(device)}: {reason}"
            ) from reason
        logger.warning("kernel back end left out back_end=%s reason=%s", rung, reason)
        return {}


def _operations(rung: BackEnd, shape: KernelShape, device: torch.device) -> dict[str, Callable]:
    if rung is BackEnd.REFERENCE:
        reference = reference_kernels()
        names = [field.name for field in dataclasses.fields(Kernels) if field.name != "name"]
        return {operation: getattr(reference, operation) for operation in names}
    # costs a second of processor time, which a worker without a GPU need not spend at its start
    from m3stack.kernels import gpu_back_ends

    match rung:
        case BackEnd.FLASHINFER:
            return gpu_back_ends.flashinfer_operations(shape, device)
        case BackEnd.CUDA:
            return gpu_back_ends.cuda_operations(shape, device)
        case BackEnd.TRITON:
            return gpu_back_ends.triton_operations(shape, device)
        case BackEnd.TORCH:
            return gpu_back_ends.torch_operations()


def _choose(
    operation: str,
    supply: dict[BackEnd, dict[str, Callable]],
    name: str,
    shape: KernelShape,
    device: torch.device,
) -> tuple[BackEnd, Callable]:
    """First back end whose operation passes its check; the reference always does."""
    for rung, operations in supply.items():
        run = operations.get(operation)
        if run is None:
            continue
        if rung is BackEnd.REFERENCE:
            return rung, run
        try:
            check_operation(operation, run, reference_kernels(), shape, device)
        # a back end may fail in any way of its compiler or library: all of them mean "not here"
        except Exception as reason:
            if rung == name:
                raise KernelUnavailableError(
                    f"{operation}: back end {rung} fails on {_describe(device)}: {reason}"
                ) from reason
            logger.warning("kernel left out op=%s back_end=%s reason=%s", operation, rung, reason)
            continue
        return rung, run
    raise AssertionError("invariant: the reference has every operation")


def _describe(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
