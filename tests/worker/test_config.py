"""Where settings come from, which one wins, and what is refused."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from m3stack.config import SHARED_NAMES, WorkerConfig, resolve, setting_specs
from m3stack.errors import StartupError
from m3stack.flags import FLAGS, load_config


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "m3stack.toml"
    path.write_text(text)
    return path


def test_defaults_are_complete_and_good() -> None:
    config = resolve(flags={}, environ={})
    assert config == WorkerConfig()
    for spec in setting_specs():
        # every default passes its own check when given explicitly
        resolve(flags={spec.name: spec.default}, environ={})


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        [shared]
        log_level = "warn"
        [gateway]
        anything = "is the gateway's"
        [worker]
        max_sequences = 3
        max_batch_tokens = 100
        drain_s = 5
        """,
    )
    config = resolve(
        flags={"max_batch_tokens": 300, "listen": None},
        environ={
            "M3STACK_WORKER_MAX_SEQUENCES": "4",
            "M3STACK_WORKER_MAX_BATCH_TOKENS": "200",
            "M3STACK_GATEWAY_LISTEN": "x",
        },
        file=file,
    )
    assert (config.log_level, config.drain_s) == ("warn", 5.0)
    assert (config.max_sequences, config.max_batch_tokens) == (4, 300)
    assert config.listen == WorkerConfig().listen


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        ({"max_seqs": 3}, {}, "--max-seqs: unknown setting max_seqs"),
        ({}, {"M3STACK_WORKER_PORT": "3"}, "environment M3STACK_WORKER_PORT: unknown setting"),
        ({"max_sequences": 0}, {}, "max_sequences is 0, expected at least 1"),
        ({"max_sequences": True}, {}, "max_sequences is True, expected an integer"),
        ({}, {"M3STACK_WORKER_MAX_SEQUENCES": "4.5"}, "'4.5', expected an integer"),
        ({}, {"M3STACK_WORKER_PREFIX_CACHE": "maybe"}, "'maybe', expected true or false"),
        ({"kv_memory_fraction": 1.5}, {}, "1.5, expected above 0 and at most 1"),
        ({"drain_s": float("nan")}, {}, "nan, expected a finite number"),
        ({"listen": "nowhere"}, {}, "'nowhere', expected host:port"),
        ({"listen": "host:70000"}, {}, "'host:70000', expected host:port"),
        ({"metrics_listen": ""}, {}, "expected host:port or off"),
        ({"device": "tpu"}, {}, "'tpu', expected auto, cpu, cuda or cuda:N"),
        ({"dtype": "int8"}, {}, "expected one of auto, float32, bfloat16"),
        ({"log_level": "loud"}, {}, "expected one of debug, info, warn, warning, error"),
        ({"host_cache_bytes": -2}, {}, "host_cache_bytes is -2, expected at least -1"),
        ({"mixed_step_slowdown": 1.0}, {}, "1.0, expected -1, 0 or a number above 1"),
        (
            {"max_mixed_tokens": 64},
            {},
            "max_mixed_tokens is 64, expected more than max_sequences (64)",
        ),
        (
            {"max_batch_tokens": 8, "max_sequences": 8},
            {},
            "max_batch_tokens is 8, expected more than max_sequences (8)",
        ),
        (
            {"tensor_parallel": 4, "expert_parallel": 3},
            {},
            "expert_parallel is 3, expected a divisor of tensor_parallel (4)",
        ),
        ({"shard_index_keys": True}, {}, "shard_index_keys needs tensor_parallel of at least 2"),
        (
            {"hosts": 2, "host_index": 2},
            {},
            "host_index is 2, expected less than hosts, which is 2",
        ),
        (
            {"hosts": 2, "tensor_parallel": 3, "leader_address": "a:1"},
            {},
            "tensor_parallel is 3, expected a multiple of hosts, which is 2",
        ),
        ({"hosts": 2, "tensor_parallel": 2}, {}, "leader_address is ''"),
        (
            {"hosts": 2, "tensor_parallel": 2, "leader_address": "a:0"},
            {},
            "leader_address is 'a:0'",
        ),
        ({}, {"LWS_GROUP_SIZE": "two"}, "environment LWS_GROUP_SIZE: hosts is 'two'"),
        ({"allowed_sources": "10.0.0.0/33"}, {}, "expected names, *.suffixes, addresses"),
        ({"allowed_sources": "a,,b"}, {}, "expected names, *.suffixes, addresses"),
    ],
)
def test_bad_settings_are_refused_by_name(
    flags: dict[str, object], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(StartupError) as refused:
        resolve(flags=flags, environ=environ)
    assert message in str(refused.value)


def test_the_controller_of_a_group_of_pods_says_where_this_one_stands() -> None:
    told = {
        "LWS_GROUP_SIZE": "2",
        "LWS_WORKER_INDEX": "1",
        "LWS_LEADER_ADDRESS": "m3-0.m3.serving",
    }
    config = resolve(flags={"tensor_parallel": 16}, environ=told)
    assert (config.hosts, config.host_index) == (2, 1)
    assert config.leader_address == "m3-0.m3.serving:50052"
    # what a person says comes first
    own = {"tensor_parallel": 16, "leader_address": "10.0.0.1:7"}
    assert resolve(flags=own, environ=told).leader_address == "10.0.0.1:7"


def test_all_bad_settings_are_named_at_once() -> None:
    with pytest.raises(StartupError) as refused:
        resolve(flags={"dtype": "x", "nope": 1}, environ={"M3STACK_WORKER_DRAIN_S": "-1"})
    assert len(str(refused.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[workers]\nx = 1", "unknown workers"),
        ("[worker]\nlog_level = 'info'", "[worker] log_level belongs in [shared]"),
        ("[shared]\ndrain_s = 3", "[shared] drain_s belongs in [worker]"),
        ("[worker]\nport = 3", "[worker]: unknown setting port"),
        ("[worker", "cannot be read"),
        ("listen = 'x:1'", "unknown listen"),
    ],
)
def test_files_with_unknown_content_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(StartupError) as refused:
        resolve(flags={}, environ={}, file=write(tmp_path, text))
    assert message in str(refused.value)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be read"):
        resolve(flags={}, environ={}, file=tmp_path / "none.toml")


def test_booleans_and_numbers_are_read_from_text() -> None:
    config = resolve(
        flags={},
        environ={
            "M3STACK_WORKER_PREFIX_CACHE": "false",
            "M3STACK_WORKER_VISION_CACHE_BYTES": "1_000_000",
            "M3STACK_WORKER_UPLOAD_TIMEOUT_S": "2.5",
        },
    )
    assert config.prefix_cache is False
    assert (config.vision_cache_bytes, config.upload_timeout_s) == (1_000_000, 2.5)


def test_model_name_is_the_directory_unless_named() -> None:
    assert resolve(flags={"model_path": "/models/m3/"}, environ={}).model_name == "m3"
    assert resolve(flags={"served_model_name": "x"}, environ={}).model_name == "x"


def test_command_line_offers_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_config(["--help"])
    shown = capsys.readouterr().out
    for spec in setting_specs():
        flag = f"--{spec.name.replace('_', '-')} "
        assert (flag if spec.name in FLAGS else f"\n  {spec.name}\n") in shown


def test_example_file_names_every_setting_and_is_one() -> None:
    example = Path(__file__).parents[2] / "deploy" / "m3stack.example.toml"
    resolve(flags={}, environ={}, file=example)
    table = example.read_text().partition("[worker]")[2]
    named = set(re.findall(r"^(?:# )?(\w+) = ", table, re.MULTILINE)) | set(SHARED_NAMES)
    assert named == {spec.name for spec in setting_specs()}


def test_gateway_and_worker_have_at_most_forty_flags() -> None:
    gateway = subprocess.run(
        [sys.executable, "-m", "m3stack", "gateway", "--help"], capture_output=True, text=True
    )
    flags = set(re.findall(r"^ +--([a-z-]+)", gateway.stdout, re.MULTILINE)) - {"help", "version"}
    assert 10 < len(flags) <= 40 - (len(FLAGS) + len(("config", "set")))


def test_command_line_reads_file_flags_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, "[worker]\nmax_sequences = 5\ndrain_s = 7\nkernels = 'reference'")
    monkeypatch.setenv("M3STACK_WORKER_DRAIN_S", "8")
    config = load_config(["--config", str(file), "--kernels", "x", "--set", "prefix_cache=false"])
    assert (config.max_sequences, config.drain_s, config.kernels) == (5, 8.0, "x")
    assert config.prefix_cache is False
    with pytest.raises(StartupError, match="--num-pages: num_pages is 'many'"):
        load_config(["--set", "num_pages=many"])
    for text, told in (
        ("num_pages", "expected KEY=VALUE"),
        ("pages=3", "unknown setting pages"),
        ("device=cpu", "has a flag of its own: --device"),
    ):
        with pytest.raises(StartupError, match=told):
            load_config(["--set", text])
