"""Holds a built wheel to what it must be: its tag, its files, the C library it asks for; tries it.

Usage: wheel.py check WHEEL | wheel.py try WHEEL

`check` exits with 1 and one line a finding. `try` installs the wheel into a fresh environment,
without what it depends on, and starts what needs nothing else: the compiled module and the help of
the gateway.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TAG = "cp311-abi3-manylinux_2_28_x86_64"
MODULE = "m3stack/_gateway.abi3.so"
CHECKPOINT = "m3stack/checkpoints/tiny/"
MAX_CHECKPOINT_BYTES = 12 << 20
MAX_WHEEL_BYTES = 40 << 20
# files that nobody can do without, whatever else is listed
NEEDED = ("m3stack/py.typed", "m3stack/_gateway.pyi", f"{CHECKPOINT}model.safetensors")


def sources() -> set[str]:
    """What of the package git knows, as paths in a wheel."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "worker/m3stack"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return {name.removeprefix("worker/") for name in listed.split("\0") if name}


def findings(wheel: Path, wanted: set[str]) -> list[str]:
    """What is wrong with a wheel, one line each.

    Args:
        wheel: its file.
        wanted: paths that it must hold beside the compiled module and its own metadata.
    """
    told: list[str] = []
    if not wheel.name.endswith(f"-{TAG}.whl"):
        told.append(f"{wheel.name} is not tagged {TAG}")
    if wheel.stat().st_size > MAX_WHEEL_BYTES:
        told.append(f"the wheel has {wheel.stat().st_size} bytes, at most {MAX_WHEEL_BYTES}")
    with zipfile.ZipFile(wheel) as archive:
        held = {item.filename: item.file_size for item in archive.infolist()}
        metadata = {name for name in held if re.match(r"[^/]+\.dist-info/", name)}
        entries = [archive.read(name).decode() for name in metadata if name.endswith("points.txt")]
    files = set(held) - metadata
    told += [f"{name} is missing" for name in sorted((wanted | set(NEEDED) | {MODULE}) - files)]
    told += [f"{name} does not belong there" for name in sorted(files - wanted - {MODULE})]
    checkpoint = sum(size for name, size in held.items() if name.startswith(CHECKPOINT))
    if checkpoint > MAX_CHECKPOINT_BYTES:
        told.append(f"the checkpoint has {checkpoint} bytes, at most {MAX_CHECKPOINT_BYTES}")
    if not any("m3stack=m3stack.cli:main" in text.replace(" ", "") for text in entries):
        told.append("the command m3stack is missing")
    if not any(name.endswith("/licenses/LICENSE") for name in metadata):
        told.append("the licence is missing")
    return told


def library_findings(wheel: Path) -> list[str]:
    """What the wheel asks of the C library beyond its tag, as auditwheel judges it."""
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return [f"auditwheel: {done.stderr.strip()}"]
    found = re.search(r'platform tag:\s*"(\w+)"', done.stdout)
    platform = TAG.partition("abi3-")[2]
    if found is None or found[1] != platform:
        return [f"auditwheel takes it for {found[1] if found else 'nothing'}, not {platform}"]
    return []


def attempt(wheel: Path) -> None:
    """Raises subprocess.CalledProcessError if the wheel does not work by itself."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        for command in (
            [python, "-m", "pip", "install", "--quiet", "--no-deps", wheel.resolve()],
            [python, "-c", "import m3stack._gateway as gateway; print(gateway.__version__)"],
            [python.with_name("m3stack"), "gateway", "--help"],
        ):
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    match sys.argv[1:]:
        case ["check", name]:
            told = [*findings(Path(name), sources()), *library_findings(Path(name))]
            for line in told:
                print(line)
            return 1 if told else 0
        case ["try", name]:
            attempt(Path(name))
            return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
