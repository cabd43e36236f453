"""Makes the working tree's `worker/` importable in this virtual environment, with its command.

Stands in for `pip install -e .`, which would compile the gateway a second time.
"""

from __future__ import annotations

import site
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = Path(site.getsitepackages()[0])
    (packages / "m3stack.pth").write_text(f"{ROOT / 'worker'}\n")
    for name, target in project["scripts"].items():
        module, function = target.split(":")
        script = Path(sys.executable).parent / name
        script.write_text(
            f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\n"
            f"sys.exit({function}())\n"
        )
        script.chmod(0o755)
    return 0


if __name__ == "__main__":
    sys.exit(main())
