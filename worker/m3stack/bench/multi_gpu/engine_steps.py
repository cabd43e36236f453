"""Decode steps of a whole engine over all ranks: as they come, queued ahead, and recorded too.

What is timed is what a request sees: the time between two of its tokens while all run, with plans,
messages to the other ranks, sampling and delivery in it.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from m3stack.assemble import Assembly, Surroundings, assemble
from m3stack.bench.agentic.replay import Crowd, Mailbox
from m3stack.cache.media import MediaLedger
from m3stack.checkpoints import builtin_checkpoint
from m3stack.config import WorkerConfig
from m3stack.engine.engine import Engine
from m3stack.hardware import choose_hardware
from m3stack.models.minimax_m3.config import M3Config
from m3stack.telemetry import WorkerMetrics

JSON_NAME = "multi-gpu-engine.json"
STOP_S = 60.0

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """What an engine is asked to do.

    Attributes:
        batches: requests at once, one after the other.
        prompt_tokens, output_tokens: of each request.
        warm_tokens: of the outputs, those before the first that is timed: steps are recorded then.
    """

    batches: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    warm_tokens: int


# no step within crosses a length at which another recording begins
REAL = EngineSizes(batches=(1, 8, 64), prompt_tokens=2100, output_tokens=140, warm_tokens=20)
SMALL = EngineSizes(batches=(1, 3), prompt_tokens=140, output_tokens=24, warm_tokens=8)


@dataclass(frozen=True, slots=True)
class Mode:
    """How steps run."""

    name: str
    step_overlap: str
    decode_graph_bytes: int


MODES = (
    Mode("plain", "off", 0),
    Mode("queued ahead, recorded", "on", -1),
    Mode("queued ahead", "on", 0),
)


def run_engines(
    out: Path, *, world: int, num_layers: int, is_small: bool, modes: Sequence[str], command: str
) -> list[Row]:
    """Times every mode; writes all rows after each of them.

    Args:
        num_layers: sparse layers of the truncated model; of the tiny one all are taken.
        modes: names of `MODES`; all where there are none.

    Raises:
        StartupError: a worker does not start here.
        ReplayError: a request failed.
    """
    rows: list[Row] = [_about(world, num_layers, is_small=is_small)]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        if is_small:
            model = builtin_checkpoint("tiny")
        else:
            write_truncated(model, num_layers)
        for mode in MODES:
            if modes and mode.name not in modes:
                continue
            for row in _mode_rows(model, world, mode, SMALL if is_small else REAL):
                rows.append(row)
                print(row, flush=True)
                document = {"command": command, "rows": rows}
                (out / JSON_NAME).write_text(json.dumps(document, indent=1) + "\n")
            _forget()
    return rows


def write_truncated(folder: Path, num_layers: int) -> None:
    """A config.json of the released widths with `num_layers` sparse layers and next to no ViT."""
    file = resources.files("m3stack.models.minimax_m3") / "released_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    text = config["text_config"]
    text["num_hidden_layers"] = num_layers
    text["moe_layer_freq"] = [1] * num_layers
    sparse = text["sparse_attention_config"]
    sparse["sparse_attention_freq"] = [1] * num_layers
    sparse["sparse_disable_index_value"] = [1] * num_layers
    config["vision_config"]["num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _mode_rows(model: Path, world: int, mode: Mode, sizes: EngineSizes) -> Iterator[Row]:
    longest = sizes.prompt_tokens + sizes.output_tokens
    page_tokens = M3Config.from_dir(model).block_tokens
    num_pages = max(sizes.batches) * -(-longest // page_tokens) + 8
    config = WorkerConfig(
        model_path=str(model),
        random_weights=True,
        tensor_parallel=world,
        step_overlap=mode.step_overlap,
        decode_graph_bytes=mode.decode_graph_bytes,
        num_pages=num_pages,
        prefix_cache=False,
        host_cache_bytes=0,
        first_steps_s=0.0,
        log_level="warn",
    )
    with _running(config) as (assembly, metrics, crowd):
        for batch_size in sizes.batches:
            before = _counted(metrics, "recorded_steps_total")
            gaps_ms = _gaps_ms(crowd, assembly, batch_size, sizes)
            yield {
                "kind": "engine",
                "mode": mode.name,
                "rows": batch_size,
                "context": sizes.prompt_tokens,
                "step_ms": statistics.median(gaps_ms),
                "slowest_tenth_ms": statistics.quantiles(gaps_ms, n=10)[-1],
                "timed_steps": len(gaps_ms),
                "recorded_steps": _counted(metrics, "recorded_steps_total") - before,
                "recorded_bytes": _counted(metrics, "recorded_step_bytes"),
                "bytes_beside_torch": _bytes_beside_torch(),
            }


@contextmanager
def _running(config: WorkerConfig) -> Iterator[tuple[Assembly, WorkerMetrics, Crowd]]:
    """A loaded engine that runs until the end of the block, and its other ranks with it."""
    metrics, mailbox = WorkerMetrics(), Mailbox()
    around = Surroundings(MediaLedger(1), metrics, lambda done, total: None)
    model_config = M3Config.from_dir(config.model_path)
    assembly = assemble(config, model_config, choose_hardware(config), around)
    engine = Engine(assembly.parts, assembly.settings, deliver=mailbox.put, on_exit=mailbox.end)
    if assembly.group is not None:
        assembly.group.tell_losses_to(engine.abort)
    engine.start()
    try:
        yield assembly, metrics, Crowd(engine, mailbox)
    finally:
        engine.stop()
        engine.join(STOP_S)
        assembly.constraints.close()
        if assembly.group is not None:
            assembly.group.stop()


def _forget() -> None:
    """Gives back what an engine has held: the next one has no room beside it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _gaps_ms(
    crowd: Crowd, assembly: Assembly, batch_size: int, sizes: EngineSizes
) -> Sequence[float]:
    """Milliseconds between the tokens of one request while all run and nothing is set up."""
    generator = torch.Generator().manual_seed(batch_size)
    vocab_size = assembly.limits.vocab_size
    handles = [
        crowd.submit(
            torch.randint(vocab_size // 2, (sizes.prompt_tokens,), generator=generator).tolist(),
            sizes.output_tokens,
        )
        for _ in range(batch_size)
    ]
    crowd.wait_ended(*handles)
    since = max(crowd.times[handle][0] for handle in handles)
    since = [time for time in crowd.times[handles[-1]] if time >= since][sizes.warm_tokens]
    until = min(crowd.times[handle][-1] for handle in handles)
    return [gap * 1e3 for gap in crowd.gaps(handles[-1:], since, until)]


def _counted(metrics: WorkerMetrics, name: str) -> int:
    return int(metrics.registry.get_sample_value(f"m3stack_worker_{name}") or 0)


def _bytes_beside_torch() -> int:
    """Of the leading rank's GPU, what is in use and not torch's own: context, NCCL, recordings."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info(0)
    return total - free - torch.cuda.memory_reserved(0)


def _about(world: int, num_layers: int, *, is_small: bool) -> Row:
    return {
        "kind": "machine",
        "gpus": world,
        "device": "CPU" if is_small else torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "layers": num_layers,
    }
