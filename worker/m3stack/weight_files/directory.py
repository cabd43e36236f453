"""The weight files of a checkpoint directory: one file, or shards that an index names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from m3stack.errors import StartupError
from m3stack.models.strict_json import Section, read_object
from m3stack.weight_files.header import TensorEntry, read_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_SHOWN_NAMES = 5

Shards = dict[Path, dict[str, TensorEntry]]


def read_shards(directory: Path) -> Shards:
    """Every weight file with the tensors it holds, checked against the index if there is one.

    Raises:
        StartupError: files or tensors are missing, doubled, ambiguous or broken; named.
    """
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.exists() and index.exists():
        raise StartupError(
            f"{directory} holds both {SINGLE_FILE} and {INDEX_FILE}; remove one of them"
        )
    if single.exists():
        return {single: read_header(single)}
    if not index.exists():
        raise StartupError(f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
    section = Section(
        INDEX_FILE, read_object(index), required=("weight_map",), optional=("metadata",)
    )
    mapped: dict[str, set[str]] = {}
    for name, file_name in section.inner("weight_map").items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise StartupError(f"{INDEX_FILE} names {file_name!r}, which is no plain file name")
        mapped.setdefault(file_name, set()).add(name)
    shards: Shards = {}
    for file_name in sorted(mapped):
        entries = read_header(directory / file_name)
        end = f"against what {INDEX_FILE} says of it"
        complain(f"{file_name} lacks", mapped[file_name] - set(entries), end)
        complain(f"{file_name} holds", set(entries) - mapped[file_name], end)
        shards[directory / file_name] = entries
    held = Counter(name for entries in shards.values() for name in entries)
    doubled = [name for name, count in held.items() if count > 1]
    complain(f"{directory} holds", doubled, "more than once")
    return shards


def complain(start: str, names: Iterable[str], end: str) -> None:
    """Raises a StartupError that shows the first of the names, if there are any."""
    found = sorted(names)
    if found:
        more = f" and {len(found) - _SHOWN_NAMES} more" if len(found) > _SHOWN_NAMES else ""
        raise StartupError(f"{start} {', '.join(found[:_SHOWN_NAMES])}{more}, {end}")
