"""Settings that must stand before any test module is imported."""

from __future__ import annotations

import os

import torch

# Triton reads this when it is imported, and again when a kernel is declared: without a GPU all
# kernels of a session run through the interpreter
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
