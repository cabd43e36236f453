"""Settings that must stand before any test module is imported."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

# Triton reads this when it is imported, and again when a kernel is declared: without a GPU all
# kernels of a session run through the interpreter
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# how long an example takes tells of the machine; under CI the profile before this one, which tries
# the same examples every time, goes on to hold
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")
