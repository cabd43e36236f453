"""A worker on a CPU begins without what only GPUs and compilers need."""

from __future__ import annotations

import subprocess
import sys

# Triton's compiler, torch's own, and the algebra they share: a second and 120 MB
NEEDLESS = {"triton", "torch._dynamo", "torch._inductor", "sympy"}
START = """
import sys
import torch
import m3stack.cli.worker
from m3stack.kernels.select import build_kernels
from m3stack.kernels.shape import KernelShape
shape = KernelShape(
    dtype=torch.float32, heads=8, groups=2, head_dim=32, rotary_dim=16, page_tokens=16,
    num_blocks=3, num_local_blocks=1, vision_heads=2, vision_head_dim=20, experts=6,
    experts_per_token=3,
)
build_kernels("auto", shape=shape, device=torch.device("cpu"))
print(*sys.modules)
"""


def test_a_worker_on_a_cpu_imports_no_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, check=True)
    assert NEEDLESS & set(done.stdout.split()) == set()
