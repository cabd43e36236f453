"""The bounds behind the exact two-stage choice, in fp64 on a CPU: no block is lost to them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from m3stack.kernels.msa.decode.index_copy import write_index_copy
from m3stack.kernels.msa.index_copy import NORM_SHARE, IndexCopy, copy_index_keys

# squares of huge keys overflow in the interpreter as they do on a GPU: such keys have no bound
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIM, NEED = 128, 15


def keys_of(kind: str, *size: int) -> Tensor:
    torch.manual_seed(1)
    normal = torch.randn(*size, DIM)
    match kind:
        case "normal":
            return normal
        case "outlier_channels":
            normal[..., :4] *= 64
            return normal
        case "near_ties":
            return 1 + normal * 2.0**-8
        case "equal":
            return torch.ones_like(normal)
        case "zero":
            return torch.zeros_like(normal)
        case "mixed_sizes":
            return normal * 10.0 ** torch.randint(-12, 13, (*size, 1))
        case "tiny":
            return normal * 1e-36
        case "huge":
            return normal * 1e25
        case "one_value":
            return torch.nn.functional.pad(normal[..., :1], (0, DIM - 1))
    raise AssertionError(kind)


KINDS = [
    "normal",
    "outlier_channels",
    "near_ties",
    "equal",
    "zero",
    "mixed_sizes",
    "tiny",
    "huge",
    "one_value",
]


def unpacked(meta: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and bound as fp64."""
    scale = ((meta & 0xFFFF) << 16).view(torch.float32).double()
    return scale, (meta & ~0xFFFF).view(torch.float32).double()


def split_query(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """16-bit integers, scale and norm bound of queries [.., D], as the kernel makes them."""
    exact = q.float()
    most = exact.abs().amax(-1)
    bounded = most <= 1e18
    scale = most.clamp(min=1e-18) * torch.tensor(1 / 32512, dtype=torch.float32)
    integers = torch.where(bounded[..., None], (exact / scale[..., None]).round(), 0.0)
    norm = (exact.square().sum(-1).sqrt() * (1 + 2.0**-8)).clamp(min=1e-18)
    return integers, scale, torch.where(bounded, norm, float("nan"))


def scored(q_GD: Tensor, keys_JBD: Tensor, copy: Tensor, meta: Tensor) -> tuple[Tensor, ...]:
    """One-stage score in fp32, upper and lower bound in fp32 of every key: [G, J, B]."""
    integers, query_scale, norm = split_query(q_GD)
    dots = torch.einsum("gd,jbd->gjb", integers.long(), copy.long())
    scale, bound = (x.float() for x in unpacked(meta))
    near = dots.float() * (query_scale[:, None, None] * scale)
    slack = norm[:, None, None] * bound
    exact = torch.einsum("gd,jbd->gjb", q_GD.float(), keys_JBD.float())
    return exact, near + slack, near - slack


@pytest.mark.parametrize("kind", KINDS)
def test_every_score_lies_within_its_bounds(kind):
    keys_JBD = keys_of(kind, 40, 32).to(torch.bfloat16)
    for query_size in (1.0, 1e-30, 1e12):
        q_GD = (query_size * torch.randn(4, DIM)).to(torch.bfloat16)
        one_stage, upper, lower = scored(q_GD, keys_JBD, *copy_index_keys(keys_JBD))
        exact = torch.einsum("gd,jbd->gjb", q_GD.double(), keys_JBD.double())
        for score in (one_stage.double(), exact):
            unbounded = torch.isnan(upper)
            assert bool((unbounded | (score <= upper) & (score >= lower)).all())
        assert bool(unbounded.all()) == (kind == "huge")


@pytest.mark.parametrize("kind", KINDS)
def test_the_chosen_blocks_are_among_the_candidates(kind):
    keys_JBD = keys_of(kind, 150, 16).to(torch.bfloat16)
    q_GD = torch.randn(4, DIM).to(torch.bfloat16)
    one_stage, upper, lower = scored(q_GD, keys_JBD, *copy_index_keys(keys_JBD))
    score_GJ = one_stage.amax(-1)
    upper_GJ = upper.amax(-1).nan_to_num(nan=float("inf"))
    lower_GJ = lower.amax(-1).nan_to_num(nan=float("-inf"))
    cut_G1 = lower_GJ.topk(NEED).values[:, -1:]
    candidate_GJ = upper_GJ >= cut_G1
    # ties to the lower block
    chosen_GK = score_GJ.argsort(dim=-1, descending=True, stable=True)[:, :NEED]
    assert bool(candidate_GJ.gather(-1, chosen_GK).all())
    if kind in ("equal", "zero", "huge"):
        assert bool(candidate_GJ.all())
    if kind == "normal":
        assert candidate_GJ.float().mean() < 0.3


def rank_key(score: Tensor) -> Tensor:
    """The kernels' order-preserving integer of an fp32 score, as int64."""
    score = torch.where(torch.isnan(score), float("-inf"), score + 0.0).contiguous()
    bits = score.view(torch.int32).long() & 0xFFFFFFFF
    return torch.where(bits >= 1 << 31, 0xFFFFFFFF - bits, bits | 1 << 31)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_no_other_bound_reaches_has_the_score_of_its_block(kind):
    keys_JBD = keys_of(kind, 150, 128).to(torch.bfloat16)
    q_GD = torch.randn(4, DIM).to(torch.bfloat16)
    one_stage, upper, _ = scored(q_GD, keys_JBD, *copy_index_keys(keys_JBD))
    bounds = rank_key(upper.nan_to_num(nan=float("inf"))) & ~127 | torch.arange(128)
    two = bounds.topk(2, dim=-1).values
    token = two[..., :1] & 127
    key = rank_key(one_stage.gather(-1, token)[..., 0])
    is_bounded = two[..., 0] | 127 < 0xFF800000
    is_settled = is_bounded & (key >= two[..., 1] | 127)
    whole = rank_key(one_stage.amax(-1))
    assert torch.equal(key[is_settled], whole[is_settled])
    if kind == "normal":
        best = one_stage.amax(-1).topk(NEED).indices
        assert is_settled.gather(-1, best).float().mean() > 0.6
    if kind in ("equal", "zero", "huge"):
        assert not is_settled.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups_of_blocks", [64, 128])
def test_a_cut_from_groups_of_blocks_loses_none_of_the_chosen(kind, groups_of_blocks):
    keys_JBD = keys_of(kind, 150, 16).to(torch.bfloat16)
    q_GD = torch.randn(4, DIM).to(torch.bfloat16)
    one_stage, upper, lower = scored(q_GD, keys_JBD, *copy_index_keys(keys_JBD))
    upper_GJ = upper.amax(-1).nan_to_num(nan=float("inf"))
    lower_GJ = lower.amax(-1).nan_to_num(nan=float("-inf"))
    chosen_GK = one_stage.amax(-1).argsort(dim=-1, descending=True, stable=True)[:, :NEED]
    padding = -150 % groups_of_blocks
    padded = torch.nn.functional.pad(lower_GJ, (0, padding), value=float("-inf"))
    most = padded.view(4, -1, groups_of_blocks).amax(1)
    cut_G1 = most.topk(NEED).values[:, -1:]
    assert bool((cut_G1 <= lower_GJ.topk(NEED).values[:, -1:]).all())
    assert bool((upper_GJ >= cut_G1).gather(-1, chosen_GK).all())


def test_keys_that_are_not_numbers_have_no_bound():
    keys = torch.randn(4, DIM)
    keys[1, 3], keys[2, 4] = float("nan"), float("inf")
    copy, meta = copy_index_keys(keys.to(torch.bfloat16))
    bound = unpacked(meta)[1]
    assert torch.isnan(bound).tolist() == [False, True, True, False]
    assert not copy[1:3].any()


@pytest.mark.parametrize("kind", KINDS)
def test_the_written_copy_keeps_the_promise_of_the_plain_one(kind):
    torch.set_num_threads(1)
    keys_PBD = keys_of(kind, 3, 16).to(DEVICE, torch.bfloat16)
    copy = IndexCopy(
        torch.full((3, 16, DIM), 99, dtype=torch.int8, device=DEVICE),
        torch.full((3, 16), 99, dtype=torch.int32, device=DEVICE),
    )
    slots = torch.tensor([0, 17, -1, 47, 31], device=DEVICE)
    write_index_copy(keys_PBD, slots, copy)
    written = slots[slots >= 0]
    keys, copied = keys_PBD.view(-1, DIM)[written], copy.keys_PBD.view(-1, DIM)[written]
    scale, bound = unpacked(copy.meta_PB.view(-1)[written])
    residual = (keys.double() - copied.double() * scale[:, None]).norm(dim=-1)
    promised = residual + NORM_SHARE * keys.double().norm(dim=-1)
    assert bool((torch.isnan(bound) | (promised <= bound)).all())
    plain = unpacked(copy_index_keys(keys)[1])[1]
    torch.testing.assert_close(bound, plain, rtol=0.02, atol=0.0, equal_nan=True)
    untouched = torch.ones(48, dtype=torch.bool, device=DEVICE)
    untouched[written] = False
    assert bool((copy.meta_PB.view(-1)[untouched] == 99).all())
    assert bool((copy.keys_PBD.view(-1, DIM)[untouched] == 99).all())
