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
        """Reads lengths and tables back; waits for the device."""
        lens_S = rows.seq_lens_S.cpu().long()
        num_pages_S = (lens_S + page_tokens - 1) // page_tokens
        start_S1 = torch.cat([num_pages_S.new_zeros(1), num_pages_S.cumsum(0)])
        table_SJ = rows.page_table_SJ
        used_SJ = torch.arange(table_SJ.shape[1]) < num_pages_S[:, None]
        return HostRows(
            page_start_S1=start_S1.to(torch.int32),
            pages=table_SJ[used_SJ.to(table_SJ.device)],
            last_page_len_S=torch.where(
                lens_S > 0, lens_S - (num_pages_S - 1).clamp(min=0) * page_tokens, 0
            ).to(torch.int32),
            query_start_S1=rows.query_start_S1.cpu(),
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
    """Dense attention of a worker: one workspace, one live plan for each kind of call."""

    def __init__(self, device: torch.device) -> None:
        """Takes the workspaces.

        Raises:
            KernelUnavailableError: FlashInfer is not installed.
        """
        require_flashinfer("dense attention")
        self._workspaces = [
            torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device) for _ in range(2)
        ]
        self._paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspaces[0], LAYOUT)
        self._packed = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(self._workspaces[1], "NHD")
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
            self._paged.plan(
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
            self._planned_rows = (rows, scale)
        out_THD = torch.zeros_like(q_THD)  # rows of empty sequences are written by nobody
        return self._paged.run(q_THD, (pages.k_PGBD, pages.v_PGBD), out=out_THD)

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
