"""What kernels take of the GPU's time while an arm decodes."""

from __future__ import annotations

import time
from collections import Counter

import torch
from torch.profiler import ProfilerActivity, profile

from m3stack.bench.agentic.replay import Crowd
from m3stack.bench.agentic.worker import Sizes, running_engine
from m3stack.models.minimax_m3.model import M3Model

STEPS = 60


def measure(
    model: M3Model, *, requests: int, context: int, steps: int = STEPS
) -> dict[str, object]:
    """Kernel times of decode steps by kernel name, of requests that share a beginning.

    Returns:
        `step_ms` by the host's clock, `kernels_us` of a step by name, the largest first.
    """
    page = model.config.block_tokens
    num_pages = -(-context // page) + requests * (-(-8 * steps // page) + 4)
    sizes = Sizes(num_pages, 8192, 8192, requests, filled=True)
    with running_engine(model, sizes) as running:
        crowd = Crowd(running.engine, running.mailbox)
        passing = running.passing
        assert passing is not None
        shared = tuple(7 * place % 1009 for place in range(context))
        passing.is_on = True
        crowd.wait_ended(crowd.submit(shared, 1))
        passing.is_on = False
        asked = [crowd.submit((*shared, 11 + number), 6 * steps) for number in range(requests)]
        crowd.wait_tokens(asked, steps)
        began_at, have = time.perf_counter(), len(crowd.times[asked[0]])
        crowd.wait_tokens(asked, have + steps)
        counted = len(crowd.times[asked[0]]) - have
        step_ms = (time.perf_counter() - began_at) / counted * 1e3
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities = [ProfilerActivity.CUDA]
        with profile(activities=activities) as found:
            have = len(crowd.times[asked[0]])
            crowd.wait_tokens(asked, have + steps)
            profiled = len(crowd.times[asked[0]]) - have
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        crowd.cancel(*asked)
    total: Counter[str] = Counter()
    for event in found.events() or ():
        if event.device_type.name == "CUDA":
            total[event.name] += event.device_time
    kernels = {name: us / profiled for name, us in total.most_common()}
    return {"requests": requests, "context": context, "step_ms": step_ms, "kernels_us": kernels}
