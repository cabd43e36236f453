"""MXFP8 encoding by its definition: least scale without saturation, nearest element, no loss."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from m3stack.kernels.interface import Mxfp8Weight
from m3stack.kernels.quantised import mxfp8
from m3stack.kernels.quantised.reference import linear_mxfp8, linear_mxfp8_both

BYTES = torch.arange(256, dtype=torch.uint8)
LARGEST_SUBNORMAL_BF16 = 2.0**-133


def e4m3_value(byte: int) -> Fraction | None:
    """By the definition of OCP e4m3: bias 7, no infinities, all ones is NaN."""
    sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return None
    if exponent == 0:
        size = Fraction(mantissa, 8) * Fraction(2) ** -6
    else:
        size = (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    return -size if sign else size


# every finite e4m3 value, and the code whose mantissa is even decides a tie
FINITE = {byte: value for byte in range(256) if (value := e4m3_value(byte)) is not None}


def expected_group(values: list[float]) -> tuple[int, list[Fraction]]:
    """Scale byte and decoded values of one group, in exact arithmetic, by search."""
    exact = [Fraction(value) for value in values]
    largest = max(abs(value) for value in exact)
    if largest == 0:
        return 0, [Fraction(0)] * len(values)
    byte = next(b for b in range(255) if largest <= 464 * Fraction(2) ** (b - 127))
    scale = Fraction(2) ** (byte - 127)
    decoded = []
    for value in exact:
        code = min(FINITE, key=lambda c: (abs(FINITE[c] * scale - value), c & 1))
        decoded.append(FINITE[code] * scale)
    return byte, decoded


def group_of(values: list[float]) -> Tensor:
    padded = values + [0.0] * (32 - len(values))
    return torch.tensor(padded, dtype=torch.float64).to(torch.bfloat16)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-(2.0**127), 2.0**127, width=32), max_size=32))
def test_encoding_is_the_least_scale_and_the_nearest_elements(values: list[float]) -> None:
    group = group_of(values)
    byte, decoded = expected_group(group.tolist())
    coded = mxfp8.encode(group)
    assert coded.scales.tolist() == [byte]
    assert [Fraction(v) for v in mxfp8.decode(coded, torch.float64).tolist()] == decoded


@pytest.mark.parametrize(
    ("largest", "byte"),
    [
        (448.0, 127),  # just fits
        (464.0, 127),  # still rounds to 448
        (466.0, 128),  # the sample conversion of the standard would cut it to 448
        (480.0, 128),
        (512.0, 128),
        (896.0, 128),
        (1.0, 119),
        (LARGEST_SUBNORMAL_BF16, 0),
        (1.75 * 2.0**127, 246),
    ],
)
def test_the_scale_holds_the_largest_value_and_wastes_no_bit(largest: float, byte: int) -> None:
    group = group_of([-largest])
    coded = mxfp8.encode(group)
    assert coded.scales.tolist() == [byte]
    decoded = mxfp8.decode(coded, torch.float64)[0].item()
    assert abs(decoded + largest) <= largest / 16
    if byte:
        assert largest > 464 * 2.0 ** (byte - 1 - 127)


def test_every_scale_byte_and_every_element_decodes_by_definition() -> None:
    elements = BYTES.view(torch.float8_e4m3fn)
    for byte in (0, 1, 3, 126, 127, 128, 200, 246):
        scales = torch.full((8,), byte, dtype=torch.uint8)
        decoded = mxfp8.decode(Mxfp8Weight(elements, scales), torch.float64)
        for code, value in enumerate(decoded.tolist()):
            expected = e4m3_value(code)
            if expected is None:
                assert math.isnan(value)
            else:
                assert Fraction(value) == expected * Fraction(2) ** (byte - 127)
    poisoned = Mxfp8Weight(elements, torch.full((8,), 255, dtype=torch.uint8))
    assert mxfp8.decode(poisoned, torch.float32).isnan().all()


def test_decoding_to_bf16_is_exact_for_all_scales_that_weights_can_have() -> None:
    elements = BYTES[~torch.isin(BYTES, torch.tensor([127, 255]))].view(torch.float8_e4m3fn)
    elements = torch.cat([elements.view(torch.uint8), torch.zeros(2, dtype=torch.uint8)])
    for byte in range(3, 247):
        coded = Mxfp8Weight(
            elements.view(torch.float8_e4m3fn), torch.full((8,), byte, dtype=torch.uint8)
        )
        exact = mxfp8.decode(coded, torch.float32)
        assert torch.equal(mxfp8.decode(coded, torch.bfloat16).float(), exact)


@pytest.mark.parametrize("seed", range(4))
def test_values_that_were_mxfp8_once_are_so_again_without_loss(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (64, 256), generator=generator).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x7E  # finite ones
    # any scales: those of another encoder need not be the least
    scales = torch.randint(100, 150, (64, 8), generator=generator).to(torch.uint8)
    values = mxfp8.decode(Mxfp8Weight(codes.view(torch.float8_e4m3fn), scales), torch.bfloat16)
    again = mxfp8.encode(values)
    assert torch.equal(mxfp8.decode(again, torch.bfloat16), values)
    assert (again.scales <= scales).all()


@pytest.mark.parametrize("seed", range(4))
def test_what_was_encoded_here_is_encoded_again_to_the_same_bytes(seed: int) -> None:
    torch.manual_seed(seed)
    # groups whose largest values lie densely around those at which the scale steps
    x = torch.randn(2000, 32) * 0.3
    x[:, 7] = torch.linspace(200, 500, 2000) * 2.0 ** torch.randint(-20, 20, (2000,))
    x[::50, 3] = -0.0
    for dtype in (torch.float32, torch.bfloat16):
        coded = mxfp8.encode(x.to(dtype))
        again = mxfp8.encode(mxfp8.decode(coded, torch.bfloat16))
        assert torch.equal(again.scales, coded.scales)
        assert torch.equal(again.elements.view(torch.uint8), coded.elements.view(torch.uint8))


@pytest.mark.parametrize("scale", [1.0, 1e-30, 3e-38, 1e30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_error_stays_within_the_format(scale: float, dtype: torch.dtype) -> None:
    """Half a unit of a 4-bit significand, or of the subnormal step 2^-9, below 2^-6."""
    torch.manual_seed(5)
    x = (torch.randn(128, 256) * torch.logspace(-3, 0, 128)[:, None] * scale).to(dtype)
    coded = mxfp8.encode(x)
    error = (mxfp8.decode(coded, torch.float64) - x.double()).abs()
    step = mxfp8.scale_values(coded.scales).double().repeat_interleave(32, -1)
    assert (error <= torch.maximum(x.double().abs() / 17, step * 2.0**-10)).all()
    # the step follows from the group's largest value alone
    largest = x.double().abs().unflatten(-1, (-1, 32)).amax(-1).repeat_interleave(32, -1)
    assert (step <= torch.maximum(largest / 232, torch.tensor(2.0**-127).double())).all()


def test_zeros_keep_their_signs_and_bad_values_poison_their_group_alone() -> None:
    x = torch.zeros(4, 32)
    x[0, ::2] = -0.0
    x[1, 3] = float("nan")
    x[2, 4] = float("-inf")
    x[3] = 1.0
    coded = mxfp8.encode(x.flatten())
    assert coded.scales.tolist() == [0, 255, 255, 119]
    decoded = mxfp8.decode(coded, torch.float32).view(4, 32)
    assert torch.equal(decoded[0].signbit(), x[0].signbit())
    assert decoded[1:3].isnan().all()
    assert torch.equal(decoded[3], x[3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linears_use_the_decoded_weight(dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    x, weight = torch.randn(5, 96).to(dtype), mxfp8.encode(torch.randn(7, 96))
    values = mxfp8.decode(weight, torch.float64)
    exact = x.double() @ values.T
    # one rounding of the result, and fp32 sums of 96 products
    limit = torch.finfo(dtype).eps * exact.abs() + 96 * 2**-24 * (x.double().abs() @ values.abs().T)
    assert ((linear_mxfp8(x, weight).double() - exact).abs() <= limit).all()
    both = mxfp8.round_trip(x).double() @ values.T
    limit += torch.finfo(dtype).eps * both.abs()
    assert ((linear_mxfp8_both(x, weight).double() - both).abs() <= limit * 1.1).all()
    # rounding the activations is a real loss: a relative 2^-5 or so, not rounding noise
    loss = ((both - exact).norm() / exact.norm()).item()
    assert 0.005 < loss < 0.06
