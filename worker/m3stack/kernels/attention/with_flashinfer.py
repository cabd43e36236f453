"""Dense attention over pages and over packed rows through FlashInfer's planners.

FlashInfer plans on the host from lengths. A plan belongs to the rows of one step and serves all
layers of it; it is remade when other rows arrive. Inside a CUDA graph only `plan_decode` may be
used, planned before the capture and again by `DecodePlan.replan` before a replay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from m3stack.kernels.build import KernelUnavailableError
from m3stack.kernels.interface import LayerPages, PagedRows
from m3stack.kernels.shape import KernelShape

try:
    import flashinfer
except ImportError:  # an optional dependency: whoever asks for it gets a named error
    flashinfer = None

WORKSPACE_BYTES = 256 << 20
LAYOUT = "HND"
# other head dims are padded with zeros up to the next of these
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class HostRows:
    """Page counts and last page lengths of a step, on the host, as the planners want them."""

    page_start_S1: Tensor
    pages: Tensor
    last_page_len_S: Tensor
    query_start_S1: Tensor

    @staticmethod
    def of(rows: PagedRows, page_tokens: int) -> HostRows:
        """Waits for the device only where the rows' lengths are not known on the host."""
        if rows.host is None:
            starts_S1, lens_S = rows.query_start_S1.cpu(), rows.seq_lens_S.cpu().long()
        else:
            starts_S1, lens_S = rows.host.query_start_S1, rows.host.seq_lens_S.long()
        num_pages_S = (lens_S + page_tokens - 1) // page_tokens
        start_S1 = torch.cat([num_pages_S.new_zeros(1), num_pages_S.cumsum(0)])
        table_SJ = rows.page_table_SJ
        # where each page stands in the table, counted here: the device is asked for no number
        offset_S = torch.arange(len(lens_S)) * table_SJ.shape[1] - start_S1[:-1]
        places = torch.arange(int(start_S1[-1])) + offset_S.repeat_interleave(num_pages_S)
        if table_SJ.is_cuda:
            places = places.pin_memory().to(table_SJ.device, non_blocking=True)
        return HostRows(
            page_start_S1=start_S1.to(torch.int32),
            pages=table_SJ.flatten().index_select(0, places),
            last_page_len_S=torch.where(
                lens_S > 0, lens_S - (num_pages_S - 1).clamp(min=0) * page_tokens, 0
            ).to(torch.int32),
            query_start_S1=starts_S1,
        )


def refuse_other_models(shape: KernelShape) -> None:
    """Raises `KernelUnavailableError` for a model that FlashInfer has no kernels for.

    Said before anything is compiled, which takes FlashInfer minutes.
    """
    if shape.dtype not in DTYPES:
        names = ", ".join(str(dtype) for dtype in DTYPES)
        raise KernelUnavailableError(f"FlashInfer serves {names}, got {shape.dtype}")
    if shape.head_dim not in HEAD_DIMS:
        raise KernelUnavailableError(
            f"FlashInfer serves head dims {', '.join(map(str, HEAD_DIMS))}, got {shape.head_dim}"
        )


def require_flashinfer(operation: str) -> None:
    """Raises `KernelUnavailableError` where the library is not installed."""
    if flashinfer is None:
        raise KernelUnavailableError(
            f"{operation}: back end flashinfer is not installed (pip install flashinfer-python)"
        )


class DecodePlan:
    """Planned decode of one query row a sequence; calls may be captured in a CUDA graph."""

    def __init__(self, q_THD: Tensor, pages: LayerPages, rows: PagedRows, scale: float) -> None:
        require_flashinfer("paged attention")
        self._shape = (q_THD.shape[1], pages.k_PGBD.shape[1], q_THD.shape[2])
        self._dtypes = (q_THD.dtype, pages.k_PGBD.dtype)
        self._page_tokens = pages.k_PGBD.shape[2]
        self._scale = scale
        device = q_THD.device
        num_seqs, width = rows.page_table_SJ.shape
        self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device),
            LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=True,
            backend="fa2",
            paged_kv_indptr_buffer=torch.zeros(num_seqs + 1, dtype=torch.int32, device=device),
            paged_kv_indices_buffer=torch.zeros(num_seqs * width, dtype=torch.int32, device=device),
            paged_kv_last_page_len_buffer=torch.zeros(num_seqs, dtype=torch.int32, device=device),
        )
        self.replan(rows)

    def replan(self, rows: PagedRows) -> None:
        """Takes other lengths and tables for as many sequences; waits for the device."""
        host = HostRows.of(rows, self._page_tokens)
        heads, groups, dim = self._shape
        self._wrapper.plan(
            host.page_start_S1,
            host.pages,
            host.last_page_len_S,
            heads,
            groups,
            dim,
            self._page_tokens,
            q_data_type=self._dtypes[0],
            kv_data_type=self._dtypes[1],
            sm_scale=self._scale,
        )

    def __call__(self, q_THD: Tensor, pages: LayerPages) -> Tensor:
        """[T, H, D] in the dtype of q; T is the number of sequences."""
        return self._wrapper.run(q_THD, (pages.k_PGBD, pages.v_PGBD))


def plan_decode(q_THD: Tensor, pages: LayerPages, rows: PagedRows, scale: float) -> DecodePlan:
    """A decode plan for these rows and for tensors of these shapes.

    Raises:
        KernelUnavailableError: FlashInfer is not installed.
    """
    return DecodePlan(q_THD, pages, rows, scale)


class FlashInferAttention:
    """Dense attention of a worker: one live plan for each kind of call.

    A plan is written to pinned memory and copied from there behind what is queued already. With
    steps queued one behind another that copy may be under way when the next one is planned: plans
    of paged rows take two wrappers in turn, and a wrapper waits for its own last copy.
    """

    def __init__(self, device: torch.device) -> None:
        """Takes the workspaces.

        Raises:
            KernelUnavailableError: FlashInfer is not installed.
        """
        require_flashinfer("dense attention")
        self._workspaces = [
            torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device) for _ in range(3)
        ]
        self._paged = [
            flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, LAYOUT)
            for workspace in self._workspaces[:2]
        ]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._packed = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(self._workspaces[2], "NHD")
        self._planned_rows: tuple[PagedRows, float] | None = None
        self._planned_packed: tuple[Tensor, tuple[int, ...], float] | None = None

    def paged_attention(
        self, q_THD: Tensor, pages: LayerPages, rows: PagedRows, scale: float
    ) -> Tensor:
        """See `interface.PagedAttention`."""
        planned = self._planned_rows
        if planned is None or planned[0] is not rows or planned[1] != scale:
            self._refuse_capture("paged attention")
            groups, page_tokens, dim = pages.k_PGBD.shape[1:]
            host = HostRows.of(rows, page_tokens)
            self._turn = 1 - self._turn
            copied = self._copied[self._turn]
            if copied is not None:
                copied.synchronize()
            self._paged[self._turn].plan(
                host.query_start_S1,
                host.page_start_S1,
                host.pages,
                host.last_page_len_S,
                q_THD.shape[1],
                groups,
                dim,
                page_tokens,
                causal=True,
                sm_scale=scale,
                q_data_type=q_THD.dtype,
                kv_data_type=pages.k_PGBD.dtype,
            )
            self._copied[self._turn] = torch.cuda.Event()
            self._copied[self._turn].record()
            self._planned_rows = (rows, scale)
        out_THD = torch.zeros_like(q_THD)  # rows of empty sequences are written by nobody
        return self._paged[self._turn].run(q_THD, (pages.k_PGBD, pages.v_PGBD), out=out_THD)

    def varlen_attention(
        self,
        q_NHD: Tensor,
        k_NHD: Tensor,
        v_NHD: Tensor,
        cu_seqlens: Tensor,
        max_len: int,
        scale: float,
    ) -> Tensor:
        """See `interface.VarlenAttention`."""
        dim = q_NHD.shape[2]
        padded = next((size for size in HEAD_DIMS if size >= dim), None)
        if padded is None:
            raise KernelUnavailableError(
                f"variable-length attention: FlashInfer serves head dims up to {HEAD_DIMS[-1]}, "
                f"got {dim}"
            )
        if padded != dim:
            q_NHD, k_NHD, v_NHD = (pad(x, (0, padded - dim)) for x in (q_NHD, k_NHD, v_NHD))
        shape = (*q_NHD.shape, k_NHD.shape[1])
        planned = self._planned_packed
        if planned is None or planned[0] is not cu_seqlens or planned[1:] != (shape, scale):
            self._refuse_capture("variable-length attention")
            bounds = cu_seqlens.cpu()
            self._packed.plan(
                bounds,
                bounds,
                q_NHD.shape[1],
                k_NHD.shape[1],
                padded,
                causal=False,
                sm_scale=scale,
                q_data_type=q_NHD.dtype,
                kv_data_type=k_NHD.dtype,
            )
            self._planned_packed = (cu_seqlens, shape, scale)
        return self._packed.run(q_NHD, k_NHD, v_NHD)[..., :dim]

    @staticmethod
    def _refuse_capture(operation: str) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{operation}: FlashInfer must plan these rows before the capture")
