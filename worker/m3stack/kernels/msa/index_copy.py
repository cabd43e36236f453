"""The int8 copy of index keys: what is stored, how it bounds a score, and its plain writer.

A copy lets decode read one byte a value first and bf16 keys only where they can matter, with the
same choice of blocks. Proof and constants: docs/decisions/0010 and 0013.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# share of |k| added to the stored bound: rounding of the query to 16 bits, of both fp32 scores
NORM_SHARE = 2.0**-11
# covers the rounding of the norms themselves
NORM_SLACK = 1.0 + 2.0**-10
# products of norms up to this never overflow; longer keys have no bound and are always rescored
MAX_NORM = 1.0e18
# keeps underflowed products inside the bound
MIN_BOUND = 1.0e-15
# scale and bound of a token, beside its int8 values
META_BYTES = 4


def page_bytes(page_tokens: int, dim: int) -> int:
    """Bytes of a page of the copy."""
    return page_tokens * (dim + META_BYTES)


@dataclass(frozen=True, slots=True)
class IndexCopy:
    """One-byte index keys of a pool, written beside the keys themselves.

    Attributes:
        keys_PBD: int8 [P, B, D].
        meta_PB: int32 [P, B]: bf16 scale in the low half, bf16 bound in the high half; NaN bound
            where the key has none.
    """

    keys_PBD: Tensor
    meta_PB: Tensor

    @staticmethod
    def over(pages_PX: Tensor, page_tokens: int) -> IndexCopy:
        """The copy that lives in these pages: uint8 [P, B * (D + 4)], keys first, then metas.

        A page is one piece of memory, so that one transfer brings both.
        """
        keys = pages_PX.shape[1] - page_tokens * META_BYTES
        return IndexCopy(
            pages_PX[:, :keys].view(torch.int8).unflatten(1, (page_tokens, keys // page_tokens)),
            pages_PX[:, keys:].view(torch.int32),
        )

    @staticmethod
    def empty_like(index_k_PBD: Tensor) -> IndexCopy:
        """Uninitialised copy for as many pages."""
        num_pages, page_tokens, dim = index_k_PBD.shape
        size = (num_pages, page_bytes(page_tokens, dim))
        pages_PX = torch.empty(size, dtype=torch.uint8, device=index_k_PBD.device)
        return IndexCopy.over(pages_PX, page_tokens)

    @staticmethod
    def of(index_k_PBD: Tensor, *, pages_at_once: int = 4096) -> IndexCopy:
        """The copy of whole pages, some at a time: the steps in between are in fp32."""
        copy = IndexCopy.empty_like(index_k_PBD)
        for first in range(0, index_k_PBD.shape[0], pages_at_once):
            part = slice(first, first + pages_at_once)
            copy.keys_PBD[part], copy.meta_PB[part] = copy_index_keys(index_k_PBD[part])
        return copy


def copy_index_keys(index_k: Tensor) -> tuple[Tensor, Tensor]:
    """The int8 keys and packed metas of any keys [..., D]: the meaning of every writer.

    Returns:
        int8 [..., D] and int32 [...] with |k - scale * key8| + 2^-11 |k| <= bound.
    """
    exact = index_k.float()
    largest = exact.abs().amax(-1)
    scale = round_up_to_bf16(largest / 127.0).clamp(min=2.0**-100)
    keys = (exact / scale[..., None]).round().clamp(-127, 127)
    residual = torch.linalg.vector_norm(exact - keys * scale[..., None], dim=-1)
    norm = torch.linalg.vector_norm(exact, dim=-1)
    bound = ((residual + NORM_SHARE * norm) * NORM_SLACK).clamp(min=MIN_BOUND)
    bounded = norm <= MAX_NORM  # false for NaN
    keys = torch.where(bounded[..., None], keys, 0.0).to(torch.int8)
    scale_bits = torch.where(bounded, scale, 0.0).view(torch.int32) >> 16
    bound_bits = round_up_to_bf16(bound).view(torch.int32)
    bound_bits = torch.where(bounded, bound_bits, 0x7FC00000)
    return keys, scale_bits | bound_bits


def round_up_to_bf16(positive: Tensor) -> Tensor:
    """Smallest bf16 value not below each positive fp32 value, still as fp32."""
    bits = positive.contiguous().view(torch.int32)
    return ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32)


def write_index_copy(index_k_PBD: Tensor, slots_T: Tensor, copy: IndexCopy) -> None:
    """Copies the keys in these slots of the pool; negative slots are left out.

    Args:
        index_k_PBD: [P, B, D], the keys already written.
        slots_T: int64 [T], `page * B + offset`.
        copy: written in place.
    """
    slots_T = slots_T[slots_T >= 0]
    page_T, offset_T = slots_T // index_k_PBD.shape[1], slots_T % index_k_PBD.shape[1]
    keys, metas = copy_index_keys(index_k_PBD[page_T, offset_T])
    copy.keys_PBD[page_T, offset_T] = keys
    copy.meta_PB[page_T, offset_T] = metas
