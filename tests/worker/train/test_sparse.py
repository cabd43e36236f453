"""Blockwise attention and index loss: their values and gradients are those of autograd in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from m3stack.train import sparse
from m3stack.train.sparse import Support

ROWS, LENGTH, HEADS, GROUPS, DIM, BLOCK, CHOSEN = 2, 48, 4, 2, 6, 8, 3
SCALE = DIM**-0.5


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()

    return {
        "q": random(ROWS, LENGTH, HEADS, DIM),
        "k": random(ROWS, GROUPS, LENGTH, DIM),
        "v": random(ROWS, GROUPS, LENGTH, DIM),
        "index_q": random(ROWS, LENGTH, GROUPS, DIM),
        "index_k": random(ROWS, LENGTH, DIM),
    }


def chosen_blocks(tensors: dict[str, Tensor]) -> Tensor:
    return sparse.choose(
        tensors["index_q"].detach(), tensors["index_k"].detach(), block=BLOCK, num_blocks=CHOSEN
    )


def seen_keys(blocks_RGLK: Tensor) -> Tensor:
    """bool [R, G, L, L]."""
    at = torch.arange(LENGTH)
    is_chosen = (blocks_RGLK[..., None] == at // BLOCK).any(-2)
    return is_chosen & (at <= at[:, None])


def plain_attention(tensors: dict[str, Tensor], seen: Tensor) -> Tensor:
    repeat = HEADS // GROUPS
    k, v = (tensors[name].repeat_interleave(repeat, 1) for name in ("k", "v"))
    dots = tensors["q"].transpose(1, 2) @ k.mT * SCALE
    dots = dots.masked_fill(~seen.repeat_interleave(repeat, 1), -torch.inf)
    return (dots.softmax(-1) @ v).transpose(1, 2)


def plain_loss(tensors: dict[str, Tensor], seen: Tensor) -> Tensor:
    repeat = HEADS // GROUPS
    k = tensors["k"].repeat_interleave(repeat, 1)
    dots = (tensors["q"].transpose(1, 2) @ k.mT * SCALE).detach()
    dots = dots.masked_fill(~seen.repeat_interleave(repeat, 1), -torch.inf)
    target = dots.softmax(-1).view(ROWS, GROUPS, repeat, LENGTH, LENGTH).mean(2)
    logits = tensors["index_q"].transpose(1, 2) @ tensors["index_k"][:, None].mT * SCALE
    logs = logits.masked_fill(~seen, -torch.inf).log_softmax(-1)
    gap = (target.clamp(min=1e-300).log() - logs).masked_fill(~seen, 0)
    return (target * gap).sum(-1).mean()


@pytest.mark.parametrize("chunk_values", [1, 1 << 28])
def test_attention_and_its_gradients_equal_autograd(
    tensors: dict[str, Tensor], chunk_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse, "ROW_VALUES", chunk_values)
    blocks = chosen_blocks(tensors)
    ours = sparse.block_attention(tensors["q"], tensors["k"], tensors["v"], blocks, SCALE, BLOCK)
    plain = plain_attention(tensors, seen_keys(blocks))
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-13)
    weights = torch.randn(ours.shape, dtype=torch.float64)
    inputs = [tensors[name] for name in ("q", "k", "v")]
    for mine, theirs in zip(
        torch.autograd.grad((ours * weights).sum(), inputs),
        torch.autograd.grad((plain * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk_values", [1, 1 << 28])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_the_index_loss_and_its_gradients_equal_autograd(
    tensors: dict[str, Tensor],
    is_sparse: bool,
    chunk_values: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sparse, "ROW_VALUES", chunk_values)
    positions = torch.arange(LENGTH).expand(ROWS, -1)
    at = torch.arange(LENGTH)
    blocks = chosen_blocks(tensors) if is_sparse else None
    seen = (at <= at[:, None]).expand(ROWS, GROUPS, -1, -1) if blocks is None else seen_keys(blocks)
    ours = sparse.index_loss(
        tensors["index_q"],
        tensors["index_k"],
        tensors["q"],
        tensors["k"],
        Support(positions, blocks),
        scale=SCALE,
        block=BLOCK,
    )
    plain = plain_loss(tensors, seen)
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-13)
    inputs = list(tensors.values())
    mine = torch.autograd.grad(3 * ours, inputs, allow_unused=True)
    theirs = torch.autograd.grad(3 * plain, inputs, allow_unused=True)
    # the backbone gets nothing from this loss
    assert [gradient is None for gradient in mine] == [True, True, True, False, False]
    for left, right in zip(mine[3:], theirs[3:], strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-13)


def test_some_rows_alone_have_the_loss_of_those_rows(tensors: dict[str, Tensor]) -> None:
    rows = torch.tensor([[3, 40], [17, 47]])
    blocks = chosen_blocks(tensors)
    pick = torch.arange(ROWS)[:, None]
    some = sparse.index_loss(
        tensors["index_q"][pick, rows],
        tensors["index_k"],
        tensors["q"][pick, rows],
        tensors["k"],
        Support(rows, blocks.transpose(1, 2)[pick, rows].transpose(1, 2)),
        scale=SCALE,
        block=BLOCK,
    )
    singles = []
    for sequence in range(ROWS):
        for row in rows[sequence].tolist():
            one = slice(sequence, sequence + 1)
            singles.append(
                sparse.index_loss(
                    tensors["index_q"][one, row : row + 1],
                    tensors["index_k"][one],
                    tensors["q"][one, row : row + 1],
                    tensors["k"][one],
                    Support(torch.tensor([[row]]), blocks[one, :, row : row + 1]),
                    scale=SCALE,
                    block=BLOCK,
                )
            )
    torch.testing.assert_close(some, torch.stack(singles).mean(), rtol=0, atol=1e-13)


def test_choice_keeps_the_own_block_and_the_best_of_those_before(
    tensors: dict[str, Tensor],
) -> None:
    blocks = chosen_blocks(tensors)
    scores = torch.einsum("rlgd,rmd->rglm", tensors["index_q"], tensors["index_k"])
    scores = scores.view(ROWS, GROUPS, LENGTH, -1, BLOCK).amax(-1)
    for row in range(LENGTH):
        own = row // BLOCK
        assert (blocks[:, :, row, -1] == own).all()
        expected = scores[:, :, row, :own].topk(min(CHOSEN - 1, own)).indices.sort(-1).values
        picked = blocks[:, :, row, :-1].sort(-1).values
        assert torch.equal(picked[..., CHOSEN - 1 - expected.shape[-1] :], expected)
        assert (picked[..., : CHOSEN - 1 - expected.shape[-1]] == -1).all()
