"""The settings that the chart writes are ones that both programs know and accept."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from m3stack.config import WorkerConfig, resolve
from tests.deploy.chart import EXAMPLES, Object, of_kind, pods, rendered

# what the chart mounts from secrets, in the form the gateway wants it
KEYS = '[[keys]]\nname = "test"\nkey = "0123456789abcdef0123"\n'
LIMITS = "[default]\nmax_concurrent_requests = 8\n"


def settings(example: Path, part: str) -> str:
    """The TOML file of a part."""
    (text,) = [
        item["data"]["m3stack.toml"]
        for item in of_kind(rendered(example), "ConfigMap")
        if item["metadata"]["name"].endswith(f"-{part}")
    ]
    return text


every_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)


@every_example
def test_the_worker_takes_its_settings(example: Path, tmp_path: Path) -> None:
    file = tmp_path / "m3stack.toml"
    file.write_text(settings(example, "worker"))
    config = resolve(flags={}, environ={}, file=file)
    assert isinstance(config, WorkerConfig)
    (port,) = {
        port["containerPort"]
        for pod in pods(rendered(example))
        for container in pod.containers
        for port in container.get("ports", [])
        if port["name"] == "grpc"
    }
    assert config.listen == f"0.0.0.0:{port}"


@pytest.mark.parametrize("index", [0, 1])
def test_a_pod_of_a_group_finds_its_place_in_it(index: int, tmp_path: Path) -> None:
    example = EXAMPLES[[path.stem for path in EXAMPLES].index("leader-worker-set")]
    file = tmp_path / "m3stack.toml"
    file.write_text(settings(example, "worker"))
    told = {
        "LWS_GROUP_SIZE": "2",
        "LWS_WORKER_INDEX": str(index),
        "LWS_LEADER_ADDRESS": "demo-m3stack-worker-0.demo-m3stack-worker.serving",
    }
    config = resolve(flags={}, environ=told, file=file)
    assert (config.tensor_parallel, config.hosts, config.host_index) == (16, 2, index)
    assert config.leader_address == f"{told['LWS_LEADER_ADDRESS']}:50052"
    # one that every pod of the worker mounts
    assert config.host_key_file.startswith(config.tls_dir)


@every_example
def test_the_gateway_misses_nothing_but_the_model(example: Path, tmp_path: Path) -> None:
    file = tmp_path / "m3stack.toml"
    text = settings(example, "gateway")
    # mounted folders are laid out here instead
    file.write_text(text.replace("/etc/m3stack-", f"{tmp_path}/"))
    lay_out(tmp_path)
    command = [sys.executable, "-m", "m3stack", "gateway", "--config", str(file)]
    command += ["--listen", "0.0.0.0:0", "--admin-listen", "127.0.0.1:0"]
    command += ["--model-path", "/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stderr
    assert "/nowhere" in done.stderr


@every_example
def test_every_file_a_setting_names_is_mounted(example: Path) -> None:
    for part, kind in (("gateway", "Deployment/"), ("worker", "")):
        table: Object = tomllib.loads(settings(example, part))[part]
        named = [str(value) for value in table.values() if str(value).startswith("/etc/")]
        for pod in pods(rendered(example)):
            if not pod.owner.startswith(kind) or f"-{part}" not in pod.owner:
                continue
            mounts = [m["mountPath"] for one in pod.containers for m in one["volumeMounts"]]
            for path in named:
                assert any(path.startswith(mount) for mount in mounts), (pod.owner, path)


def lay_out(folder: Path) -> None:
    """The secrets of every example."""
    for name, file, text in (("keys", "keys.toml", KEYS), ("limits", "limits.toml", LIMITS)):
        (folder / name).mkdir()
        (folder / name / file).write_text(text)
    for name in ("tls", "worker-tls"):
        (folder / name).mkdir()
        make_certificate(folder / name)


def make_certificate(folder: Path) -> None:
    """tls.crt, tls.key and ca.crt of one self-signed name."""
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "1", "-subj", "/CN=m3stack", "-addext", "subjectAltName=DNS:m3"]
    command += ["-keyout", str(folder / "tls.key"), "-out", str(folder / "tls.crt")]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    (folder / "ca.crt").write_bytes((folder / "tls.crt").read_bytes())
