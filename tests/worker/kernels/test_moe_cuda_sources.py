"""What nvcc makes of the expert kernels for sm_90a: no spills, the right units. No GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("triton")

from m3stack.kernels.build import FLAGS, SOURCES, CompilerMissingError, find_compiler
from m3stack.kernels.moe import cuda_library
from m3stack.kernels.moe.cuda_sizes import few_block_tokens

UNITS = {
    "moe_few.cu": ("LDG.E.NA.LTC256B.128", "HMMA.16816.F32.BF16", "HMUL2.BF16", "ACQBULK"),
    "moe_route.cu": ("LDG.E.128", "FFMA"),
    "moe_ring_bf16.cu": ("UTMALDG.5D", "UTMALDG.2D.MULTICAST", "HGMMA.64x256x16.F32.BF16"),
    "moe_ring_mxfp8.cu": (
        "UTMALDG.5D",
        "UTMALDG.2D.MULTICAST",
        "HGMMA.64x256x16.F32.BF16",
        "HGMMA.64x16x16.F32.BF16",
        "HMUL2.BF16",
    ),
    "moe_route_many.cu": ("UTMALDG.2D", "HGMMA.64x128x16.F32.BF16"),
}
# whose blocks hand results on to another
FENCED = ("moe_route.cu",)


@pytest.fixture(scope="module")
def compiler() -> Path:
    try:
        return find_compiler()
    except CompilerMissingError as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("source", UNITS)
def test_sources_keep_their_registers_and_use_the_units_they_name(
    compiler: Path, source: str, tmp_path: Path
) -> None:
    binary = tmp_path / "out.cubin"
    command = [str(compiler), *FLAGS, "-Xptxas", "-v", "-cubin", str(SOURCES / source)]
    done = subprocess.run([*command, "-o", str(binary)], capture_output=True, text=True)
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    spilled = re.findall(r"(\d+) bytes spill stores", report)
    assert spilled, report
    # a few values that loops do not change may stand in memory, no more
    assert max(map(int, spilled)) <= 32, report
    # the compiler's word for products that wait for one another
    assert "serialized" not in report, report
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    code = subprocess.run([str(tool), "-sass", str(binary)], capture_output=True, text=True).stdout
    for unit in UNITS[source]:
        assert unit in code, (source, unit)
    # a wait for all of a thread's writes, which in a loop of products would cost more than these
    assert source in FENCED or "MEMBAR" not in code, source


@pytest.mark.parametrize(
    ("source", "struct", "mirror"),
    [
        ("moe_few.cu", "FewArgs", cuda_library.FewArgs),
        ("moe_ring_tiles.cuh", "RingArgs", cuda_library.RingArgs),
        ("moe_order.cu", "SortArgs", cuda_library.SortArgs),
        ("moe_order.cu", "GatherArgs", cuda_library.GatherArgs),
        ("moe_route.cu", "RouteArgs", cuda_library.RouteArgs),
        ("moe_route_many.cu", "RouteManyArgs", cuda_library.RouteManyArgs),
    ],
)
def test_argument_structs_have_the_fields_of_the_sources(
    source: str, struct: str, mirror: type
) -> None:
    body = re.search(rf"struct {struct} {{(.*?)\n}};", (SOURCES / source).read_text(), re.S)
    assert body, struct
    lines = re.sub(r"//.*", "", body[1]).split(";")
    declared = [re.search(r"(\w+)$", line.strip()) for line in lines if line.strip()]
    fields = [name for name, _ in mirror._fields_]
    assert [name and name[1] for name in declared] == fields


def test_blocks_hold_what_random_routing_gives_an_expert() -> None:
    tokens = (1, 8, 64, 96, 256, 512, 640)
    blocks = [few_block_tokens(4 * count, 128) for count in tokens]
    assert blocks == [8, 8, 8, 8, 16, 32, 32]
