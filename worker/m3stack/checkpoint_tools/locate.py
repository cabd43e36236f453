"""Where a model is: a directory as it stands, or a hub repository, fetched if need be."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from m3stack.errors import StartupError

# as the hub allows them: organisation/name, and a branch, tag or commit behind an @
_HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True, slots=True)
class HubOptions:
    """How the hub is asked; what is not given follows its client's own environment variables.

    Attributes:
        endpoint: address of the hub.
        cache_dir: where fetched repositories are kept.
        with_weights: whether weights are wanted too; a gateway does without.
    """

    endpoint: str | None = None
    cache_dir: Path | None = None
    with_weights: bool = True


@dataclass(frozen=True, slots=True)
class LocatedModel:
    """A checkpoint on this machine.

    Attributes:
        directory: of its files.
        name: people know it by: that of the directory, or of the repository.
    """

    directory: Path
    name: str


def is_hub_id(model: str) -> bool:
    """Whether a name means a repository: it has the form of one, and nothing here has that path."""
    return _HUB_ID.fullmatch(model) is not None and not Path(model).expanduser().exists()


def locate_model(model: str, options: HubOptions | None = None) -> LocatedModel:
    """The directory of a model that is named by path or by hub id.

    A directory goes before a repository of the same name. A repository is downloaded unless the
    cache holds it; one that was interrupted keeps the files it had finished.

    Raises:
        StartupError: neither is there, or the download failed; says what to do.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return LocatedModel(path, path.resolve().name)
    found = _HUB_ID.fullmatch(model)
    if found is None or not is_hub_id(model):
        raise StartupError(
            f"{model} is neither a directory nor a hub id such as MiniMaxAI/MiniMax-M3"
        )
    try:
        # an optional package: a directory needs none
        from m3stack.checkpoint_tools.hub import fetch
    except ModuleNotFoundError as missing:
        if missing.name != "huggingface_hub":
            raise
        raise StartupError(
            f"{model} is no directory here; to fetch it from the hub, install its client with "
            "pip install 'm3stack[hub]', or copy the repository here and give its directory"
        ) from None
    directory = fetch(found["id"], found["revision"], options or HubOptions())
    return LocatedModel(directory, found["id"].split("/")[1])
