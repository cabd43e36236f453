"""One golden model for all parity tests."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from m3stack.kernels.reference_table import reference_kernels
from m3stack.models.minimax_m3.model import M3Model
from tests.parity import golden
from tests.worker import support


@dataclass(frozen=True, slots=True)
class Golden:
    """The golden model, and what it chose since the test began."""

    model: M3Model
    choices: support.Choices


@pytest.fixture(scope="session")
def _golden() -> Golden:
    choices = support.Choices()
    kernels = support.recording(reference_kernels(), choices)
    return Golden(support.load(golden.DIRECTORY, kernels=kernels), choices)


@pytest.fixture
def golden_model(_golden: Golden) -> Golden:
    for chosen in (_golden.choices.blocks, _golden.choices.experts, _golden.choices.weights):
        chosen.clear()
    return _golden
