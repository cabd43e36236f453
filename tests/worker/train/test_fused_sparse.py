"""The fused sparse operations give what the plain ones give, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from m3stack.train import fused_sparse, sparse

# of Triton's interpreter, in loops whose bounds are computed
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

FUSED = fused_sparse.fused_sparse()
ROWS, LENGTH, HEADS, GROUPS, DIM, BLOCK, CHOSEN = 2, 96, 4, 2, 16, 32, 2


def tensors(scale: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(6)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    return {
        "q": random(ROWS, LENGTH, HEADS, DIM).requires_grad_(),
        "k": random(ROWS, GROUPS, LENGTH, DIM).requires_grad_(),
        "v": random(ROWS, GROUPS, LENGTH, DIM).requires_grad_(),
        "index_q": random(ROWS, LENGTH, GROUPS, DIM),
        "index_k": random(ROWS, LENGTH, DIM),
    }


@pytest.mark.parametrize("is_shared", [False, True])
def test_scores_choose_the_same_blocks(is_shared: bool) -> None:
    given = tensors(1.0)
    options = {"block": BLOCK, "num_blocks": CHOSEN, "is_shared": is_shared}
    plain = sparse.choose(given["index_q"], given["index_k"], **options)  # pyright: ignore[reportArgumentType]
    fused = sparse.choose(
        given["index_q"],
        given["index_k"],
        scores=FUSED.block_scores,
        **options,  # pyright: ignore[reportArgumentType]
    )
    assert torch.equal(plain, fused)
    assert (plain[:, :, -1] >= 0).all()


# with large values almost all of a row's weight is on one key; a block's keys may take two tiles
@pytest.mark.parametrize(("scale", "tile_keys"), [(1.0, 64), (6.0, 16)])
def test_attention_and_its_gradients(
    scale: float, tile_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_sparse, "TILE_KEYS", tile_keys)
    given = tensors(scale)
    blocks = sparse.choose(given["index_q"], given["index_k"], block=BLOCK, num_blocks=CHOSEN)
    inputs = [given[name] for name in ("q", "k", "v")]
    weights = torch.randn(ROWS, LENGTH, HEADS, DIM)
    found: list[tuple[Tensor, ...]] = []
    for attend in (sparse.block_attention, FUSED.block_attention):
        out = attend(*inputs, blocks, DIM**-0.5, BLOCK)
        found.append((out, *torch.autograd.grad((out * weights).sum(), inputs)))
    for plain, fused in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4 * scale**2)


def test_a_group_that_chose_nothing_else_sees_its_own_block_alone() -> None:
    given = tensors(1.0)
    inputs = [given[name] for name in ("q", "k", "v")]
    blocks = torch.full((ROWS, GROUPS, LENGTH, CHOSEN), -1)
    blocks[..., -1] = torch.arange(LENGTH) // BLOCK
    out = FUSED.block_attention(*inputs, blocks, DIM**-0.5, BLOCK)
    # the first row of a block sees one key
    firsts = given["v"][:, :, ::BLOCK].transpose(1, 2).repeat_interleave(HEADS // GROUPS, 2)
    torch.testing.assert_close(out[:, ::BLOCK], firsts, rtol=1e-5, atol=1e-5)
