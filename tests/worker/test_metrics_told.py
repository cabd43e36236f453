"""Every metric that a running worker tells stands in the documentation, with the same words."""

from __future__ import annotations

import math
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from m3stack.serve import EXIT_DRAINED
from m3stack.types import WorkerState
from tests.worker.served import Served, config, serve_around
from tests.worker.test_serve import image_request, text_request

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def documented() -> set[str]:
    return {line for line in PAGE.read_text().splitlines() if line.startswith("| `m3stack_worker_")}


def test_what_a_running_worker_tells_is_what_the_documentation_says() -> None:
    pages: list[str] = []

    def scenario(served: Served) -> None:
        served.wait_until(WorkerState.READY)
        served.tokens(text_request(300, max_tokens=3))
        served.tokens(text_request(300, max_tokens=3))
        served.tokens(image_request(max_tokens=3))
        url = f"http://127.0.0.1:{served.ports.metrics_port}/metrics"
        with urllib.request.urlopen(url) as reply:
            pages.append(reply.read().decode())

    assert serve_around(config(metrics_listen="127.0.0.1:0"), scenario) == EXIT_DRAINED
    families = list(text_string_to_metric_families(pages[0]))
    # when a series was made is no metric of ours: the client library adds it
    ours = [family for family in families if not family.name.endswith("_created")]
    rows = {f"| `{family.name}` | {family.type} | {family.documentation} |" for family in ours}
    assert rows == documented()
    values = {sample.name: sample.value for family in ours for sample in family.samples}
    # the second prompt hits two whole pages
    assert values["m3stack_worker_cached_prompt_tokens_total"] == 256
    computed = values["m3stack_worker_prompt_tokens_total"] - 256
    assert values["m3stack_worker_uncached_prompt_tokens_total"] == computed
    encoded = values["m3stack_worker_encoded_media_parts_total"]
    assert values["m3stack_worker_vision_batch_parts_sum"] == encoded > 0
    patches = sum(math.prod(item.grid_thw) for item in image_request().media)
    assert values["m3stack_worker_vision_batch_patches_sum"] == patches
    assert values["m3stack_worker_step_sequences_count"] > 0
