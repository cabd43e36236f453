"""What a model forward receives and gives: the meeting point of engine and models."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from m3stack.kernels.interface import LayerPages, PagedRows


@dataclass(frozen=True, slots=True)
class MediaRows:
    """Vision features that replace the embeddings of some rows of a step.

    Attributes:
        rows_N: int64 [N], row numbers of the step.
        features_NM: [N, M] in the model's dtype.
    """

    rows_N: Tensor
    features_NM: Tensor


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """One step: the rows of all its sequences, back to back.

    Attributes:
        token_ids_T: int64 [T].
        positions_T: int64 [T], absolute position in the sequence.
        slots_T: int64 [T], cache slot `page * B + offset` of each row; negative writes nothing.
        rows: how the rows divide into sequences.
        sample_rows_S: int64 [number of logits rows wanted], row numbers of the step.
        media: features to scatter over rows; their rows do not overlap.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    rows: PagedRows
    sample_rows_S: Tensor
    media: tuple[MediaRows, ...]


@dataclass(frozen=True, slots=True)
class PatchBatch:
    """Media items encoded in one ViT call.

    Attributes:
        patches: one uint8 tensor [t*h*w, channels * frames_per_patch * patch_size^2] an item.
        frames_per_patch: 1 (a still, repeated over time by the model) or temporal_patch_size.
        grids_thw: grid of each item.
        mean, std: per channel, on the 0..1 scale.
    """

    patches: tuple[Tensor, ...]
    frames_per_patch: tuple[int, ...]
    grids_thw: tuple[tuple[int, int, int], ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]


LayerCache = tuple[LayerPages, ...]
