"""The worker's command line: flags for what deployments differ in, `--set` for everything else."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path

from m3stack.config import ENV_PREFIX, SettingSpec, WorkerConfig, resolve, setting_specs
from m3stack.errors import StartupError

FLAGS = (
    "model_path",
    "served_model_name",
    "max_context_tokens",
    "log_level",
    "listen",
    "tls_dir",
    "metrics_listen",
    "device",
    "dtype",
    "kernels",
    "tensor_parallel",
    "expert_parallel",
    "kv_memory_fraction",
    "max_sequences",
    "drain_s",
)


def load_config(argv: Sequence[str]) -> WorkerConfig:
    """The configuration a command line asks for, on top of environment and file.

    Args:
        argv: `--config FILE`, flags such as `--max-sequences 8`, and `--set num_pages=512`.

    Raises:
        StartupError: as `config.resolve`; a `--set` that is none.
        SystemExit: a flag argparse does not know (2), or `--help` (0).
    """
    flags = vars(build_parser().parse_args(argv))
    file = flags.pop("config")
    given = _assignments(flags.pop("set"))
    return resolve(flags=flags | given, environ=os.environ, file=file)


def build_parser() -> argparse.ArgumentParser:
    """One flag for each of `FLAGS`, none with a default of its own; the help names all settings."""
    specs = {spec.name: spec for spec in setting_specs()}
    rest = "\n".join(_told(spec) for name, spec in specs.items() if name not in FLAGS)
    parser = argparse.ArgumentParser(
        prog="m3stack worker",
        description="Serves one model behind gRPC. Every setting can also stand in the environment "
        f"({ENV_PREFIX}<NAME>) or in the file; the command line wins over both.",
        epilog=f"Keys for --set, the file and the environment only:\n{rest}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with the settings")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting that has no flag of its own (see below); may be given again",
    )
    for name in FLAGS:
        spec = specs[name]
        # values are checked in one place, by `resolve`; argparse reads a bare % as a format
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            default=None,
            metavar=spec.type.__name__.upper(),
            help=(spec.help + _default(spec)).replace("%", "%%"),
        )
    return parser


def _told(spec: SettingSpec) -> str:
    text = textwrap.fill(spec.help + _default(spec), 90, initial_indent=" " * 8)
    return f"  {spec.name}\n" + text.replace("\n", "\n" + " " * 8)


def _default(spec: SettingSpec) -> str:
    return "" if spec.default in ("", 0) else f" (default: {spec.default})"


def _assignments(given: Sequence[str]) -> dict[str, str]:
    """What stands behind `--set`."""
    known = {spec.name for spec in setting_specs()}
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals:
            raise StartupError(f"--set: expected KEY=VALUE, got {text!r}")
        if name in FLAGS:
            raise StartupError(f"--set: {name} has a flag of its own: --{name.replace('_', '-')}")
        if name not in known:
            raise StartupError(f"--set: unknown setting {name}; `m3stack worker --help` lists them")
        found[name] = value.strip()
    return found
