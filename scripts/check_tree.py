"""Rules of the tree no other tool checks: line budgets, one version, generated code current.

Exit status 1 and one line a finding; nothing is changed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 400
# files that may be longer, each with its reason
LONGER = (
    # one file is one pipeline; splitting it would hide the order of its stages
    ("worker/m3stack/kernels/", 700),
    # a list of claims about one unit, read one at a time
    ("tests/", 600),
    ("tests.rs", 600),
)


def budget_of(name: str) -> int:
    """Lines a source file may have."""
    return next((limit for part, limit in LONGER if part in name), MAX_LINES)


def tracked(*patterns: str) -> list[Path]:
    """Files git knows, matching the patterns."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def long_files() -> list[str]:
    """Source files over their line budget."""
    findings = []
    for path in tracked("*.py", "*.rs", "*.cu", "*.cuh"):
        name = path.relative_to(ROOT).as_posix()
        if "_pb2" in name:
            continue
        budget = budget_of(name)
        lines = path.read_bytes().count(b"\n")
        if lines > budget:
            findings.append(f"{name}: {lines} lines, the budget is {budget}")
    return findings


def versions() -> list[str]:
    """The one version number, wherever it stands."""
    cargo = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    python = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    source = (ROOT / "worker/m3stack/__init__.py").read_text()
    if cargo == python and f'__version__ = "{cargo}"' in source:
        return []
    return [f"versions differ: Cargo.toml {cargo}, pyproject.toml {python}, m3stack/__init__.py"]


def generated_code() -> list[str]:
    """Whether the committed proto code is what the pinned generator makes."""
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            [sys.executable, "-m", "grpc_tools.protoc", "-Iproto", f"--python_out={scratch}",
             f"--pyi_out={scratch}", f"--grpc_python_out={scratch}",
             "proto/m3stack/worker/v1/worker.proto"],
            cwd=ROOT,
            check=True,
        )  # fmt: skip
        made = sorted(Path(scratch).rglob("*_pb2*"))
        stale = [
            path.name
            for path in made
            if path.read_bytes() != (ROOT / "worker" / path.relative_to(scratch)).read_bytes()
        ]
    return [f"{name} is not what the proto says now; run `make proto`" for name in stale]


def main() -> int:
    findings = long_files() + versions() + generated_code()
    for finding in findings:
        print(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
