"""How the copy engine sees weights and tokens: the dims of their tensor maps, innermost first."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

MAP_BYTES = 128
COLUMNS = 64  # of a stage


@dataclass(frozen=True, slots=True)
class MapSizes:
    """What a map says beside its address.

    Attributes:
        sizes, strides: of each dim, in elements; of dims 1 and up, in bytes.
        box: elements of one copy.
    """

    element_bytes: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


def token_map(x: Tensor, box_tokens: int) -> MapSizes:
    """Rows of bf16 [T, M], dense in the last dim."""
    return MapSizes(2, (x.shape[1], x.shape[0]), (2 * x.stride(0),), (COLUMNS, box_tokens))


def up_map(weight: Tensor) -> MapSizes:
    """bf16 [E, 2F, M]: 8 rows of gates, then the ups of the same channels."""
    num_experts, rows, width = weight.shape
    row, inner = 2 * width, rows // 2
    return MapSizes(
        2,
        (width, 8, 2, inner // 8, num_experts),
        (row, inner * row, 8 * row, rows * row),
        (COLUMNS, 8, 2, 8, 1),
    )


def down_map(weight: Tensor) -> MapSizes:
    """bf16 [E, M, F]: of 16 rows the even ones, then the odd, so that a lane has neighbours."""
    num_experts, rows, width = weight.shape
    row = 2 * width
    return MapSizes(
        2,
        (width, 8, 2, rows // 16, num_experts),
        (2 * row, row, 16 * row, rows * row),
        (COLUMNS, 8, 2, 8, 1),
    )


def coded_map(elements: Tensor) -> MapSizes:
    """e4m3 [E, rows, columns]: of 8 rows the even ones, then the odd, for fewer bank conflicts."""
    num_experts, rows, width = elements.shape
    return MapSizes(
        1,
        (width, 4, 2, num_experts * rows // 8, 1),
        (2 * width, width, 8 * width, num_experts * rows * width),
        (COLUMNS, 4, 2, 8, 1),
    )


def wide_coded_map(elements: Tensor) -> MapSizes:
    """The same, two stages' columns at once: 8 rows by bits 1, 2 and 0 of their number."""
    num_experts, rows, width = elements.shape
    return MapSizes(
        1,
        (width, 2, 2, 2, num_experts * rows // 8),
        (width, 4 * width, 2 * width, 8 * width),
        (2 * COLUMNS, 2, 2, 2, 8),
    )
