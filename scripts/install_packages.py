"""Installs the extras of pyproject.toml into this virtual environment, with pinned versions.

Usage: install_packages.py PYPROJECT PINS EXTRA...
The project itself is not built here; `maturin develop` and `link_package.py` do that.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path


def requirements(pyproject: dict, extras: list[str]) -> list[str]:
    """Requirements of the package and the named extras, references between extras resolved."""
    project = pyproject["project"]
    wanted: list[str] = list(project["dependencies"])
    pending = list(extras)
    while pending:
        for requirement in project["optional-dependencies"][pending.pop()]:
            nested = re.fullmatch(rf"{project['name']}\[([\w,]+)\]", requirement)
            if nested:
                pending += nested[1].split(",")
            else:
                wanted.append(requirement)
    return wanted + list(pyproject["build-system"]["requires"])


def main() -> int:
    pyproject_path, pins, *extras = sys.argv[1:]
    pyproject = tomllib.loads(Path(pyproject_path).read_text())
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", pins]
    return subprocess.call(command + requirements(pyproject, extras))


if __name__ == "__main__":
    sys.exit(main())
