"""Copies, encodes and decodes one weight on its way from file to file, and checks what it did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from m3stack.checkpoint_tools.conversion_plan import SCALES_SUFFIX, Item, Step
from m3stack.errors import StartupError
from m3stack.kernels.interface import Mxfp8Weight
from m3stack.kernels.quantised import mxfp8, nvfp4
from m3stack.models.minimax_m3.quantization import WeightFormat
from m3stack.models.minimax_m3.stored import Part
from m3stack.models.minimax_m3.weights import Checkpoint
from m3stack.weight_files.reader import FileReader
from m3stack.weight_files.writer import FileWriter

PIECE_BYTES = 8 << 20
# fp32 copies of a piece that stay in a CPU's cache make coding three times as fast
CODED_BYTES = {Step.ENCODE: 2 << 20, Step.DECODE: 1 << 20}


@dataclass(slots=True)
class Losses:
    """Squares summed over all encoded values: what rounding to MXFP8 took away."""

    squared_values: float = 0.0
    squared_errors: float = 0.0

    @property
    def relative(self) -> float:
        """Error relative to the weights, in the Frobenius norm; 0 if nothing was encoded."""
        if self.squared_values == 0.0:
            return 0.0
        return (self.squared_errors / self.squared_values) ** 0.5


class Converter:
    """Runs items of a plan.

    Args:
        source: the checkpoint read from.
        readers: of its files.
        device: that computes.
    """

    def __init__(
        self, source: Checkpoint, readers: Mapping[Path, FileReader], device: torch.device
    ) -> None:
        self._source, self._readers, self._device = source, readers, device
        self.losses = Losses()

    def run(self, item: Item, writer: FileWriter) -> Iterator[int]:
        """Writes all tensors of an item; yields the bytes written since the last time.

        Raises:
            StartupError: the weight holds values that the target's format cannot.
        """
        steps = {Step.COPY: self._copy, Step.ENCODE: self._encode, Step.DECODE: self._decode}
        yield from steps[item.step](item, writer)

    def _pieces(self, weight: str, part: Part, at_most: int) -> Iterator[tuple[int, Tensor]]:
        file, name, entry = self._source.entry(weight, part)
        rows = range(entry.shape[0] if entry.shape else 1)
        yield from self._readers[file].pieces(name, entry, rows, at_most)

    def _all_of(self, weight: str, part: Part) -> Tensor:
        pieces = self._pieces(weight, part, PIECE_BYTES)
        # copied out of the buffer, which the elements pass through next
        return torch.cat([piece.to(self._device, copy=True) for _, piece in pieces])

    def _copy(self, item: Item, writer: FileWriter) -> Iterator[int]:
        for row, piece in self._pieces(item.weight, Part.VALUES, PIECE_BYTES):
            writer.write(item.weight, row * piece[0].nbytes, piece)
            yield piece.nbytes

    def _encode(self, item: Item, writer: FileWriter) -> Iterator[int]:
        for row, piece in self._pieces(item.weight, Part.VALUES, CODED_BYTES[item.step]):
            values = piece.to(self._device)
            coded = mxfp8.encode(values)
            self._check_encoded(item.weight, values, coded)
            outputs = {item.weight: coded.elements, item.weight + SCALES_SUFFIX: coded.scales}
            for name, part in outputs.items():
                writer.write(name, row * part[0].nbytes, part)
                yield part.nbytes

    def _check_encoded(self, weight: str, values: Tensor, coded: Mxfp8Weight) -> None:
        if bool((coded.scales == mxfp8.NAN_SCALE).any()):
            raise StartupError(f"tensor {weight} holds a NaN or an infinity; the source is damaged")
        wide = values.float()
        error = mxfp8.decode(coded, torch.float32) - wide
        self.losses.squared_values += wide.square().sum(dtype=torch.float64).item()
        self.losses.squared_errors += error.square().sum(dtype=torch.float64).item()

    def _decode(self, item: Item, writer: FileWriter) -> Iterator[int]:
        scales = self._all_of(item.weight, Part.SCALES)
        factor = None
        if item.stored is WeightFormat.NVFP4:
            factor = self._all_of(item.weight, Part.GLOBAL_SCALE)
        for row, piece in self._pieces(item.weight, Part.ELEMENTS, CODED_BYTES[item.step]):
            own, elements = scales[row : row + len(piece)], piece.to(self._device)
            if factor is None:
                exact = mxfp8.decode(Mxfp8Weight(elements, own), torch.float32)
            else:
                exact = nvfp4.decode(elements, own, factor, torch.float32)
            values = exact.to(torch.bfloat16)
            if not bool(exact.isfinite().all()):
                raise StartupError(f"tensor {item.weight} holds a NaN; the source is damaged")
            # MXFP8 has fewer bits than bf16, and loses them only at the ends of its range
            if factor is None and not torch.equal(values.float(), exact):
                raise StartupError(
                    f"tensor {item.weight} has scales so small or large that bf16 cannot hold its "
                    "values; the source is damaged"
                )
            writer.write(item.weight, row * values[0].nbytes, values)
            yield values.nbytes
