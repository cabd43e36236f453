"""When a library is built, and that the compiler's processes end with the build."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from m3stack.kernels import build
from m3stack.kernels.build import CompileError, build_library

# the first source is refused; any other is never done, and says so where it is read
COMPILER = """#!/bin/sh
case "$*" in
    *moe_few.cu*) read line < {folder}/started; exit 1 ;;
    *) exec 3< {folder}/never; echo > {folder}/started; exec cat <&3 ;;
esac
"""


def test_a_refused_source_ends_the_compilers_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "bin" / "nvcc"
    compiler.parent.mkdir()
    compiler.write_text(COMPILER.format(folder=tmp_path))
    compiler.chmod(0o755)
    for name in ("started", "never"):
        os.mkfifo(tmp_path / name)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("M3STACK_KERNEL_CACHE", str(tmp_path / "cache"))
    ends: list[bytes] = []

    def write_until_nobody_reads() -> None:
        with (tmp_path / "never").open("wb", buffering=0) as pipe:
            try:
                while True:
                    pipe.write(b"x" * 4096)
            except BrokenPipeError:
                ends.append(b"closed")

    writer = threading.Thread(target=write_until_nobody_reads, daemon=True)
    writer.start()
    with pytest.raises(CompileError, match="failed with 1"):
        build_library("refused", ("moe_few.cu", "moe_order.cu"))
    writer.join(60)
    assert ends == [b"closed"]


def test_a_library_is_built_anew_when_what_it_includes_changes_and_then_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {
        "one.cu": '#include "inner.cuh"\n',
        "inner.cuh": '#include <vector>\n#include "deep.cuh"\n',
        "deep.cuh": "int deep;\n",
        "other.cu": "int other;\n",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    one, other = (build.fingerprint([name]) for name in ("one.cu", "other.cu"))
    (tmp_path / "deep.cuh").write_text("int deeper;\n")
    assert build.fingerprint(["one.cu"]) != one
    assert build.fingerprint(["other.cu"]) == other
