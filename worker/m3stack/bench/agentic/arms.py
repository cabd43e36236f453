"""What is compared: the worker whole, one thing of it off, and as engines run on Hopper today."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from m3stack.kernels.interface import (
    Kernels,
    LayerPages,
    Mxfp8Weight,
    PagedRows,
    SharedExpert,
    Weight,
)
from m3stack.kernels.quantised import mxfp8


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to run the worker.

    Attributes:
        what: one line for people.
        kernels: what becomes of the table of operations.
        keeps_mxfp8: whether weights stay in MXFP8.
        paced: whether prompts beside decode are bounded by time.
        needs_cuda: its kernels do not run on a CPU.
        graph_bytes: device memory of recorded steps; decoded weights are among what they hold.
    """

    what: str
    kernels: Callable[[Kernels], Kernels] = lambda kernels: kernels
    keeps_mxfp8: bool = True
    prefix_cache: bool = True
    prefill_first: bool = False
    overlap: bool = True
    paced: bool = True
    needs_cuda: bool = False
    graph_bytes: int = 2 << 30


def dense(kernels: Kernels) -> Kernels:
    """Every layer attends to every key; nothing is scored or chosen."""

    def choose_blocks(
        index_q_TGD: Tensor,
        index_k_PBD: Tensor,
        rows: PagedRows,
        num_blocks: int,
        num_local_blocks: int,
        index_copy_PX: Tensor | None = None,
    ) -> Tensor:
        return rows.seq_lens_S

    def block_attention(
        q_THD: Tensor, pages: LayerPages, blocks_GTK: Tensor, rows: PagedRows, scale: float
    ) -> Tensor:
        return kernels.paged_attention(q_THD, pages, rows, scale)

    return replace(kernels, choose_blocks=choose_blocks, block_attention=block_attention)


def query_major(kernels: Kernels) -> Kernels:
    """Prompts are attended to row by row by a portable kernel; choices and decode stay."""
    # Triton is there only where these arms can run
    from m3stack.kernels.msa.prefill import with_triton
    from m3stack.kernels.triton_table import MAX_DECODE_ROWS

    def block_attention(
        q_THD: Tensor, pages: LayerPages, blocks_GTK: Tensor, rows: PagedRows, scale: float
    ) -> Tensor:
        if rows.max_query_len <= MAX_DECODE_ROWS:
            return kernels.block_attention(q_THD, pages, blocks_GTK, rows, scale)
        return with_triton.block_attention(
            q_THD.contiguous(), pages, blocks_GTK, rows, scale, tile_rows=1
        )

    return replace(kernels, block_attention=block_attention)


def portable(kernels: Kernels) -> Kernels:
    """Portable Triton attention and scoring, and torch's own grouped products for the experts."""
    from m3stack.kernels.triton_table import TritonMsa

    msa = TritonMsa()
    plain = replace(
        kernels,
        choose_blocks=msa.choose_blocks,
        block_attention=msa.block_attention,
        run_experts=grouped_experts,
        linear_mxfp8=decoded_linear,
    )
    return query_major(plain)


def decoded_linear(x: Tensor, weight: Mxfp8Weight) -> Tensor:
    """See `interface.LinearMxfp8`; the weight is decoded to the input's dtype for every call."""
    return functional.linear(x, _plain(weight, x.dtype))


def grouped_experts(
    x_TM: Tensor,
    gate_up_EfM: Weight,
    down_EMF: Weight,
    ids_Tk: Tensor,
    weights_Tk: Tensor,
    alpha: float,
    limit: float,
    *,
    shared: SharedExpert | None = None,
    factor: float = 1.0,
) -> Tensor:
    """See `interface.RunExperts`; torch's grouped products over rows sorted by expert."""
    gate_up, down = _plain(gate_up_EfM, x_TM.dtype), _plain(down_EMF, x_TM.dtype)
    num_experts, per_token = gate_up.shape[0], ids_Tk.shape[1]
    ids_N, order_N = ids_Tk.flatten().long().sort(stable=True)
    ones_N = torch.ones_like(ids_N)
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=x_TM.device)
    ends_E = counts_E.scatter_add(0, ids_N, ones_N).cumsum(0).to(torch.int32)
    rows_N = order_N // per_token
    up_NF = functional.grouped_mm(x_TM.index_select(0, rows_N), gate_up.mT, offs=ends_E)
    out_NM = functional.grouped_mm(_swiglu(up_NF, alpha, limit), down.mT, offs=ends_E)
    share_N = (weights_Tk.flatten()[order_N] * factor)[:, None]
    out_TM = torch.zeros_like(x_TM, dtype=torch.float32)
    out_TM.index_add_(0, rows_N, out_NM.float() * share_N)
    if shared is not None:
        inner = functional.linear(x_TM, _plain(shared.gate_up_fM, x_TM.dtype))
        own = functional.linear(_swiglu(inner, alpha, limit), _plain(shared.down_MF, x_TM.dtype))
        out_TM += own.float()
    return out_TM.to(x_TM.dtype)


def _swiglu(both: Tensor, alpha: float, limit: float) -> Tensor:
    gate, up = both.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(both.dtype)


def _plain(weight: Weight, dtype: torch.dtype) -> Tensor:
    if isinstance(weight, Tensor):
        return weight
    if weight.elements.device.type == "cpu" or dtype != torch.bfloat16:
        return mxfp8.decode(weight, dtype)
    # Triton is there only where these arms can run
    from m3stack.bench.agentic.decoded_with_triton import decode

    return decode(weight)


# the released weights are MXFP8: that is what is served, and what arms are switched off from
ARMS = {
    "full": Arm("everything on, MXFP8 weights as released"),
    "full_bf16": Arm("everything on, weights in bf16", keeps_mxfp8=False),
    "portable": Arm(
        "as engines run on Hopper today: portable kernels, weights in bf16",
        portable,
        keeps_mxfp8=False,
        paced=False,
        needs_cuda=True,
    ),
    "portable_mxfp8": Arm(
        "the same, MXFP8 weights decoded for use",
        portable,
        paced=False,
        needs_cuda=True,
        graph_bytes=32 << 30,
    ),
    "dense": Arm("attention to every key", dense),
    "query_major": Arm("prompts attend row by row", query_major, needs_cuda=True),
    "no_prefix_cache": Arm("every prompt computed anew", prefix_cache=False),
    "prefill_first": Arm("prompts before next tokens", prefill_first=True),
    "no_overlap": Arm("host and GPU in turn", overlap=False),
}
