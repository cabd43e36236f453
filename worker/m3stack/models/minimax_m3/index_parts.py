"""Choosing blocks together: each rank caches and scores the index keys of its own pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from m3stack.kernels.interface import Kernels, PagedRows, PartRows
from m3stack.kernels.msa.candidates import own_slots, part_of_rows
from m3stack.models.minimax_m3.config import M3Config
from m3stack.parallel import Mesh


@dataclass(frozen=True, slots=True)
class StepPart:
    """What a rank needs of a step for its part of the index keys.

    Attributes:
        rows: the step over the pages that are here.
        slots_T: int64, where each row's index key goes; -1 where another rank keeps it.
    """

    rows: PartRows
    slots_T: Tensor


class IndexParts:
    """Block choice over index keys in parts; every rank makes the same calls.

    Args:
        config: of the whole model.
        mesh: the ranks; page p is the business of rank `p % mesh.size`.
        device: where the model is.
    """

    def __init__(
        self, config: M3Config, *, kernels: Kernels, mesh: Mesh, device: torch.device
    ) -> None:
        self._kernels, self._mesh = kernels, mesh
        self._num_blocks, self._num_local = config.topk_blocks, config.num_local_blocks
        self._page_tokens = config.block_tokens
        groups, ranks = config.num_kv_heads, mesh.size
        # the groups that each rank attends with, rank by rank; ranks beyond one a group share it
        each = max(1, groups // ranks)
        wanted = [r * groups // ranks + i for r in range(ranks) for i in range(each)]
        self._wanted = None
        if wanted != list(range(groups)):
            self._wanted = torch.tensor(wanted, device=device)

    def of_step(self, rows: PagedRows, slots_T: Tensor, index_k_PBD: Tensor) -> StepPart:
        """A rank's part of a step; the same for all layers.

        Args:
            index_k_PBD: of any layer, ending in the row that belongs to no page.
        """
        rank, ranks = self._mesh.rank, self._mesh.size
        part = part_of_rows(
            rows,
            rank=rank,
            ranks=ranks,
            page_tokens=self._page_tokens,
            last_row=index_k_PBD.shape[0] - 1,
            num_local=self._num_local,
        )
        slots_T = own_slots(slots_T, rank=rank, ranks=ranks, page_tokens=self._page_tokens)
        return StepPart(part, slots_T)

    def choose_blocks(
        self, index_q_TGD: Tensor, index_k_PBD: Tensor, part: StepPart, rows: PagedRows
    ) -> Tensor:
        """Blocks for the groups of this rank, as one rank with all index keys chooses them.

        Args:
            index_q_TGD: [T, G, D] of all groups.
            index_k_PBD: the index keys of this rank's pages.
            rows: the whole step.

        Returns:
            int32 [groups of this rank, T, K].
        """
        candidates_GTK = self._kernels.choose_candidates(
            index_q_TGD, index_k_PBD, part.rows, self._num_blocks, self._num_local
        )
        if self._wanted is not None:
            candidates_GTK = candidates_GTK.index_select(0, self._wanted)
        found = self._mesh.all_to_all(candidates_GTK)
        found_RGTK = found.view(self._mesh.size, -1, *found.shape[1:])
        return self._kernels.merge_candidates(found_RGTK, rows, self._page_tokens, self._num_local)
