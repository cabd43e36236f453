"""A wheel that lacks something, or holds what it should not, is found out."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from scripts import wheel

INFO = "m3stack-0.1.0.dist-info"
GOOD = {
    wheel.MODULE: b"",
    **dict.fromkeys(wheel.NEEDED, b""),
    f"{INFO}/METADATA": b"",
    f"{INFO}/entry_points.txt": b"[console_scripts]\nm3stack=m3stack.cli:main\n",
    f"{INFO}/licenses/LICENSE": b"",
}


def made(folder: Path, files: dict[str, bytes], tag: str = wheel.TAG) -> Path:
    path = folder / f"m3stack-0.1.0-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def without(name: str) -> dict[str, bytes]:
    return {other: data for other, data in GOOD.items() if other != name}


def test_a_good_wheel_is_good(tmp_path: Path) -> None:
    assert wheel.findings(made(tmp_path, GOOD), set(wheel.NEEDED)) == []


@pytest.mark.parametrize(
    ("files", "tag", "finding"),
    [
        (without(wheel.MODULE), wheel.TAG, f"{wheel.MODULE} is missing"),
        (without("m3stack/py.typed"), wheel.TAG, "m3stack/py.typed is missing"),
        (without(f"{INFO}/licenses/LICENSE"), wheel.TAG, "the licence is missing"),
        (without(f"{INFO}/entry_points.txt"), wheel.TAG, "the command m3stack is missing"),
        (GOOD | {"m3stack/notes.txt": b""}, wheel.TAG, "m3stack/notes.txt does not belong there"),
        (GOOD, "cp311-abi3-linux_x86_64", f"is not tagged {wheel.TAG}"),
        (GOOD, "cp311-cp311-manylinux_2_28_x86_64", f"is not tagged {wheel.TAG}"),
        (
            GOOD | {f"{wheel.CHECKPOINT}model.safetensors": bytes(wheel.MAX_CHECKPOINT_BYTES + 1)},
            wheel.TAG,
            f"the checkpoint has {wheel.MAX_CHECKPOINT_BYTES + 1} bytes",
        ),
    ],
)
def test_what_is_wrong_is_named(
    files: dict[str, bytes], tag: str, finding: str, tmp_path: Path
) -> None:
    (told,) = wheel.findings(made(tmp_path, files, tag), set(wheel.NEEDED))
    assert finding in told


def test_what_the_package_is_made_of_is_what_a_wheel_must_hold() -> None:
    wanted = wheel.sources()
    assert set(wheel.NEEDED) <= wanted
    for part in ("kernels/csrc/msa_decode_score.cu", "worker/v1/worker_pb2.py", "cli/top.py"):
        assert f"m3stack/{part}" in wanted
    assert not any("__pycache__" in name or name.endswith(".so") for name in wanted)
    folder = wheel.ROOT / "worker" / wheel.CHECKPOINT
    assert sum(path.stat().st_size for path in folder.iterdir()) <= wheel.MAX_CHECKPOINT_BYTES
