"""What nvcc makes of the prefill sources: products in flight, registers kept. No GPU needed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from m3stack.kernels.build import FLAGS, SOURCES, CompilerMissingError, find_compiler

# products per kernel: 8 a page and row block, for each place in the code that multiplies
PRODUCTS = {
    "msa_prefill_score.cu": ("score_tiles", 16),
    "msa_prefill_union.cu": ("attend_unions", 40),
    "msa_prefill_union_e4m3.cu": ("attend_coded_unions", 40),
    "msa_prefill_kv_attend.cu": ("attend_key_major", 16),
}
# a register or two outside the loops; the scorer keeps everything
SPILLED_BYTES = {
    "score_tiles": 0,
    "attend_unions": 8,
    "attend_coded_unions": 16,
    "attend_key_major": 8,
}


@pytest.fixture(scope="module")
def compiler() -> Path:
    try:
        return find_compiler()
    except CompilerMissingError as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("source", PRODUCTS)
def test_products_stay_in_flight_and_registers_in_place(compiler, source, tmp_path):
    kernel, products = PRODUCTS[source]
    command = [str(compiler), *FLAGS, "-Xptxas", "-v", "-cubin", str(SOURCES / source)]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "out.cubin")], capture_output=True, text=True
    )
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    assert "serialized" not in report, report
    entries = re.findall(
        rf"Compiling entry function '\w*{kernel}\w*'.*?(\d+) bytes spill stores", report, re.S
    )
    assert entries, report
    assert max(map(int, entries)) <= SPILLED_BYTES[kernel], report
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    listing = subprocess.run(
        [str(tool), "-sass", str(tmp_path / "out.cubin")], capture_output=True, text=True
    ).stdout
    assert len(re.findall("HGMMA", listing)) >= products * len(entries), source
