"""What the compilers make of the decode kernels for sm_90: no spills, the right units. No GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from m3stack.kernels.build import FLAGS, SOURCES, CompilerMissingError, find_compiler
from m3stack.kernels.msa.decode import cuda_library

# instructions each source must have: bulk and 16-byte asynchronous copies, matrix products
UNITS = {
    "msa_decode_score.cu": ("UBLKCP", "HMMA.16816.F32.BF16", "IMMA.16832.S8.S8"),
    "msa_decode_select.cu": ("REDUX",),
    "msa_decode_settle.cu": ("HMMA.16816.F32.BF16", "STAS"),
    "msa_decode_attend.cu": ("LDGSTS.E.BYPASS.128", "HMMA.16816.F32.BF16", "LDSM.16.MT88.4"),
    "msa_decode_attend_block.cu": ("LDGSTS.E.BYPASS.128", "HMMA.16816.F32.BF16", "STAS.64"),
}

# run apart: the interpreter of the other tests is chosen when a kernel is declared
COMPILED = """
import json, re, subprocess, sys, triton
from pathlib import Path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from m3stack.kernels.attention import with_triton as dense
from m3stack.kernels.msa.decode import index_copy, with_triton as decode
from m3stack.kernels.pointwise import with_triton as pointwise
HALF, INT, FLOAT, LONG = "*bf16", "*i32", "*fp32", "*i64"
POINTERS = dict(q=HALF, k=HALF, v=HALF, out=HALF, index_q=HALF, index_k=HALF, q_out=HALF,
    index_q_out=HALF, k_pages=HALF, v_pages=HALF, index_pages=HALF, partial=FLOAT, shares=FLOAT,
    slots=LONG, index_slots=LONG, cos=FLOAT, sin=FLOAT, eps="fp32", scale_log2="fp32", pages=HALF,
    query_start=INT,
    seq_lens=INT, table=INT, keys=INT, blocks=INT, q_norm=FLOAT, k_norm=FLOAT, index_q_norm=FLOAT,
    index_k_norm=FLOAT, copy="*i8", meta=INT)
KERNELS = {
    "copy": (index_copy._copy_kernel, dict(PAGE=128, DIM=128, SHARE=2.0**-11, SLACK=1.001,
        MOST=1e18, LEAST=1e-15), 1),
    "score": (decode._score_kernel, dict(GROUPS=4, DIM=128, PAGE=128, COLUMNS=16, PAGES=2,
        WIDEN=False), 4),
    "select": (decode._select_kernel, dict(GROUPS=4, PAGE=128, TILE=8192, CHOSEN=16,
        SEQUENCES=64), 8),
    "attend": (decode._attend_kernel, dict(GROUPS=4, HEADS=16, HEAD_TILE=16, DIM=128, PAGE=128,
        SPLITS=4, SEQUENCES=64, WIDEN=False), 4),
    "attend_e4m3": (decode._attend_kernel, dict(GROUPS=4, HEADS=16, HEAD_TILE=16, DIM=128, PAGE=128,
        SPLITS=4, SEQUENCES=64, WIDEN=False), 4),
    "merge": (decode._merge_kernel, dict(HEADS=16, DIM=128, SPLITS=64), 4),
    "dense": (dense._paged_kernel, dict(GROUPS=4, HEADS=16, HEAD_TILE=16, ROWS=4, DIM=128,
        PAGE=128, SPLITS=1, WIDEN=False), 8),
    "prologue": (pointwise._prologue_kernel, dict(HEADS=64, GROUPS=4, INDEX_GROUPS=4,
        DIM=128, ROTATED=64, PAGE=128, HAS_INDEX=True, TILE=16, NARROW=False), 4),
}
tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
report = {}
for name, (function, constants, warps) in KERNELS.items():
    pointers = POINTERS | (dict(k="*fp8e4nv", v="*fp8e4nv") if "e4m3" in name else {})
    signature = {argument: "constexpr" if argument in constants else pointers.get(argument, "i32")
        for argument in function.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, (argument, kind) in
        enumerate(signature.items()) if kind.startswith("*") or (kind == "i32" and "_" in argument
        and argument.split("_")[-1] in ("stride", "page", "group", "token", "slot", "head"))}
    source = ASTSource(function, signature, constants, aligned)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32),
        options=dict(num_warps=warps, num_stages=2))
    Path(name).write_bytes(built.asm["cubin"])
    code = subprocess.run([tool, "-sass", name], capture_output=True, text=True).stdout
    report[name] = dict(products=len(re.findall("HGMMA|HMMA", code)),
        warpgroup=len(re.findall("HGMMA", code)), spills=len(re.findall(r"\\b(LDL|STL)\\b", code)))
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def compiler() -> Path:
    try:
        return find_compiler()
    except CompilerMissingError as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("source", cuda_library.SOURCES)
def test_cuda_sources_keep_their_registers_and_use_the_units_they_name(compiler, source, tmp_path):
    binary = tmp_path / "out.cubin"
    command = [str(compiler), *FLAGS, "-Xptxas", "-v", "-cubin", str(SOURCES / source)]
    done = subprocess.run([*command, "-o", str(binary)], capture_output=True, text=True)
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    spilled = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", report)
    assert spilled, report
    assert all(entry == ("0", "0") for entry in spilled), report
    code = disassembled(binary)
    for unit in UNITS[source]:
        assert unit in code, (source, unit)


def disassembled(binary: Path) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([str(tool), "-sass", str(binary)], capture_output=True, text=True).stdout


def test_triton_kernels_compile_for_hopper_without_spills(tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", COMPILED],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert all(kernel["spills"] == 0 for kernel in report.values()), report
    # keys are the 128 rows of the product, so scoring takes the warpgroup unit
    assert report["score"]["warpgroup"] > 0, report
    assert report["dense"]["warpgroup"] > 0, report
    assert report["attend"]["products"] > 0, report
    assert report["attend_e4m3"]["products"] > 0, report


def test_argument_structs_have_the_layout_of_the_sources():
    """Field names and order of each ctypes struct are those of the struct in the source."""
    text = "".join(path.read_text() for path in sorted(SOURCES.glob("msa_decode_*")))
    for name in ("ScoreArgs", "SelectArgs", "SettleArgs", "AttendArgs"):
        body = re.search(rf"struct {name} {{(.*?)\n}};", text, re.S)
        assert body, name
        declared = []
        for line in re.sub(r"//.*", "", body[1]).split(";"):
            names = re.findall(r"(\w+)\s*(?:,|$)", line.strip())
            for field in names:
                # three strides travel as one struct
                parts = ("page_stride", "group_stride", "token_stride")
                if field.endswith("_strides"):
                    declared += [f"{field.removesuffix('_strides')}_{part}" for part in parts]
                else:
                    declared.append(field)
        fields = [field for field, _ in getattr(cuda_library, name)._fields_]
        assert declared == fields, name
