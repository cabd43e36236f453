"""NVFP4 decoding by its definition, nibble by nibble."""

from __future__ import annotations

import pytest
import torch

from m3stack.kernels.quantised import nvfp4

# sign, two exponent bits of bias 1, one mantissa bit
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_every_nibble_has_its_value_and_the_low_one_comes_first() -> None:
    packed = torch.tensor([[low | ((15 - low) << 4) for low in range(16)]])
    scales = torch.tensor([[1.0, 2.0]]).to(torch.float8_e4m3fn)
    values = nvfp4.decode(packed.to(torch.uint8), scales, torch.tensor(0.5), torch.float32)
    signed = MAGNITUDES + [-value for value in MAGNITUDES]
    expected = []
    for low in range(16):
        expected += [signed[low], signed[15 - low]]
    expected = [v * (0.5 if i < 16 else 1.0) for i, v in enumerate(expected)]
    assert values[0].tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    packed = torch.randint(0, 256, (3, 5, 32), dtype=torch.uint8)
    scales = (torch.rand(3, 5, 4) * 400).to(torch.float8_e4m3fn)
    factor = torch.tensor(0.0123)
    values = nvfp4.decode(packed, scales, factor, dtype)
    assert values.shape == (3, 5, 64)
    nibbles = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    elements = torch.tensor(nvfp4.E2M1_VALUES, dtype=torch.float64)[nibbles]
    exact = elements * scales.double().repeat_interleave(16, -1) * factor.double()
    assert torch.equal(values, exact.float().to(dtype))
