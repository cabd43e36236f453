"""The feed-forward of one layer: dense, or routed experts beside a shared one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from m3stack.kernels.interface import Kernels, SharedExpert
from m3stack.layers import Place, TextLinear, weight_of
from m3stack.models.minimax_m3.config import M3Config
from m3stack.models.minimax_m3.ranks import Span


class FeedForward(nn.Module):
    """Clamped SwiGLU between two linears; gate rows stand before up rows."""

    def __init__(self, config: M3Config, inner: int, *, kernels: Kernels, place: Place) -> None:
        super().__init__()
        self._swiglu, self._config = kernels.swiglu_oai, config
        self.gate_up = TextLinear(kernels, place, config.hidden_size, 2 * inner)
        self.down = TextLinear(kernels, place, inner, config.hidden_size)

    def forward(self, x_TM: Tensor) -> Tensor:
        gate, up = self.gate_up(x_TM).chunk(2, dim=-1)
        return self.down(
            self._swiglu(gate, up, self._config.swiglu_alpha, self._config.swiglu_limit)
        )

    def as_expert(self) -> SharedExpert:
        """The same weights as kernels take them beside routed experts."""
        return SharedExpert(
            weight_of(self.gate_up.weight, self.gate_up.weight_scale),
            weight_of(self.down.weight, self.down.weight_scale),
        )


class MixtureOfExperts(nn.Module):
    """`factor * sum of the chosen experts + shared expert`; the factor spares the shared one.

    Args:
        experts: those whose weights are here; what others would add, their ranks add.
    """

    def __init__(self, config: M3Config, experts: Span, *, kernels: Kernels, place: Place) -> None:
        super().__init__()
        self._kernels, self._config, self._experts = kernels, config, experts
        count, width, inner = experts.count, config.hidden_size, config.expert_size
        # a router in half precision chooses other experts
        self.router = place.parameter(config.num_experts, width, dtype=torch.float32)
        self.router_bias = place.parameter(config.num_experts, dtype=torch.float32)
        self.gate_up, self.gate_up_scale = place.text_weight(count, 2 * inner, width)
        self.down, self.down_scale = place.text_weight(count, width, inner)
        self.shared = FeedForward(config, config.shared_size, kernels=kernels, place=place)

    def forward(self, x_TM: Tensor) -> Tensor:
        config = self._config
        ids_Tk, weights_Tk = self._kernels.route_tokens(
            x_TM, self.router, self.router_bias, config.num_experts_per_token
        )
        # one of the routed experts' width and format rides in the same products
        is_alike = config.shared_size == config.expert_size
        shared = self.shared.as_expert() if is_alike else None
        out_TM = self._kernels.run_experts(
            x_TM,
            weight_of(self.gate_up, self.gate_up_scale),
            weight_of(self.down, self.down_scale),
            self._own(ids_Tk),
            weights_Tk,
            config.swiglu_alpha,
            config.swiglu_limit,
            shared=shared,
            factor=config.routed_scaling_factor,
        )
        return out_TM if is_alike else out_TM + self.shared(x_TM)

    def _own(self, ids_Tk: Tensor) -> Tensor:
        """Places of the chosen experts among those here; -1 for others."""
        if self._experts.count == self._config.num_experts:
            return ids_Tk
        places_Tk = ids_Tk - self._experts.first
        is_own_Tk = (places_Tk >= 0) & (places_Tk < self._experts.count)
        return places_Tk.masked_fill(~is_own_Tk, -1)
