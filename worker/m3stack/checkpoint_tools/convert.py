"""Converts a checkpoint between BF16 and MXFP8: streamed, resumable, whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from m3stack.checkpoint_tools.conversion_plan import SHARD_BYTES, Plan, Target, plan_conversion
from m3stack.checkpoint_tools.conversion_steps import Converter, Losses
from m3stack.errors import StartupError
from m3stack.weight_files.directory import INDEX_FILE
from m3stack.weight_files.header import read_header
from m3stack.weight_files.reader import Buffer, FileReader
from m3stack.weight_files.writer import UNFINISHED_SUFFIX, FileWriter

PARTIAL_SUFFIX = ".partial"
STATE_FILE = "conversion.json"
LOCK_FILE = "conversion.lock"

_NOT_COPIED = {"config.json", "hf_quant_config.json", INDEX_FILE}

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """How a conversion is done.

    Attributes:
        shard_bytes: of a file of weights, at most, unless one weight is larger.
        device: that encodes and decodes, such as `cpu` or `cuda:0`; files are the CPU's business.
    """

    shard_bytes: int = SHARD_BYTES
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Result:
    """What a conversion did.

    Attributes:
        shards_kept: that an earlier, interrupted run had finished.
        losses: of the linears that this run encoded.
    """

    directory: Path
    num_tensors: int
    num_bytes: int
    shards_kept: int
    losses: Losses


def convert(
    source: Path,
    destination: Path,
    target: Target,
    *,
    settings: Settings | None = None,
    progress: Progress,
) -> Result:
    """Writes a checkpoint with the source's weights in another format.

    Everything is written to `<destination>.partial`, which gets its name at the end. A run that
    was interrupted goes on where it stood when it is started again.

    Args:
        progress: called with bytes written, those of an earlier run included, and bytes in all.

    Raises:
        StartupError: the source is broken or not one to convert, the destination exists, the disk
            is too small or fails, a weight cannot be represented, or another conversion is at
            work there.
    """
    settings = settings or Settings()
    source, destination = source.resolve(), destination.absolute()
    if destination.exists():
        raise StartupError(f"{destination} exists; name another directory, or remove it")
    _check_device(settings.device)
    plan = plan_conversion(source, target, shard_bytes=settings.shard_bytes)
    partial = destination.with_name(destination.name + PARTIAL_SUFFIX)
    partial.mkdir(parents=True, exist_ok=True)
    with _locked(partial):
        _check_state(partial, _state(source, plan, settings))
        finished = {name for name in plan.shards if _is_finished(partial, plan, name)}
        _check_space(partial, source, plan, finished)
        losses = _write_shards(partial, plan, finished, settings, progress)
        _write_files(source, partial, plan)
        (partial / LOCK_FILE).unlink()
        partial.rename(destination)
        # not before: a run that ends here must still find out what the folder was
        (destination / STATE_FILE).unlink()
        _sync(destination.parent)
    sizes = {name: sum(item.num_bytes for item in items) for name, items in plan.shards.items()}
    return Result(destination, len(plan.weight_map), sum(sizes.values()), len(finished), losses)


def _check_device(name: str) -> None:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise StartupError(f"device is {name!r}, expected cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise StartupError(f"device is {name}, but torch sees no CUDA GPU here")


@contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Holds the folder against a second conversion."""
    path = partial / LOCK_FILE
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StartupError(f"another conversion is writing to {partial}") from None
        yield


def _state(source: Path, plan: Plan, settings: Settings) -> dict[str, Any]:
    """What must be the same for an interrupted run to go on."""
    config = (source / "config.json").read_bytes()
    files = {file.name: file.stat() for file in plan.source.shards}
    return {
        "target": plan.target.value,
        "shard_bytes": settings.shard_bytes,
        "source": str(source),
        "config_sha256": hashlib.sha256(config).hexdigest(),
        "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in files.items()},
    }


def _check_state(partial: Path, state: dict[str, Any]) -> None:
    path = partial / STATE_FILE
    if not path.exists():
        if any(partial.glob("*.safetensors")):
            raise StartupError(f"{partial} holds weights of unknown origin; remove it")
        _write_json(path, state)
        return
    earlier = json.loads(path.read_text(encoding="utf-8"))
    changed = sorted(key for key in state if earlier.get(key) != state[key])
    if changed:
        raise StartupError(
            f"{partial} is left from a conversion that differs in {', '.join(changed)}; remove it "
            "to begin anew, or repeat that conversion to finish it"
        )


def _is_finished(partial: Path, plan: Plan, name: str) -> bool:
    """Whether a shard is there: files get their names only once they are whole and on disk."""
    path = partial / name
    if not path.exists():
        return False
    expected = {n: entry for item in plan.shards[name] for n, entry in item.outputs.items()}
    held = {n: (entry.dtype, entry.shape) for n, entry in read_header(path).items()}
    return held == expected


def _check_space(partial: Path, source: Path, plan: Plan, finished: set[str]) -> None:
    missing = sum(
        item.num_bytes
        for name, items in plan.shards.items()
        if name not in finished
        for item in items
    )
    missing += sum(file.stat().st_size for file in _other_files(source))
    # what an interrupted run left unfinished is written over
    missing -= sum(file.stat().st_blocks * 512 for file in partial.glob(f"*{UNFINISHED_SUFFIX}"))
    free = shutil.disk_usage(partial).free
    if missing > free:
        raise StartupError(
            f"{missing / 1e9:.2f} GB are to be written under {partial.parent}, where only "
            f"{free / 1e9:.2f} GB are free"
        )


def _write_shards(
    partial: Path, plan: Plan, finished: set[str], settings: Settings, progress: Progress
) -> Losses:
    device = torch.device(settings.device)
    total = sum(item.num_bytes for items in plan.shards.values() for item in items)
    done = sum(item.num_bytes for name in finished for item in plan.shards[name])
    progress(done, total)
    with ExitStack() as stack:
        buffer = Buffer(pinned=device.type == "cuda")
        readers = {
            file: stack.enter_context(FileReader(file, buffer)) for file in plan.source.shards
        }
        converter = Converter(plan.source, readers, device)
        for name, items in plan.shards.items():
            if name in finished:
                continue
            entries = {n: entry for item in items for n, entry in item.outputs.items()}
            with FileWriter(partial / name, entries) as writer:
                for item in items:
                    for written in converter.run(item, writer):
                        done += written
                        progress(done, total)
    return converter.losses


def _write_files(source: Path, partial: Path, plan: Plan) -> None:
    """Index, config and everything that is no weight."""
    weight_map = plan.weight_map
    if len(plan.shards) > 1:
        size = sum(item.num_bytes for items in plan.shards.values() for item in items)
        _write_json(
            partial / INDEX_FILE,
            {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))},
        )
    _write_json(partial / "config.json", plan.config)
    for file in _other_files(source):
        shutil.copyfile(file, partial / file.name)
    _sync(partial)


def _other_files(source: Path) -> list[Path]:
    return [
        file
        for file in sorted(source.iterdir())
        if file.is_file()
        and not file.name.startswith(".")
        and file.suffix != ".safetensors"
        and file.name not in _NOT_COPIED
    ]


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sync(directory: Path) -> None:
    """Makes renames of a folder's files last."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
