"""Rotary frequencies of the text model, as the checkpoint's own scaling says.

Both forms of config.json are read: `rope_theta` beside `rope_scaling`, and `rope_parameters` with
everything in it. Kinds whose frequencies change with the length of a request are refused: keys
that are cached already would have to be turned again.
Source: transformers 5.24 `modeling_rope_utils`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from m3stack.errors import StartupError
from m3stack.models.strict_json import Section

KINDS = {
    "default": (set[str](), set[str]()),
    "linear": ({"factor"}, {"original_max_position_embeddings"}),
    "yarn": (
        {"factor"},
        {
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        },
    ),
    "llama3": (
        {"factor", "low_freq_factor", "high_freq_factor"},
        {"original_max_position_embeddings"},
    ),
}
"""Required and optional keys of each kind."""
_ANY_KIND = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions become angles.

    Attributes:
        theta: base of the frequencies.
        kind: one of `KINDS`.
        factor: by how much the trained context is stretched.
        original_tokens: context that was trained.
        attention_factor: multiplies cosine and sine.
        beta_fast, beta_slow: turns over the trained context above which a frequency is kept, and
            below which it is divided by `factor`; of yarn.
        truncate: the range between the two ends at whole channels; of yarn.
        low_freq_factor, high_freq_factor: the same for llama3, in wavelengths.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_tokens: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def frequencies(self, rotary_dim: int, device: torch.device) -> Tensor:
        """fp32 [rotary_dim / 2], radians a position."""
        exponents = torch.arange(0, rotary_dim, 2, device=device).float() / rotary_dim
        periods = self.theta**exponents
        if self.kind == "yarn":
            return self._yarn(periods, rotary_dim)
        if self.kind == "llama3":
            return self._llama3(1.0 / periods)
        return 1.0 / periods / self.factor

    def _yarn(self, periods: Tensor, rotary_dim: int) -> Tensor:
        def channel_of(turns: float) -> float:
            reach = self.original_tokens / (turns * 2 * math.pi)
            return rotary_dim * math.log(reach) / (2 * math.log(self.theta))

        low, high = channel_of(self.beta_fast), channel_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        # a range of no width is a step
        width = (high - low) or 0.001
        channels = torch.arange(periods.shape[0], dtype=torch.float32, device=periods.device)
        kept = 1 - ((channels - low) / width).clamp(0, 1)
        return 1.0 / (self.factor * periods) * (1 - kept) + 1.0 / periods * kept

    def _llama3(self, plain: Tensor) -> Tensor:
        wavelengths = 2 * math.pi / plain
        longest = self.original_tokens / self.low_freq_factor
        shortest = self.original_tokens / self.high_freq_factor
        span = self.high_freq_factor - self.low_freq_factor
        kept = (self.original_tokens / wavelengths - self.low_freq_factor) / span
        mixed = (1 - kept) * plain / self.factor + kept * plain
        scaled = torch.where(wavelengths > longest, plain / self.factor, plain)
        is_between = (wavelengths >= shortest) & (wavelengths <= longest)
        return torch.where(is_between, mixed, scaled)


def read_rope(text: Section, *, partial_factor: float, max_tokens: int) -> Rope:
    """The rope of a `text_config`.

    Args:
        text: has `rope_theta` and perhaps `rope_scaling`, or `rope_parameters`.
        partial_factor: rotated share of a head, which a form that repeats it must agree with.
        max_tokens: `max_position_embeddings`.

    Raises:
        StartupError: names what is missing, twice there, or cannot be honoured.
    """
    forms = [key for key in ("rope_scaling", "rope_parameters") if key in text and text.is_set(key)]
    if len(forms) == 2:
        raise text.refusal("rope_scaling", "null beside rope_parameters, which hold the same")
    values = dict(text.inner(forms[0])) if forms else {}
    if "rope_theta" in text:
        theta = text.number("rope_theta")
        if values.setdefault("rope_theta", theta) != theta:
            raise text.refusal("rope_theta", f"{values['rope_theta']}, as in {forms[0]}")
    if "rope_theta" not in values:
        raise StartupError("config.json: text_config: missing key rope_theta")
    name = f"config.json: text_config.{forms[0] if forms else 'rope'}"
    kind = _kind(name, values)
    required, optional = KINDS[kind]
    given = {key: value for key, value in values.items() if value is not None}
    rope = Section(name, given, required=required, optional=optional | _ANY_KIND)
    if "partial_rotary_factor" in rope and rope.number("partial_rotary_factor") != partial_factor:
        raise rope.refusal("partial_rotary_factor", f"rotary_dim / head_dim, {partial_factor}")
    return _rope(kind, rope, max_tokens)


def _kind(name: str, values: Mapping[str, Any]) -> str:
    kinds = {values[key] for key in ("type", "rope_type") if values.get(key) is not None}
    if len(kinds) > 1:
        raise StartupError(
            f"{name}: type and rope_type differ: {', '.join(sorted(map(str, kinds)))}"
        )
    kind = kinds.pop() if kinds else "default"
    if kind not in KINDS:
        raise StartupError(f"{name}.rope_type is {kind!r}, expected one of {', '.join(KINDS)}")
    return kind


def _rope(kind: str, rope: Section, max_tokens: int) -> Rope:
    theta = rope.number("rope_theta", above=1.0)
    if kind == "default":
        return Rope(theta)
    factor = rope.number("factor")
    if factor < 1:
        raise rope.refusal("factor", "at least 1")
    original = "original_max_position_embeddings"
    tokens = rope.whole(original) if original in rope else max_tokens
    if kind == "linear":
        return Rope(theta, kind, factor, tokens)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low >= high:
            raise rope.refusal("low_freq_factor", f"less than high_freq_factor, {high:g}")
        return Rope(theta, kind, factor, tokens, low_freq_factor=low, high_freq_factor=high)
    fast = rope.number("beta_fast") if "beta_fast" in rope else 32.0
    slow = rope.number("beta_slow") if "beta_slow" in rope else 1.0
    if fast < slow:
        raise rope.refusal("beta_fast", f"at least beta_slow, {slow:g}")
    return Rope(
        theta,
        kind,
        factor,
        tokens,
        attention_factor=_yarn_attention_factor(rope, factor),
        beta_fast=fast,
        beta_slow=slow,
        truncate=rope.flag("truncate") if "truncate" in rope else True,
    )


def _yarn_attention_factor(rope: Section, factor: float) -> float:
    if "attention_factor" in rope:
        return rope.number("attention_factor")

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if "mscale" in rope and "mscale_all_dim" in rope:
        over, under = rope.number("mscale", above=-1), rope.number("mscale_all_dim", above=-1)
        if over and under:
            return scale(over) / scale(under)
    return scale(1.0)
