"""Expert routing and the experts themselves in plain torch.

Source: transformers 5.24 `minimax_m3_vl`; the tie rule is the house's (`interface.RouteTokens`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from m3stack.kernels.pointwise.reference import swiglu_oai

GATHER_VALUES = 1 << 18
"""Up to this many weights a step's experts are copied side by side instead of visited in turn."""


def route_tokens(
    x_TM: Tensor, router_EM: Tensor, bias_E: Tensor, top_k: int
) -> tuple[Tensor, Tensor]:
    """Chooses and weighs each token's experts; see `interface.RouteTokens`.

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
    gate_up_EfM: Tensor,
    down_EMF: Tensor,
    ids_Tk: Tensor,
    weights_Tk: Tensor,
    alpha: float,
    limit: float,
) -> Tensor:
    """Weighted sum of the chosen experts, fp32 inside; see `interface.RunExperts`.

    Args:
        gate_up_EfM: [E, 2F, M], gate rows first.
        down_EMF: [E, M, F].

    Returns:
        [T, M] in the dtype of `x_TM`.
    """
    dtype = torch.float64 if x_TM.dtype == torch.float64 else torch.float32
    weights_Tk = weights_Tk.to(dtype).masked_fill(ids_Tk < 0, 0.0)
    values_per_expert = gate_up_EfM[0].numel() + down_EMF[0].numel()
    if ids_Tk.numel() * values_per_expert <= GATHER_VALUES:
        return _experts_side_by_side(
            x_TM.to(dtype), gate_up_EfM, down_EMF, ids_Tk, weights_Tk, (alpha, limit)
        ).to(x_TM.dtype)
    out_TM = torch.zeros_like(x_TM, dtype=dtype)
    for expert in ids_Tk.unique().tolist():
        if expert < 0:
            continue
        token, place = (ids_Tk == expert).nonzero(as_tuple=True)
        hidden = functional.linear(x_TM[token].to(dtype), gate_up_EfM[expert].to(dtype))
        acted = swiglu_oai(*hidden.chunk(2, dim=-1), alpha, limit)
        result = functional.linear(acted, down_EMF[expert].to(dtype))
        out_TM.index_add_(0, token, result * weights_Tk[token, place, None])
    return out_TM.to(x_TM.dtype)


def _experts_side_by_side(
    x_TM: Tensor,
    gate_up_EfM: Tensor,
    down_EMF: Tensor,
    ids_Tk: Tensor,
    weights_Tk: Tensor,
    clamp: tuple[float, float],
) -> Tensor:
    tokens, top_k = ids_Tk.shape
    experts = ids_Tk.clamp(min=0).view(-1)
    gate_up = gate_up_EfM.index_select(0, experts).to(x_TM.dtype).view(tokens, -1, x_TM.shape[1])
    hidden = (gate_up @ x_TM[:, :, None]).view(tokens * top_k, -1, 1)
    acted = swiglu_oai(*hidden.chunk(2, dim=1), *clamp)
    out_TkM = (down_EMF.index_select(0, experts).to(x_TM.dtype) @ acted).view(tokens, top_k, -1)
    return (out_TkM * weights_Tk[..., None]).sum(1)
