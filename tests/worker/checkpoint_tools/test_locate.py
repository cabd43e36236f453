"""A model is found by path or by hub id; what cannot be found or fetched says what to do."""

from __future__ import annotations

import builtins
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from m3stack.checkpoint_tools import hub as hub_module
from m3stack.checkpoint_tools.locate import HubOptions, LocatedModel, locate_model
from m3stack.checkpoints import builtin_checkpoint
from m3stack.cli.gateway import with_local_model
from m3stack.errors import StartupError
from m3stack.models.minimax_m3.config import M3Config
from tests.worker.checkpoint_tools.hub_server import COMMIT, REPOSITORY, Hub, serving

WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True)
def _direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback addresses are asked without a proxy."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")


@pytest.fixture
def hub() -> Iterator[Hub]:
    tiny = builtin_checkpoint("tiny")
    files = {file.name: file.read_bytes() for file in tiny.iterdir() if file.is_file()}
    files["configuration_minimax_m3_vl.py"] = b"raise SystemExit('code is not wanted')"
    # several of the client's chunks, so that half of it is worth keeping
    files["large.safetensors"] = random.Random(0).randbytes(30 << 20)
    with serving(Hub(files)) as served:
        yield served


def options(hub: Hub, path: Path, **changes: Any) -> HubOptions:
    return HubOptions(endpoint=hub.address, cache_dir=path / "cache", **changes)


def failure(model: str, options: HubOptions | None = None) -> str:
    with pytest.raises(StartupError) as caught:
        locate_model(model, options)
    return str(caught.value)


def test_a_directory_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    located = LocatedModel(tmp_path / "org" / "name", "name")
    assert locate_model(str(tmp_path / "org" / "name")) == located
    # a directory goes before a repository of that name
    monkeypatch.chdir(tmp_path)
    assert locate_model("org/name").directory == Path("org/name")


@pytest.mark.parametrize("model", ["/no/such/dir", "name", "./org/name", "a/b/c", "org/", "o rg/n"])
def test_what_is_neither_path_nor_id_is_refused(model: str) -> None:
    assert f"{model} is neither a directory nor a hub id such as" in failure(model)


def test_a_repository_is_fetched_whole_and_without_code(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    located = locate_model(REPOSITORY, options(hub, tmp_path))
    assert located.name == "MiniMax-M3-Tiny"
    names = {file.name for file in located.directory.iterdir()}
    assert names == {name for name in hub.files if not name.endswith((".py", ".md"))}
    for name in names:
        assert (located.directory / name).read_bytes() == hub.files[name]
    assert M3Config.from_dir(located.directory).vocab_size > 0
    shown = capsys.readouterr().err
    size = sum(len(hub.files[name]) for name in names) / 2**30
    assert f"fetching {REPOSITORY}: 0.00 of {size:.2f} GiB (0%)" in shown
    assert "(100%)" in shown
    # again: nothing is fetched twice
    hub.fetched.clear()
    assert locate_model(REPOSITORY, options(hub, tmp_path)) == located
    assert hub.fetched == []


def test_a_gateway_fetches_no_weights(hub: Hub, tmp_path: Path) -> None:
    located = locate_model(REPOSITORY, options(hub, tmp_path, with_weights=False))
    names = {file.name for file in located.directory.iterdir()}
    assert "tokenizer.json" in names
    assert not any(name.endswith(".safetensors") for name in names)


@pytest.mark.parametrize("form", ["two words", "one word"])
@pytest.mark.parametrize("named", [True, False])
def test_the_gateway_s_arguments_get_the_directory(
    hub: Hub, tmp_path: Path, form: str, named: bool
) -> None:
    model = ["--model-path", REPOSITORY] if form == "two words" else [f"--model-path={REPOSITORY}"]
    rest = ["--served-model-name=x"] if named else ["--listen", "127.0.0.1:0"]
    asked = options(hub, tmp_path, with_weights=False)
    arguments = with_local_model([*model, *rest], asked)
    directory = str(locate_model(REPOSITORY, asked).directory)
    assert [word.removeprefix("--model-path=") for word in arguments].count(directory) == 1
    assert ("--served-model-name" in arguments) != named
    if not named:
        assert arguments[-4:] == [*rest, "--served-model-name", "MiniMax-M3-Tiny"]
    for untouched in (["--model-path", str(tmp_path)], ["--model-path"], ["--help"], []):
        assert with_local_model(untouched) == untouched


def test_a_dropped_connection_is_taken_up_where_it_broke(hub: Hub, tmp_path: Path) -> None:
    hub.cut = "large.safetensors"
    located = locate_model(REPOSITORY, options(hub, tmp_path))
    data = hub.files["large.safetensors"]
    assert (located.directory / "large.safetensors").read_bytes() == data
    # the client keeps whole chunks of what came
    (asked,) = hub.ranges["large.safetensors"]
    assert 0 < int(asked.removeprefix("bytes=").removesuffix("-")) <= len(data) // 2


def test_an_interrupted_download_keeps_what_it_had_finished(hub: Hub, tmp_path: Path) -> None:
    hub.refuse = "large.safetensors"
    message = failure(REPOSITORY, options(hub, tmp_path))
    assert "refused with status 403; start again later: files that are complete are kept" in message
    hub.refuse = ""
    finished = set(hub.fetched) - {"large.safetensors"}
    hub.fetched.clear()
    located = locate_model(REPOSITORY, options(hub, tmp_path))
    assert "large.safetensors" in hub.fetched
    assert not finished & set(hub.fetched)
    for file in located.directory.iterdir():
        assert file.read_bytes() == hub.files[file.name]


def test_a_cached_commit_needs_no_hub(hub: Hub, tmp_path: Path) -> None:
    first = locate_model(f"{REPOSITORY}@{COMMIT}", options(hub, tmp_path))
    gone = HubOptions(endpoint="http://127.0.0.1:9", cache_dir=tmp_path / "cache")
    assert locate_model(f"{REPOSITORY}@{COMMIT}", gone) == first


def test_a_cached_branch_outlives_the_hub(hub: Hub, tmp_path: Path) -> None:
    first = locate_model(REPOSITORY, options(hub, tmp_path))
    gone = HubOptions(endpoint="http://127.0.0.1:9", cache_dir=tmp_path / "cache")
    assert locate_model(REPOSITORY, gone) == first


def test_a_hub_out_of_reach_says_what_to_do(tmp_path: Path) -> None:
    gone = HubOptions(endpoint="http://127.0.0.1:9", cache_dir=tmp_path / "cache")
    message = failure("org/name", gone)
    assert "org/name is no directory here" in message
    assert "the hub cannot be reached (ConnectError: " in message
    assert "copy the repository here and give its directory" in message


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ((404, "RepoNotFound"), "the hub has no repository MiniMaxAI/MiniMax-M3-Tiny, or shows it"),
        ((401, "RepoNotFound"), "log in with `hf auth login` or HF_TOKEN"),
        ((403, "GatedRepo"), "asks for its terms to be accepted"),
        ((400, ""), "Tiny: the hub refused with status 400; start again later"),
    ],
)
def test_a_refusal_of_the_hub_is_explained(
    hub: Hub, tmp_path: Path, error: tuple[int, str], message: str
) -> None:
    hub.error = error
    with pytest.raises(StartupError, match=message):
        locate_model(REPOSITORY, options(hub, tmp_path))


def test_a_missing_revision_is_named(hub: Hub, tmp_path: Path) -> None:
    message = failure(f"{REPOSITORY}@no-such-branch", options(hub, tmp_path))
    assert message == f"the hub has no such branch, tag or commit: {REPOSITORY}@no-such-branch"


def test_a_repository_that_is_no_checkpoint_is_refused(hub: Hub, tmp_path: Path) -> None:
    del hub.files["config.json"]
    assert "has no config.json: it is no" in failure(REPOSITORY, options(hub, tmp_path))


def test_a_disk_that_is_too_small_is_known_before_the_download(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(hub_module.shutil, "disk_usage", lambda path: usage._replace(free=10 << 20))
    message = failure(REPOSITORY, options(hub, tmp_path))
    assert "0.04 GB are to be downloaded" in message
    assert "only 0.01 GB are free; free some, or set HF_HUB_CACHE" in message
    assert hub.fetched == []


def test_without_the_client_a_hub_id_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real_import = builtins.__import__

    def no_client(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "huggingface_hub":
            raise ModuleNotFoundError(f"No module named {name!r}", name="huggingface_hub")
        return real_import(name, *rest)

    monkeypatch.delitem(sys.modules, "m3stack.checkpoint_tools.hub")
    monkeypatch.setattr(builtins, "__import__", no_client)
    assert "pip install 'm3stack[hub]', or copy the repository here" in failure("org/name")
    # a directory needs no client
    assert locate_model(str(tmp_path)).directory == tmp_path


def test_the_client_s_own_environment_is_honoured(hub: Hub, tmp_path: Path) -> None:
    environment = os.environ | {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home")}
    code = (
        "from m3stack.checkpoint_tools.locate import locate_model\n"
        f"print(locate_model({REPOSITORY!r}).directory)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment
    )
    directory = Path(result.stdout.strip())
    assert directory.is_relative_to(tmp_path / "home")
    assert (directory / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
