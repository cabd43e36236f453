"""The Triton pointwise kernels against the plain reference, through the interpreter on a CPU."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from m3stack.kernels.interface import HeadNorms, LayerPages  # noqa: E402
from m3stack.kernels.msa.index_copy import IndexCopy  # noqa: E402
from m3stack.kernels.pointwise import reference, with_triton  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIM, ROTATED, PAGE = 128, 64, 128


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    # sums of squares in another order move a rounding by one unit in the last place, and rotary
    # adds two rounded terms; the interpreter cuts to bf16 instead of rounding, one unit each time
    units = 3 * torch.finfo(expected.dtype).eps if expected.dtype == torch.bfloat16 else 2.0**-10
    largest = expected.float().abs().max().item()
    torch.testing.assert_close(
        actual.float(), expected.float(), rtol=0.0, atol=units * max(largest, 1.0)
    )


def norm_weights(seed: int, has_index: bool) -> HeadNorms:
    torch.manual_seed(seed)
    q, k, index_q, index_k = 0.3 * torch.randn(4, DIM, device=DEVICE)
    if not has_index:
        return HeadNorms(q, k, None, None, 1e-6)
    return HeadNorms(q, k, index_q, index_k, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "groups", "has_index"), [(64, 4, True), (16, 1, True), (8, 2, False), (48, 1, True)]
)
def test_prologue_writes_what_the_reference_writes(dtype, heads, groups, has_index):
    torch.manual_seed(3)
    num_tokens, num_pages = 5, 4
    width = heads + 2 * groups + (groups + 1 if has_index else 0)
    # slices of one projection row, as the model passes them
    row = (2 * torch.randn(num_tokens, width, DIM, device=DEVICE)).to(dtype)
    q, k, v = row[:, :heads], row[:, heads : heads + groups], row[:, heads + groups :][:, :groups]
    index_q = row[:, heads + 2 * groups :][:, :groups] if has_index else None
    index_k = row[:, -1] if has_index else None
    angle = torch.rand(num_tokens, ROTATED // 2, device=DEVICE) * 6.3
    slots = torch.tensor([130, 5, -1, 511, 127], device=DEVICE)
    norms = norm_weights(4, has_index)

    def run(prologue):
        pool = (num_pages, groups, PAGE, DIM)
        pages = LayerPages(
            torch.full(pool, 7.0, dtype=dtype, device=DEVICE),
            torch.full(pool, 7.0, dtype=dtype, device=DEVICE),
            torch.full((num_pages, PAGE, DIM), 7.0, dtype=dtype, device=DEVICE)
            if has_index
            else None,
        )
        inputs = (q, k, v, index_q, index_k, norms, angle.cos(), angle.sin(), slots, pages)
        return pages, *prologue(*inputs)

    expected_pages, expected_q, expected_index_q = run(reference.attention_prologue)
    pages, actual_q, actual_index_q = run(with_triton.attention_prologue)
    close(actual_q, expected_q)
    close(pages.k_PGBD, expected_pages.k_PGBD)
    assert torch.equal(pages.v_PGBD, expected_pages.v_PGBD)
    assert (actual_index_q is None) == (not has_index)
    if has_index:
        close(actual_index_q, expected_index_q)
        close(pages.index_k_PBD, expected_pages.index_k_PBD)
    # four written slots and nothing else
    untouched = (pages.v_PGBD == 7.0).all(-1).all(1)
    assert int((~untouched).sum()) == 4


def test_prologue_keeps_index_keys_that_have_slots_of_their_own_apart():
    torch.manual_seed(8)
    q, k, v, index_q = torch.randn(4, 3, 8, DIM, device=DEVICE).to(torch.bfloat16)
    # one group of keys here, index queries of all eight, as ranks that share out index keys have
    k, v, index_k = k[:, :1], v[:, :1], k[:, 5]
    angle = torch.rand(3, ROTATED // 2, device=DEVICE) * 6.3
    slots = torch.tensor([130, 5, -1], device=DEVICE)
    index_slots = torch.tensor([2, -1, 3], device=DEVICE)

    def run(prologue):
        pool = torch.full((2, 1, PAGE, DIM), 7.0, dtype=torch.bfloat16, device=DEVICE)
        pages = LayerPages(pool, pool.clone(), pool[:1, 0].clone())
        inputs = (q, k, v, index_q, index_k, norm_weights(9, True), angle.cos(), angle.sin())
        return pages, *prologue(*inputs, slots, pages, index_slots)

    expected_pages, expected_q, expected_index_q = run(reference.attention_prologue)
    pages, actual_q, actual_index_q = run(with_triton.attention_prologue)
    close(actual_q, expected_q)
    assert actual_index_q.shape == (3, 8, DIM)
    close(actual_index_q, expected_index_q)
    close(pages.k_PGBD, expected_pages.k_PGBD)
    close(pages.index_k_PBD, expected_pages.index_k_PBD)
    written = (pages.index_k_PBD != 7.0).any(-1)[0].nonzero()[:, 0]
    assert written.tolist() == [2, 3]


@pytest.mark.parametrize("prologue", [reference.attention_prologue, with_triton.attention_prologue])
def test_prologue_writes_the_copy_of_the_index_keys_it_writes(prologue):
    torch.manual_seed(9)
    q, k, v, index_q = torch.randn(4, 4, 2, DIM, device=DEVICE).to(torch.bfloat16)
    angle = torch.rand(4, ROTATED // 2, device=DEVICE) * 6.3
    slots = torch.tensor([130, 5, -1, 127], device=DEVICE)
    pool = torch.zeros((2, 2, PAGE, DIM), dtype=torch.bfloat16, device=DEVICE)
    index_k_PBD = torch.zeros((2, PAGE, DIM), dtype=torch.bfloat16, device=DEVICE)
    copy_PX = torch.full((2, PAGE * (DIM + 4)), 77, dtype=torch.uint8, device=DEVICE)
    pages = LayerPages(pool, pool.clone(), index_k_PBD, copy_PX)
    inputs = (q, k, v, index_q, k[:, 1], norm_weights(10, True), angle.cos(), angle.sin())
    prologue(*inputs, slots, pages)
    copy = IndexCopy.over(copy_PX, PAGE)
    written = torch.tensor([130, 5, 127], device=DEVICE)
    keys = index_k_PBD.view(-1, DIM)[written]
    assert bool((keys != 0).any(1).all())
    metas = copy.meta_PB.flatten()[written]
    scale, bound = (
        bits.contiguous().view(torch.float32) for bits in ((metas & 0xFFFF) << 16, metas & ~0xFFFF)
    )
    copied = copy.keys_PBD.flatten(0, 1)[written].float() * scale[:, None]
    assert bool(((keys.float() - copied).norm(dim=-1) <= bound).all())
    assert bool((bound < 0.012 * keys.float().norm(dim=-1)).all())
    untouched = torch.ones(2 * PAGE, dtype=torch.bool, device=DEVICE)
    untouched[written] = False
    assert bool((copy.keys_PBD.flatten(0, 1)[untouched] == 77).all())
    assert bool((copy.meta_PB.flatten()[untouched] == 0x4D4D4D4D).all())


@pytest.mark.parametrize("prologue", [reference.attention_prologue, with_triton.attention_prologue])
def test_prologue_saturates_in_e4m3_pages(prologue):
    torch.manual_seed(11)
    q, k, v = torch.randn(3, 4, 2, DIM, device=DEVICE).to(torch.bfloat16)
    v[0, 0, :3] = torch.tensor([1000.0, -3e4, float("nan")])
    angle = torch.rand(4, ROTATED // 2, device=DEVICE) * 6.3
    slots = torch.tensor([130, 5, -1, 127], device=DEVICE)
    norms = norm_weights(12, False)
    norms = HeadNorms(norms.q, 900 * norms.k, None, None, 1e-6)

    def run(dtype):
        pool = torch.full((2, 2, PAGE, DIM), 7.0, device=DEVICE).to(dtype)
        pages = LayerPages(pool, pool.clone(), None)
        prologue(q, k, v, None, None, norms, angle.cos(), angle.sin(), slots, pages)
        return pages.k_PGBD.float(), pages.v_PGBD.float()

    # the interpreter neither carries a rounding into the exponent nor keeps NaN: few values are off
    is_interpreted = DEVICE == "cpu" and prologue is with_triton.attention_prologue
    wide_k, wide_v = run(torch.float32)
    assert float(wide_k.max()) > 448
    narrow_k, narrow_v = run(torch.float8_e4m3fn)
    for narrow, wide in ((narrow_k, wide_k), (narrow_v, wide_v)):
        kept = wide.clamp(-448, 448).to(torch.float8_e4m3fn).float()
        differs = (narrow != kept) & ~(narrow.isnan() & kept.isnan())
        assert differs.float().mean() <= (1e-3 if is_interpreted else 0.0)
    first = narrow_v[1, 0, 2, :3]
    assert first[:2].tolist() == [448.0, -448.0]
    assert is_interpreted or bool(first[2].isnan())


def test_prologue_of_no_tokens_writes_nothing():
    pool = torch.zeros(1, 1, PAGE, DIM, device=DEVICE)
    empty = torch.zeros(0, 1, DIM, device=DEVICE)
    angle = torch.zeros(0, ROTATED // 2, device=DEVICE)
    slots = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    pages = LayerPages(pool, pool.clone(), None)
    q, index_q = with_triton.attention_prologue(
        empty, empty, empty, None, None, norm_weights(5, False), angle, angle, slots, pages
    )
    assert q.shape == (0, 1, DIM)
    assert index_q is None


@pytest.mark.parametrize("width", [128, 6144, 100])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gemma_norm_matches_the_reference(width, dtype):
    torch.manual_seed(6)
    x = (3 * torch.randn(2, 3, width, device=DEVICE)).to(dtype)
    weight = torch.randn(width, device=DEVICE)
    close(with_triton.gemma_norm(x, weight, 1e-6), reference.gemma_norm(x, weight, 1e-6))


@pytest.mark.parametrize("width", [96, 3072])
def test_swiglu_matches_the_reference_past_its_limits(width):
    torch.manual_seed(7)
    both = (9 * torch.randn(3, 2 * width, device=DEVICE)).to(torch.bfloat16)
    both[0, 0], both[1, width + 1] = float("nan"), float("nan")
    gate, up = both.chunk(2, dim=-1)
    actual = with_triton.swiglu_oai(gate, up, 1.702, 7.0)
    expected = reference.swiglu_oai(gate, up, 1.702, 7.0)
    torch.testing.assert_close(actual, expected, rtol=2.0**-7, atol=1e-3, equal_nan=True)
