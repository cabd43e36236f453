"""Differentiable block-sparse attention and the index branch's loss, a block of rows at a time.

Neither holds scores of all rows at once, forward or backward: at 65,536 tokens they would take
69 GB a layer. Gradients are exact; tests compare them with autograd in fp64.
Source: arXiv 2606.13392 (selection, attention over the selection, KL loss with stop-gradients).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

ROW_VALUES = 1 << 28
"""Gathered values of one chunk: rows * groups * chosen keys * head dim."""

MINUS_INFINITY = float("-inf")


@dataclass(frozen=True, slots=True)
class Support:
    """Which keys each query row sees: those of its chosen blocks, at or before its position.

    Attributes:
        positions_RS: int64, position of each query row in its sequence.
        blocks_RGSK: int64 chosen blocks, negative where there is none; None is every block.
    """

    positions_RS: Tensor
    blocks_RGSK: Tensor | None = None


def choose(
    index_q_RLGD: Tensor,
    index_k_RLD: Tensor,
    *,
    block: int,
    num_blocks: int,
    is_shared: bool = False,
    generator: torch.Generator | None = None,
    scores: Callable[[Tensor, Tensor, int], Tensor] | None = None,
) -> Tensor:
    """The blocks of every row: its own and the best-scored ones before it.

    Args:
        is_shared: one selection for all groups, by the mean of their scores.
        generator: replaces the scores by random numbers.
        scores: a faster `block_scores`, of all rows at once.

    Returns:
        int64 [R, G, L, K], the row's own block last, -1 where fewer are visible.
    """
    rows, length, groups, _ = index_q_RLGD.shape
    count = length // block
    chunk = max(block, (1 << 29) // (rows * groups * length) // block * block)
    whole = None if scores is None else scores(index_q_RLGD, index_k_RLD, block)
    chosen: list[Tensor] = []
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        visible = stop // block
        if whole is None:
            part = block_scores(
                index_q_RLGD[:, start:stop], index_k_RLD[:, : visible * block], block
            )
        else:
            part = whole[:, :, start:stop, :visible]
        if generator is not None:
            part = torch.rand(part.shape, device=part.device, generator=generator)
        if is_shared:
            part = part.mean(1, keepdim=True).expand_as(part)
        own = torch.arange(start, stop, device=part.device) // block
        is_past = torch.arange(visible, device=part.device) < own[:, None]
        part = part.masked_fill(~is_past, MINUS_INFINITY)
        best = part.topk(min(num_blocks - 1, visible), dim=-1)
        picked = best.indices.masked_fill(best.values == MINUS_INFINITY, -1)
        missing = num_blocks - 1 - picked.shape[-1]
        picked = torch.nn.functional.pad(picked, (0, missing), value=-1)
        own = own[None, None, :, None].expand(rows, groups, -1, 1)
        chosen.append(torch.cat([picked, own], dim=-1))
    assert count * block == length, f"{length} tokens are no whole number of blocks of {block}"
    return torch.cat(chosen, dim=2)


def block_scores(index_q_RSGD: Tensor, index_k_RLD: Tensor, block: int) -> Tensor:
    """Greatest product of every row with the keys of each block, fp32 [R, G, S, J].

    Those of a row's own block and of the ones behind it have no meaning.
    """
    rows, tokens, groups, dim = index_q_RSGD.shape
    queries = index_q_RSGD.transpose(1, 2).reshape(rows, -1, dim)
    dots = queries @ index_k_RLD.mT
    return dots.view(rows, groups, tokens, -1, block).amax(-1).float()


def block_attention(
    q_RLHD: Tensor, k_RGLD: Tensor, v_RGLD: Tensor, blocks_RGLK: Tensor, scale: float, block: int
) -> Tensor:
    """Exact softmax attention of every row over its chosen blocks, [R, L, H, D]."""
    out = _BlockAttention.apply(q_RLHD, k_RGLD, v_RGLD, blocks_RGLK, scale, block)
    assert isinstance(out, Tensor)
    return out


def index_loss(
    index_q_RSGD: Tensor,
    index_k_RLD: Tensor,
    q_RSHD: Tensor,
    k_RGLD: Tensor,
    support: Support,
    *,
    scale: float,
    block: int,
) -> Tensor:
    """Mean over rows and groups of KL(P || P_index) on the support.

    P is the mean over a group's heads of the main attention's probabilities and takes no gradient.

    Args:
        index_q_RSGD, q_RSHD: some query rows, at `support.positions_RS`.
        scale: of the main branch; the index branch's is one over the root of its own width.
    """
    loss = _IndexLoss.apply(index_q_RSGD, index_k_RLD, q_RSHD, k_RGLD, support, scale, block)
    assert isinstance(loss, Tensor)
    return loss


def attention_shares(
    q_RSHD: Tensor, k_RGLD: Tensor, positions_RS: Tensor, scale: float
) -> Iterator[tuple[int, Tensor]]:
    """Main attention over all visible keys, mean of a group: (first row, [R, G, rows, L])."""
    groups = k_RGLD.shape[1]
    for part in _chunks(q_RSHD.shape[1], q_RSHD.shape[0] * q_RSHD.shape[2] * k_RGLD.shape[2]):
        q_RGShD = _grouped(q_RSHD[:, part], groups)
        keys = torch.arange(k_RGLD.shape[2], device=q_RSHD.device)
        seen = keys <= positions_RS[:, None, part, None]
        dots = torch.einsum("rgshd,rgld->rghsl", _wide(q_RGShD), _wide(k_RGLD)) * scale
        dots = dots.masked_fill(~seen[:, :, None], MINUS_INFINITY)
        yield part.start, dots.softmax(-1).mean(2)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q_RLHD: Tensor,
        k_RGLD: Tensor,
        v_RGLD: Tensor,
        blocks_RGLK: Tensor,
        scale: float,
        block: int,
    ) -> Tensor:
        gather = _Gather(k_RGLD.shape, blocks_RGLK, block)
        out, sums = torch.empty_like(q_RLHD), []
        for rows in gather.chunks():
            q = _grouped(q_RLHD[:, rows], gather.groups)
            seen, pages = gather.seen(rows), gather.pages(rows)
            dots = _wide(q @ gather.take(k_RGLD, pages).mT) * scale
            dots = dots.masked_fill(~seen[..., None, :], MINUS_INFINITY)
            total = dots.logsumexp(-1, keepdim=True)
            shares = (dots - total).exp().to(q.dtype)
            out[:, rows] = _ungrouped(shares @ gather.take(v_RGLD, pages))
            sums.append(total)
        ctx.save_for_backward(q_RLHD, k_RGLD, v_RGLD, blocks_RGLK, out, torch.cat(sums, dim=2))
        ctx.scale, ctx.block = scale, block  # pyright: ignore[reportAttributeAccessIssue]
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q_RLHD, k_RGLD, v_RGLD, blocks, out, sums = ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue]
        scale, block = ctx.scale, ctx.block  # pyright: ignore[reportAttributeAccessIssue]
        (gradient,) = gradients
        gather = _Gather(k_RGLD.shape, blocks, block)
        q_grad = torch.empty_like(q_RLHD)
        k_grad, v_grad = gather.zeros(k_RGLD), gather.zeros(v_RGLD)
        for rows in gather.chunks():
            q, out_grad = (_grouped(x[:, rows], gather.groups) for x in (q_RLHD, gradient))
            seen, pages = gather.seen(rows), gather.pages(rows)
            k, v = gather.take(k_RGLD, pages), gather.take(v_RGLD, pages)
            dots = _wide(q @ k.mT) * scale
            dots = dots.masked_fill(~seen[..., None, :], MINUS_INFINITY)
            shares = (dots - sums[:, :, rows]).exp()
            delta = (_wide(out_grad) * _wide(_grouped(out[:, rows], gather.groups))).sum(-1, True)
            dots_grad = (shares * (_wide(out_grad @ v.mT) - delta) * scale).to(q.dtype)
            q_grad[:, rows] = _ungrouped(dots_grad @ k)
            gather.add(k_grad, dots_grad.mT @ q, pages)
            gather.add(v_grad, shares.to(q.dtype).mT @ out_grad, pages)
        k_grad, v_grad = (x.view(k_RGLD.shape).to(k_RGLD.dtype) for x in (k_grad, v_grad))
        return q_grad, k_grad, v_grad, None, None, None


class _IndexLoss(torch.autograd.Function):
    """The gradients are found together with the loss; backward only scales them."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        index_q_RSGD: Tensor,
        index_k_RLD: Tensor,
        q_RSHD: Tensor,
        k_RGLD: Tensor,
        support: Support,
        scale: float,
        block: int,
    ) -> Tensor:
        groups = k_RGLD.shape[1]
        keys_RGLD = index_k_RLD[:, None].expand(-1, groups, -1, -1)
        if support.blocks_RGSK is None:
            gather: _Gather | _EveryKey = _EveryKey(k_RGLD.shape, support.positions_RS)
        else:
            gather = _Gather(
                k_RGLD.shape, support.blocks_RGSK, block, positions_RS=support.positions_RS
            )
        index_scale = index_q_RSGD.shape[-1] ** -0.5
        q_grad, k_grad = torch.empty_like(index_q_RSGD), gather.zeros(keys_RGLD)
        loss = index_q_RSGD.new_zeros((), dtype=_wide(index_q_RSGD).dtype)
        weight = 1.0 / (index_q_RSGD.shape[0] * index_q_RSGD.shape[1] * groups)
        for rows in gather.chunks():
            seen, pages = gather.seen(rows)[..., None, :], gather.pages(rows)
            q = _grouped(_wide(q_RSHD[:, rows]), groups)
            dots = gather.dots(q, _wide(gather.take(k_RGLD, pages))) * scale
            target = dots.masked_fill(~seen, MINUS_INFINITY).softmax(-1).mean(-2, keepdim=True)
            index_q = _grouped(_wide(index_q_RSGD[:, rows]), groups)
            index_k = _wide(gather.take(keys_RGLD, pages))
            logits = gather.dots(index_q, index_k) * index_scale
            logits = logits.masked_fill(~seen, MINUS_INFINITY)
            log_shares = logits.log_softmax(-1)
            gap = (target.clamp(min=1e-30).log() - log_shares).masked_fill(~seen, 0.0)
            loss += (target * gap).sum() * weight
            logits_grad = (log_shares.exp() - target) * (index_scale * weight)
            q_grad[:, rows] = _ungrouped(gather.mix(logits_grad, index_k)).to(q_grad.dtype)
            gather.add(k_grad, gather.spread(logits_grad, index_q), pages)
        k_grad = k_grad.view(keys_RGLD.shape).sum(1)
        ctx.save_for_backward(q_grad, k_grad.to(index_k_RLD.dtype))
        return loss

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q_grad, k_grad = ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue]
        (gradient,) = gradients
        return (
            (q_grad * gradient).to(q_grad.dtype),
            (k_grad * gradient).to(k_grad.dtype),
            *5 * (None,),
        )


class _Gather:
    """Keys of the chosen blocks of a chunk of rows, side by side: [R, G, rows, K * B, D]."""

    def __init__(
        self,
        keys_shape: torch.Size,
        blocks_RGSK: Tensor,
        block: int,
        *,
        positions_RS: Tensor | None = None,
    ) -> None:
        self._sequences, self.groups, self._length, self._dim = keys_shape
        self._blocks, self._block = blocks_RGSK, block
        self._positions = positions_RS
        first = torch.arange(self._sequences * self.groups, device=blocks_RGSK.device)
        self._first = (first * (self._length // block)).view(-1, self.groups, 1, 1)

    def chunks(self) -> Iterator[slice]:
        _, groups, rows, chosen = self._blocks.shape
        return _chunks(rows, self._sequences * groups * chosen * self._block * self._dim)

    def seen(self, rows: slice) -> Tensor:
        """bool [R, G, rows, K * B]."""
        blocks = self._blocks[:, :, rows]
        slots = blocks[..., None] * self._block + torch.arange(self._block, device=blocks.device)
        if self._positions is None:
            at = torch.arange(rows.start, rows.stop, device=blocks.device).view(1, 1, -1, 1, 1)
        else:
            at = self._positions[:, None, rows, None, None]
        return ((slots >= 0) & (slots <= at)).flatten(-2)

    def pages(self, rows: slice) -> Tensor:
        """int64 [R * G * rows * K]."""
        return (self._first + self._blocks[:, :, rows].clamp(min=0)).flatten()

    def take(self, keys_RGLD: Tensor, pages: Tensor) -> Tensor:
        chosen = self._blocks.shape[-1] * self._block
        rows = keys_RGLD.reshape(-1, self._block * self._dim).index_select(0, pages)
        return rows.view(self._sequences, self.groups, -1, chosen, self._dim)

    def dots(self, q_RGShD: Tensor, keys: Tensor) -> Tensor:
        return q_RGShD @ keys.mT

    def mix(self, shares: Tensor, keys: Tensor) -> Tensor:
        return shares @ keys

    def spread(self, gradient: Tensor, q_RGShD: Tensor) -> Tensor:
        return gradient.mT @ q_RGShD

    def zeros(self, keys_RGLD: Tensor) -> Tensor:
        shape = (self._sequences * self.groups * self._length // self._block, -1)
        return keys_RGLD.new_zeros(keys_RGLD.shape, dtype=_wide(keys_RGLD).dtype).view(shape)

    def add(self, total: Tensor, part: Tensor, pages: Tensor) -> None:
        total.index_add_(0, pages, part.reshape(pages.shape[0], -1).to(total.dtype))


class _EveryKey:
    """The same where every block is chosen."""

    def __init__(self, keys_shape: torch.Size, positions_RS: Tensor) -> None:
        self._shape, self._positions = keys_shape, positions_RS

    def chunks(self) -> Iterator[slice]:
        sequences, groups, length, _ = self._shape
        return _chunks(self._positions.shape[1], sequences * groups * length * 8)

    def seen(self, rows: slice) -> Tensor:
        keys = torch.arange(self._shape[2], device=self._positions.device)
        return keys <= self._positions[:, None, rows, None]

    def pages(self, rows: slice) -> Tensor:
        """Of no use here."""
        return self._positions

    def take(self, keys_RGLD: Tensor, pages: Tensor) -> Tensor:
        return keys_RGLD

    def dots(self, q_RGShD: Tensor, keys: Tensor) -> Tensor:
        dots = q_RGShD.flatten(2, 3) @ keys.mT
        return dots.view(*q_RGShD.shape[:-1], -1)

    def mix(self, shares: Tensor, keys: Tensor) -> Tensor:
        mixed = shares.flatten(2, 3) @ keys
        return mixed.view(*shares.shape[:-1], -1)

    def spread(self, gradient: Tensor, q_RGShD: Tensor) -> Tensor:
        return gradient.flatten(2, 3).mT @ q_RGShD.flatten(2, 3)

    def zeros(self, keys_RGLD: Tensor) -> Tensor:
        return keys_RGLD.new_zeros(keys_RGLD.shape, dtype=_wide(keys_RGLD).dtype)

    def add(self, total: Tensor, part: Tensor, pages: Tensor) -> None:
        total += part


def _chunks(num_rows: int, values_per_row: int) -> Iterator[slice]:
    size = max(1, ROW_VALUES // values_per_row)
    return (slice(at, min(at + size, num_rows)) for at in range(0, num_rows, size))


def _grouped(x_RSHD: Tensor, groups: int) -> Tensor:
    """[R, S, H, D] -> [R, G, S, heads of a group, D]."""
    rows, tokens, heads, dim = x_RSHD.shape
    return x_RSHD.reshape(rows, tokens, groups, heads // groups, dim).transpose(1, 2)


def _ungrouped(x_RGShD: Tensor) -> Tensor:
    rows, groups, tokens, heads, dim = x_RGShD.shape
    return x_RGShD.transpose(1, 2).reshape(rows, tokens, groups * heads, dim)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
