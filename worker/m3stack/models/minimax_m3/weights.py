"""Fills a model, or one rank's part of it, from safetensors files: every tensor once, or an error.

Files are read piece by piece through one buffer, so that host memory stays bounded whatever their
size. Quantised weights are decoded on the way, or kept as they are for kernels that take them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from m3stack.errors import StartupError
from m3stack.kernels.interface import Kernels, Mxfp8Weight
from m3stack.kernels.quantised import mxfp8, nvfp4
from m3stack.layers import Place
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.model import M3Model
from m3stack.models.minimax_m3.quantization import WeightFormat
from m3stack.models.minimax_m3.ranks import WHOLE, Rank, Span
from m3stack.models.minimax_m3.slices import Slice, parameter_shapes, rank_slices
from m3stack.models.minimax_m3.stored import Part, Stored, stored_tensors
from m3stack.parallel import ALONE, Mesh
from m3stack.weight_files.directory import Shards, complain, read_shards
from m3stack.weight_files.header import TensorEntry
from m3stack.weight_files.reader import Buffer, FileReader

Progress = Callable[[int, int], None]

# decoding goes through fp32, which takes several times the bytes and should stay in a cache
DECODED_BYTES = 1 << 20

SCALE_SUFFIX = "_scale"
"""A kept MXFP8 parameter's scales stand in a parameter of its name with this behind it."""


def load_model(
    path: Path | str,
    *,
    config: M3Config,
    kernels: Kernels,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    keep_quantised: bool = False,
    mesh: Mesh = ALONE,
    rank: Rank = WHOLE,
) -> M3Model:
    """Builds the model on a device and fills it.

    Args:
        path: the checkpoint directory: `model.safetensors`, or shards and their index.
        config: of that directory.
        dtype: of the model; router weight, router bias and patch embedding stay fp32.
        progress: called with bytes done and bytes in all, first with 0, last with both equal; may
            raise to end the loading.
        keep_quantised: MXFP8 weights stay MXFP8; otherwise they are decoded to `dtype`.
        mesh: the ranks that share the model.
        rank: this one of them, whose part is loaded.

    Raises:
        StartupError: a file, tensor or index entry that is missing, unknown, doubled or
            unreadable; a tensor of another shape or dtype; weights that cannot be kept quantised.
    """
    checkpoint = open_checkpoint(path, config)
    slices = rank_slices(config, rank)
    if keep_quantised:
        _require_mxfp8(path, slices)
    place = Place(device, dtype, keeps_mxfp8=keep_quantised)
    model = M3Model(config, kernels=kernels, place=place, mesh=mesh, rank=rank)
    targets = {name: parameter.detach() for name, parameter in model.named_parameters()}
    fill(checkpoint, slices, targets, progress)
    return model


def holds_mxfp8_alone(config: M3Config) -> bool:
    """Whether every text linear of the checkpoint is in MXFP8, so that all can stay so."""
    slices = rank_slices(config, WHOLE)
    return all(item.stored is WeightFormat.MXFP8 for item in slices.values() if item.is_quantisable)


def load_rank(
    path: Path | str,
    *,
    config: M3Config,
    rank: Rank,
    place: Place,
    progress: Progress,
) -> dict[str, Tensor]:
    """One rank's part of all parameters, by the names of `M3Model.named_parameters`.

    Only rows that the rank needs are read. Parameters that stack experts hold the rank's own.

    Args:
        place: where the tensors are to be, and in what dtype; with `keeps_mxfp8`, elements stand
            under the parameter's name and scales under that name and `SCALE_SUFFIX`.

    Raises:
        StartupError: as `load_model`, and sizes that do not divide over the ranks.
    """
    checkpoint = open_checkpoint(path, config)
    slices = rank_slices(config, rank)
    if place.keeps_mxfp8:
        _require_mxfp8(path, slices)
    targets = _allocate(slices, place)
    fill(checkpoint, slices, targets, progress)
    return targets


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Files whose tensors are the ones that config.json calls for.

    Attributes:
        shards: file -> its tensors.
        parts: plain tensor -> what stores it: (file, name there, what it is).
    """

    shards: Shards
    parts: Mapping[str, Mapping[Part, tuple[Path, str, Stored]]]

    def entry(self, weight: str, part: Part) -> tuple[Path, str, TensorEntry]:
        """Where a part of a plain tensor stands."""
        file, name, _ = self.parts[weight][part]
        return file, name, self.shards[file][name]


def open_checkpoint(path: Path | str, config: M3Config) -> Checkpoint:
    """Checks the names, shapes and dtypes of all tensors from the files' headers.

    Raises:
        StartupError: as `load_model`.
    """
    directory, stored = Path(path), stored_tensors(config)
    shards = read_shards(directory)
    held = {name: file for file, entries in shards.items() for name in entries}
    needed = {name for name, item in stored.items() if not item.is_optional}
    complain(f"{directory} lacks", needed - set(held), "which config.json calls for")
    complain(f"{directory} holds", set(held) - set(stored), "which config.json has no place for")
    parts: defaultdict[str, dict[Part, tuple[Path, str, Stored]]] = defaultdict(dict)
    for name, file in held.items():
        item, entry = stored[name], shards[file][name]
        if entry.shape != item.shape:
            raise StartupError(
                f"{file.name}: tensor {name} has shape {list(entry.shape)}, "
                f"config.json calls for {list(item.shape)}"
            )
        if entry.dtype not in item.dtypes:
            raise StartupError(
                f"{file.name}: tensor {name} has dtype {entry.dtype}, "
                f"expected one of {', '.join(item.dtypes)}"
            )
        parts[item.weight][item.part] = (file, name, item)
    return Checkpoint(shards, parts)


def fill(
    checkpoint: Checkpoint,
    slices: Mapping[str, Slice],
    targets: Mapping[str, Tensor],
    progress: Progress,
) -> None:
    """Copies every slice into its target, in the order of the files' bytes."""
    total = sum(
        _read_bytes(checkpoint, weight, part, item)
        for weight, item in slices.items()
        for part in checkpoint.parts[weight]
        if part is not Part.INPUT_SCALE
    )
    device = next(iter(targets.values())).device
    done = 0
    progress(done, total)
    with ExitStack() as stack:
        buffer = Buffer(pinned=device.type == "cuda")
        readers = {
            file: stack.enter_context(FileReader(file, buffer)) for file in checkpoint.shards
        }
        source = _Source(checkpoint, readers)
        for weight in sorted(slices, key=source.position):
            for num_bytes in _fill_one(source, weight, slices[weight], targets):
                done += num_bytes
                progress(done, total)
    assert done == total, (done, total)


class _Source:
    """Open files and what stands where in them."""

    def __init__(self, checkpoint: Checkpoint, readers: Mapping[Path, FileReader]) -> None:
        self._checkpoint, self._readers = checkpoint, readers
        self._order = {file: index for index, file in enumerate(checkpoint.shards)}

    def position(self, weight: str) -> tuple[int, int]:
        """File number and offset of a weight's largest part."""
        parts = self._checkpoint.parts[weight]
        main = Part.VALUES if Part.VALUES in parts else Part.ELEMENTS
        file, _, entry = self._checkpoint.entry(weight, main)
        return self._order[file], entry.start

    def pieces(
        self, weight: str, part: Part, rows: Span, at_most: int | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Some rows of a part; see `FileReader.pieces`."""
        file, name, entry = self._checkpoint.entry(weight, part)
        span = range(rows.first, rows.first + rows.count)
        return self._readers[file].pieces(name, entry, span, at_most)

    def all_of(self, weight: str, part: Part, rows: Span, device: torch.device) -> Tensor:
        """The same at once, copied out of the buffer: for scales, which are small."""
        pieces = [piece.to(device, copy=True) for _, piece in self.pieces(weight, part, rows)]
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def _fill_one(
    source: _Source, weight: str, item: Slice, targets: Mapping[str, Tensor]
) -> Iterator[int]:
    """Fills one slice; yields the bytes read since the last time."""
    values = targets[item.parameter]
    scales = targets.get(item.parameter + SCALE_SUFFIX)
    if item.stored is WeightFormat.PLAIN:
        yield from _copy(source, weight, Part.VALUES, item, values)
    elif scales is not None:
        in_groups = replace(item, columns=item.columns.divided(mxfp8.GROUP_VALUES))
        yield from _copy(source, weight, Part.SCALES, in_groups, scales)
        yield from _copy(source, weight, Part.ELEMENTS, item, values)
        _require_usual(weight, _target_rows(item, values), _target_rows(item, scales))
    else:
        yield from _decode(source, weight, item, values)


def _require_usual(weight: str, elements: Tensor, scales: Tensor) -> None:
    """Kernels that decode in registers have no time for what no trained weight holds."""
    is_nan = (elements.view(torch.uint8) & 0x7F) == 0x7F
    is_huge = scales > mxfp8.MOST_KEPT_SCALE
    if bool(is_nan.any() | is_huge.any()):
        raise StartupError(
            f"tensor {weight} holds a NaN or a scale above {mxfp8.MOST_KEPT_SCALE} (2^7), which "
            "cannot be kept in MXFP8; set mxfp8_weights to decode"
        )


def _copy(source: _Source, weight: str, part: Part, item: Slice, target: Tensor) -> Iterator[int]:
    rows = _target_rows(item, target)
    for row, piece in source.pieces(weight, part, item.rows):
        first = row - item.rows.first
        rows[first : first + len(piece)].copy_(_columns(piece, item.columns))
        yield piece.nbytes


def _decode(source: _Source, weight: str, item: Slice, target: Tensor) -> Iterator[int]:
    rows, device = _target_rows(item, target), target.device
    scales = source.all_of(weight, Part.SCALES, item.rows, device)
    yield scales.nbytes
    factor = None
    if item.stored is WeightFormat.NVFP4:
        factor = source.all_of(weight, Part.GLOBAL_SCALE, Span(0, 1), device)
        yield factor.nbytes
    for row, piece in source.pieces(weight, Part.ELEMENTS, item.rows, DECODED_BYTES):
        first = row - item.rows.first
        own = slice(first, first + len(piece))
        elements = piece.to(device)
        if factor is None:
            columns, groups = item.columns, item.columns.divided(mxfp8.GROUP_VALUES)
            coded = Mxfp8Weight(_columns(elements, columns), _columns(scales[own], groups))
            decoded = mxfp8.decode(coded, target.dtype)
        else:
            columns, groups = item.columns.divided(2), item.columns.divided(nvfp4.GROUP_VALUES)
            decoded = nvfp4.decode(
                _columns(elements, columns), _columns(scales[own], groups), factor, target.dtype
            )
        rows[own].copy_(decoded)
        yield piece.nbytes


def _target_rows(item: Slice, target: Tensor) -> Tensor:
    """The rows of a parameter that a slice fills, as a matrix."""
    if item.expert is not None:
        target = target[item.expert]
    rows = target.narrow(0, item.first_row, item.rows.count)
    return rows.unsqueeze(-1) if rows.dim() == 1 else rows


def _columns(rows: Tensor, columns: Span) -> Tensor:
    return rows.narrow(-1, columns.first, columns.count)


def _read_bytes(checkpoint: Checkpoint, weight: str, part: Part, item: Slice) -> int:
    _, _, entry = checkpoint.entry(weight, part)
    if not entry.shape:
        return entry.num_bytes
    return entry.num_bytes // entry.shape[0] * item.rows.count


def _allocate(slices: Mapping[str, Slice], place: Place) -> dict[str, Tensor]:
    """Uninitialised tensors for a rank's parameters."""
    shapes = parameter_shapes(slices)
    is_vector = {item.parameter for item in slices.values() if item.is_vector}
    targets: dict[str, Tensor] = {}
    for item in slices.values():
        name = item.parameter
        if name in targets:
            continue
        shape = shapes[name]
        if place.keeps_mxfp8 and item.stored is WeightFormat.MXFP8:
            groups = (*shape[:-1], shape[-1] // mxfp8.GROUP_VALUES)
            targets[name] = torch.empty(shape, dtype=torch.float8_e4m3fn, device=place.device)
            targets[name + SCALE_SUFFIX] = torch.empty(
                groups, dtype=torch.uint8, device=place.device
            )
            continue
        dtype = torch.float32 if item.keeps_fp32 else place.dtype
        shape = shape[:-1] if name in is_vector else shape
        targets[name] = torch.empty(shape, dtype=dtype, device=place.device)
    return targets


def _require_mxfp8(path: Path | str, slices: Mapping[str, Slice]) -> None:
    plain = sorted(
        name
        for name, item in slices.items()
        if item.is_quantisable and item.stored is not WeightFormat.MXFP8
    )
    if plain:
        raise StartupError(
            f"{path}: weights can be kept quantised only where all linears of the text model are "
            f"in MXFP8; {plain[0]} is in {slices[plain[0]].stored.value}; decode them instead"
        )
