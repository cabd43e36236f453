"""Fetches a repository from the hub through its own client: cached, resumable, with progress.

The client asks a server that drops a connection for the rest of the file; between runs it keeps
whole files.
"""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

from huggingface_hub import DryRunFileInfo, constants, snapshot_download
from huggingface_hub.errors import (
    DryRunError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import tqdm as hub_bar

from m3stack.checkpoint_tools.locate import HubOptions
from m3stack.errors import StartupError
from m3stack.progress import TransferProgress

# everything a checkpoint needs, and no code
_FILES = ["*.json", "*.jinja", "*.txt"]
_WEIGHTS = ["*.safetensors"]
_AGAIN = "start again later: files that are complete are kept"


def fetch(hub_id: str, revision: str | None, options: HubOptions) -> Path:
    """The directory of a repository, downloaded unless the cache holds all of it.

    Raises:
        StartupError: there is no such repository or revision, it may not be read, the hub cannot
            be reached, the disk is too small, or the download broke off.
    """
    request: dict[str, Any] = {
        "repo_id": hub_id,
        "revision": revision,
        "cache_dir": options.cache_dir,
        "endpoint": options.endpoint,
        "allow_patterns": _FILES + _WEIGHTS * options.with_weights,
    }
    shown = f"{hub_id}@{revision}" if revision else hub_id
    try:
        cached = _from_cache(request)
        if cached is not None:
            return cached
        directory = _download(shown, request)
    except OSError as error:
        raise _explained(shown, error) from error
    if not (directory / "config.json").is_file():
        raise StartupError(f"{shown} has no config.json: it is no checkpoint")
    return directory


def _from_cache(request: dict[str, Any]) -> Path | None:
    """A commit that is there in full needs no network; a branch is asked for anew."""
    revision = request["revision"]
    if revision is None or len(revision) != 40:
        return None
    try:
        return Path(snapshot_download(local_files_only=True, **request))
    except LocalEntryNotFoundError:
        return None


def _download(shown: str, request: dict[str, Any]) -> Path:
    try:
        files = snapshot_download(dry_run=True, tqdm_class=_SilentBar, **request)
    except DryRunError:
        # the hub does not answer: the client gives the cache's copy, or the reason there is none
        return Path(snapshot_download(tqdm_class=_SilentBar, **request))
    size = _check_space(shown, files, request["cache_dir"])
    with TransferProgress(f"fetching {shown}") as progress:
        bar = _counting_bar(progress, size)
        return Path(snapshot_download(tqdm_class=bar, **request))


def _check_space(shown: str, files: list[DryRunFileInfo], cache_dir: Path | None) -> int:
    """Bytes to download, known to fit on the disk."""
    size = sum(file.file_size or 0 for file in files if file.will_download)
    directory = Path(cache_dir or constants.HF_HUB_CACHE).expanduser().absolute()
    while not directory.exists():
        directory = directory.parent
    free = shutil.disk_usage(directory).free
    if size > free:
        raise StartupError(
            f"{shown}: {size / 1e9:.2f} GB are to be downloaded to {directory}, where only "
            f"{free / 1e9:.2f} GB are free; free some, or set HF_HUB_CACHE to a larger disk"
        )
    return size


class _SilentBar(hub_bar):
    """Draws nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | {"disable": True}))


def _counting_bar(progress: TransferProgress, total: int) -> type:
    """A bar class for the client that draws nothing and hands bytes on."""
    lock = threading.Lock()
    done = 0

    class Bar(_SilentBar):
        """Counts bytes written; the client also makes bars of files and of bytes received."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            name = kwargs.get("name") or ""
            self._counts = kwargs.get("unit") == "B" and not name.endswith(".transfer")
            super().__init__(*args, **kwargs)

        def update(self, n: float | None = 1) -> None:
            nonlocal done
            if self._counts and n:
                with lock:
                    done += int(n)
                    # bytes of an earlier, interrupted run count from the start
                    progress(min(done, total), total)

    progress(0, total)
    return Bar


def _explained(shown: str, error: OSError) -> StartupError:
    if isinstance(error, GatedRepoError):
        return StartupError(
            f"{shown} asks for its terms to be accepted: do so on its page of the hub, then log in "
            "with `hf auth login` or set HF_TOKEN"
        )
    if isinstance(error, RepositoryNotFoundError):
        return StartupError(
            f"the hub has no repository {shown}, or shows it only to those who may read it: check "
            "the name, or log in with `hf auth login` or HF_TOKEN"
        )
    if isinstance(error, RevisionNotFoundError):
        return StartupError(f"the hub has no such branch, tag or commit: {shown}")
    cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else error
    if isinstance(cause, HfHubHTTPError):
        status = cause.response.status_code
        return StartupError(f"{shown}: the hub refused with status {status}; {_AGAIN}")
    if isinstance(error, LocalEntryNotFoundError):
        why = cause or error
        return StartupError(
            f"{shown} is no directory here, the cache holds no complete copy, and the hub cannot "
            f"be reached ({type(why).__name__}: {_first_line(why)}); check the network, "
            "HF_ENDPOINT and HF_HUB_OFFLINE, or copy the repository here and give its directory"
        )
    return StartupError(f"{shown}: the download broke off ({_first_line(error)}); {_AGAIN}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
