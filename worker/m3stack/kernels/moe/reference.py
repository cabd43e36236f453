"""Expert routing and the experts themselves in plain torch.

Source: transformers 5.24 `minimax_m3_vl`; the tie rule is the house's (`interface.RouteTokens`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from m3stack.kernels.interface import Mxfp8Weight, SharedExpert, Weight
from m3stack.kernels.pointwise.reference import swiglu_oai
from m3stack.kernels.quantised import mxfp8

GATHER_VALUES = 1 << 18
"""Up to this many weights a step's experts are copied side by side instead of visited in turn."""


def route_tokens(
    x_TM: Tensor, router_EM: Tensor, bias_E: Tensor, top_k: int
) -> tuple[Tensor, Tensor]:
    """Chooses and weighs each token's experts; see `interface.RouteTokens`.

    A NaN ranks above every number: a poisoned score is chosen and poisons the token's output, so
    that no other expert stands in for it unnoticed.

    Returns:
        ids int32 [T, k], best first; weights fp32 (fp64 for fp64 input) [T, k], summing to 1.
    """
    scores_TE = functional.linear(x_TM.to(router_EM.dtype), router_EM).sigmoid()
    # stable: of equal scores the lower id comes first
    ids_Tk = (scores_TE + bias_E).argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    weights_Tk = scores_TE.gather(-1, ids_Tk)
    return ids_Tk.to(torch.int32), weights_Tk / weights_Tk.sum(-1, keepdim=True)


def run_experts(
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
    """Weighted sum of the chosen experts, fp32 inside; see `interface.RunExperts`."""
    dtype = torch.float64 if x_TM.dtype == torch.float64 else torch.float32
    weights_Tk = (weights_Tk.to(dtype) * factor).masked_fill(ids_Tk < 0, 0.0)
    values_per_expert = _shape(gate_up_EfM)[1:].numel() + _shape(down_EMF)[1:].numel()
    if ids_Tk.numel() * values_per_expert <= GATHER_VALUES:
        out_TM = _experts_side_by_side(
            x_TM.to(dtype), gate_up_EfM, down_EMF, ids_Tk, weights_Tk, (alpha, limit)
        )
    else:
        out_TM = torch.zeros_like(x_TM, dtype=dtype)
        for expert in ids_Tk.unique().tolist():
            if expert < 0:
                continue
            token, place = (ids_Tk == expert).nonzero(as_tuple=True)
            matrices = [_chosen(w, expert, dtype) for w in (gate_up_EfM, down_EMF)]
            result = _expert(x_TM[token].to(dtype), *matrices, (alpha, limit))
            out_TM.index_add_(0, token, result * weights_Tk[token, place, None])
    if shared is not None:
        matrices = [_decoded(w, dtype) for w in (shared.gate_up_fM, shared.down_MF)]
        out_TM = out_TM + _expert(x_TM.to(dtype), *matrices, (alpha, limit))
    return out_TM.to(x_TM.dtype)


def _expert(x: Tensor, gate_up: Tensor, down: Tensor, clamp: tuple[float, float]) -> Tensor:
    hidden = functional.linear(x, gate_up)
    return functional.linear(swiglu_oai(*hidden.chunk(2, dim=-1), *clamp), down)


def run_experts_mxfp8_both(
    x_TM: Tensor,
    gate_up_EfM: Mxfp8Weight,
    down_EMF: Mxfp8Weight,
    ids_Tk: Tensor,
    weights_Tk: Tensor,
    alpha: float,
    limit: float,
) -> Tensor:
    """`run_experts` with both GEMMs' inputs in dynamic MXFP8, as the released config declares.

    Tokens are rounded before the first GEMM and the clamped SwiGLU's result before the second. No
    back end of the house computes this; it says what rounding activations would cost.
    """
    rounded_TM = mxfp8.round_trip(x_TM)
    out_TM = torch.zeros_like(rounded_TM)
    for expert in ids_Tk.unique().tolist():
        if expert < 0:
            continue
        token, place = (ids_Tk == expert).nonzero(as_tuple=True)
        gate_up, down = (_chosen(w, expert, torch.float32) for w in (gate_up_EfM, down_EMF))
        hidden = functional.linear(rounded_TM[token], gate_up)
        acted = mxfp8.round_trip(swiglu_oai(*hidden.chunk(2, dim=-1), alpha, limit))
        result = functional.linear(acted, down)
        out_TM.index_add_(0, token, result * weights_Tk[token, place, None])
    return out_TM.to(x_TM.dtype)


def _experts_side_by_side(
    x_TM: Tensor,
    gate_up_EfM: Weight,
    down_EMF: Weight,
    ids_Tk: Tensor,
    weights_Tk: Tensor,
    clamp: tuple[float, float],
) -> Tensor:
    tokens, top_k = ids_Tk.shape
    experts = ids_Tk.clamp(min=0).view(-1)
    gate_up = _chosen(gate_up_EfM, experts, x_TM.dtype).view(tokens, -1, x_TM.shape[1])
    hidden = (gate_up @ x_TM[:, :, None]).view(tokens * top_k, -1, 1)
    acted = swiglu_oai(*hidden.chunk(2, dim=1), *clamp)
    out_TkM = (_chosen(down_EMF, experts, x_TM.dtype) @ acted).view(tokens, top_k, -1)
    # not by weight zero alone: zero times NaN is NaN
    return (out_TkM * weights_Tk[..., None]).masked_fill((ids_Tk < 0)[..., None], 0.0).sum(1)


def _shape(weight: Weight) -> torch.Size:
    return weight.elements.shape if isinstance(weight, Mxfp8Weight) else weight.shape


def _decoded(weight: Weight, dtype: torch.dtype) -> Tensor:
    return mxfp8.decode(weight, dtype) if isinstance(weight, Mxfp8Weight) else weight.to(dtype)


def _chosen(weight: Weight, experts: Tensor | int, dtype: torch.dtype) -> Tensor:
    """One expert's matrix, or several stacked, decoded."""
    if isinstance(weight, Mxfp8Weight):
        return _decoded(Mxfp8Weight(weight.elements[experts], weight.scales[experts]), dtype)
    # `[]` on a tensor index builds a slower kind of gather
    chosen = weight[experts] if isinstance(experts, int) else weight.index_select(0, experts)
    return chosen.to(dtype)
