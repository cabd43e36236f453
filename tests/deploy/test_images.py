"""Images, compose file and units start the programs as the programs want to be started."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from m3stack.checkpoints import builtin_checkpoint
from m3stack.flags import build_parser
from m3stack.local_ports import free_port
from tests.e2e.conftest import Server, wait_for

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
GATEWAY = ROOT / "target" / "debug" / "m3stack-gateway"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


def gateway_complaint(*flags: str) -> str:
    """What the gateway says when it is started with a model that is not there."""
    command = [sys.executable, "-m", "m3stack", "gateway", *flags, "--model-path", "/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stderr
    return done.stderr


def compose() -> dict[str, dict]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]


def test_the_gateway_of_the_compose_file_misses_nothing_but_the_model() -> None:
    flags = [flag for flag in compose()["gateway"]["command"] if "--listen" not in flag]
    listen = f"--listen=0.0.0.0:{free_port()}"
    assert "/nowhere" in gateway_complaint(
        listen, *(flag for flag in flags if "--model-path" not in flag)
    )


def test_the_worker_of_the_compose_file_is_told_nothing_strange() -> None:
    arguments = build_parser().parse_args(compose()["worker"]["command"])
    assert arguments.listen == "0.0.0.0:50051"


def test_services_are_published_to_this_machine_alone_and_may_do_little() -> None:
    for name, service in compose().items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]


def test_services_get_more_time_to_end_than_they_take() -> None:
    services = compose()
    for name, flag in (("gateway", "--drain-timeout-s="), ("worker", "--drain-s=")):
        (drain,) = [one for one in services[name]["command"] if one.startswith(flag)]
        assert int(drain.removeprefix(flag)) < int(services[name]["stop_grace_period"][:-1])


def test_the_images_are_built_with_the_toolchains_the_tree_is_tested_with() -> None:
    cargo = (ROOT / "Cargo.toml").read_text()
    (least,) = re.findall(r'rust-version = "1\.(\d+)"', cargo)
    for name in ("gateway", "worker"):
        text = (DEPLOY / f"Dockerfile.{name}").read_text()
        (used,) = re.findall(r"FROM rust:1\.(\d+)-", text)
        assert int(used) >= int(least)
        assert re.search(r"^USER 10001:10001$", text, re.MULTILINE)
        for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
            assert all((ROOT / one).exists() for one in source.split())


@pytest.fixture
def image_root(tmp_path: Path) -> Path:
    """The root of the gateway's image, made from this tree's binary."""
    root = tmp_path / "root"
    script = DEPLOY / "images" / "root.sh"
    subprocess.run([script, root, GATEWAY], check=True, timeout=60)
    model = root / "opt" / "m3stack" / "checkpoints" / "tiny"
    shutil.copytree(builtin_checkpoint("tiny"), model)
    return root


def test_the_gateway_runs_in_a_root_that_holds_nothing_else(
    image_root: Path, tmp_path: Path
) -> None:
    address = f"127.0.0.1:{free_port()}"
    command = ["unshare", "--map-root-user", f"--root={image_root}", "/usr/bin/m3stack-gateway"]
    command += ["--model-path", "/opt/m3stack/checkpoints/tiny", "--listen", address]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={"PATH": "/usr/bin"})
    server = Server(process, address)
    try:
        reply = wait_for(server, "/version").json()
        counted = httpx.post(f"{server.url}/tokenize", json={"prompt": "a b c"}, timeout=60)
    finally:
        assert server.stop() == 0
    assert (reply["model"], reply["ffmpeg"]) == ("tiny", False)
    assert counted.json()["count"] > 0
    # no shell, no interpreter: one program and its libraries
    assert [path.name for path in (image_root / "usr" / "bin").iterdir()] == ["m3stack-gateway"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_units_start_what_there_is_and_give_it_time_to_drain(unit: Path) -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    parser.read(unit)
    service = parser["Service"]
    program = os.path.basename(service["ExecStart"].split()[0])
    assert program in ("m3stack-gateway", "m3stack")
    assert "--config" in service["ExecStart"]
    assert service["KillSignal"] == "SIGTERM"
    assert int(service["TimeoutStopSec"]) > 120
    for claim in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "RestrictSUIDSGID"):
        assert service[claim] == "yes"
    assert service["User"] == "m3stack"


def test_the_small_ffmpeg_has_what_the_gateway_asks_of_it() -> None:
    """Its demuxers and filters are those that the gateway names; what needs a library has it."""
    script = (DEPLOY / "images" / "ffmpeg.sh").read_text()

    def enabled(kind: str) -> set[str]:
        return {
            name
            for part in re.findall(rf"--enable-{kind}=(\S+)", script)
            for name in part.split(",")
        }

    source = ROOT / "gateway" / "server" / "src" / "media" / "ffmpeg"
    (formats,) = re.findall(r'const FORMATS: &str = "(.+?)"', (source / "mod.rs").read_text())
    # a group of readers for MPEG's own containers
    wanted = set(formats.split(",")) - {"mpeg"} | {"mpegps", "ivf"}
    assert wanted <= enabled("demuxer")

    words = (
        (source / "colours.rs").read_text().partition("fn filters(")[2].partition("#[cfg(test")[0]
    )
    words = re.sub(r"\\\n\s*", "", words)
    texts = re.findall(r'"([^"]*)"', words)
    filters = {name for text in texts for name in re.findall(r"(?:^|,)(\w+)=", text)}
    assert {"scale", "zscale", "tonemap", "premultiply", "lutrgb"} <= filters
    assert filters | {"select", "transpose", "hflip", "vflip"} <= enabled("filter")
    # decoders and filters without their library are left out without an error
    assert {"png", "apng", "libdav1d"} <= enabled("decoder")
    assert all(f"--enable-{library}" in script for library in ("zlib", "libzimg", "libdav1d"))
    dockerfile = (DEPLOY / "Dockerfile.gateway").read_text()
    assert all(name in dockerfile for name in ("zlib1g-dev", "libzimg-dev", "libdav1d-dev"))
