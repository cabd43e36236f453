"""Prefill choice and attention without a GPU: Triton in the interpreter, lists, ring order."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is declared

triton = pytest.importorskip("triton")

from m3stack.bench.kernels.batches import BatchShape, make_batch  # noqa: E402
from m3stack.bench.kernels.prefill_selections import rolling_selection  # noqa: E402
from m3stack.kernels.interface import NO_BLOCK, LayerPages, PagedRows  # noqa: E402
from m3stack.kernels.msa import reference  # noqa: E402
from m3stack.kernels.msa.prefill import (  # noqa: E402
    block_attention_prefill,
    choose_blocks_prefill,
    with_triton,
)
from m3stack.kernels.msa.prefill.limits import HEADS_PER_GROUP  # noqa: E402
from m3stack.kernels.msa.prefill.lists import (  # noqa: E402
    cut_rows,
    invert_blocks,
    load_factor,
    tile_union,
)
from m3stack.kernels.msa.prefill.row_tiles import cut_tiles  # noqa: E402
from m3stack.kernels.msa.prefill.with_cuda import CudaPrefill  # noqa: E402

# the interpreter turns one-element arrays into loop bounds
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK, DIM, GROUPS, HEADS, CHOSEN = 16, 16, 2, 6, 4
NO_ADDRESS = 1 << 30
# a chunk in mid sequence, one from its start, a decode row, an idle row, a partial last page
LENGTHS, COUNTS = (75, 18, 50, 0, 16), (7, 18, 1, 2, 3)


def ragged_rows(lengths=LENGTHS, counts=COUNTS) -> tuple[PagedRows, int]:
    """Rows over shuffled pages; table entries past a sequence are no addresses."""
    torch.manual_seed(1)
    needed = [-(-length // BLOCK) for length in lengths]
    order = torch.randperm(sum(needed) + 2).tolist()
    table = torch.full((len(lengths), max(needed)), NO_ADDRESS, dtype=torch.int32)
    for sequence, count in enumerate(needed):
        table[sequence, :count] = torch.tensor([order.pop() for _ in range(count)])
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    lens = torch.tensor(lengths, dtype=torch.int32)
    rows = PagedRows(
        starts.to(DEVICE), lens.to(DEVICE), table.to(DEVICE), max(counts), max(lengths)
    )
    return rows, sum(needed) + 2


def poisoned_pages(rows: PagedRows, num_pages: int, dtype: torch.dtype) -> LayerPages:
    """Random pages with NaN in every slot that holds no key."""
    written = torch.zeros(num_pages, BLOCK, dtype=torch.bool)
    for length, table in zip(rows.seq_lens_S.tolist(), rows.page_table_SJ.cpu(), strict=True):
        for slot in range(length):
            written[table[slot // BLOCK], slot % BLOCK] = True
    hidden = ~written[:, None, :, None].to(DEVICE)
    pool = (num_pages, GROUPS, BLOCK, DIM)
    k, v = (torch.randn(pool, device=DEVICE).masked_fill(hidden, torch.nan) for _ in range(2))
    # small integers: sums are exact in any order, and ties are common
    index_k = torch.randint(-2, 3, (num_pages, BLOCK, DIM), device=DEVICE).float()
    index_k = index_k.masked_fill(hidden[:, 0], torch.nan)
    return LayerPages(k.to(dtype), v.to(dtype), index_k.to(dtype))


@pytest.mark.parametrize("local", [0, 2])
def test_the_portable_choice_is_the_reference_choice(local):
    rows, num_pages = ragged_rows()
    index_k = poisoned_pages(rows, num_pages, torch.bfloat16).index_k_PBD
    num_tokens = sum(COUNTS) + 2  # two rows belong to no sequence
    index_q = torch.randint(-1, 2, (num_tokens, GROUPS, DIM), device=DEVICE).to(torch.bfloat16)
    actual = choose_blocks_prefill(index_q, index_k, rows, CHOSEN, local)
    expected = reference.choose_blocks(index_q, index_k, rows, CHOSEN, local)
    assert torch.equal(actual, expected)


def test_the_choice_does_not_depend_on_the_span_of_pages(monkeypatch):
    rows, num_pages = ragged_rows((200,), (5,))
    index_k = poisoned_pages(rows, num_pages, torch.float16).index_k_PBD
    index_k[rows.page_table_SJ[0, 3].item(), 5, 2] = torch.nan
    index_q = torch.randint(-1, 2, (5, GROUPS, DIM), device=DEVICE).to(torch.float16)
    expected = reference.choose_blocks(index_q, index_k, rows, CHOSEN, 1)
    for span in (4, 8):
        monkeypatch.setattr(with_triton, "SPAN_PAGES", span)
        actual = choose_blocks_prefill(index_q, index_k, rows, CHOSEN, 1)
        assert torch.equal(actual, expected), span


@pytest.mark.parametrize("tile_rows", [1, 8])
def test_the_portable_attention_is_the_reference_attention(tile_rows):
    rows, num_pages = ragged_rows()
    pages = poisoned_pages(rows, num_pages, torch.bfloat16)
    num_tokens = sum(COUNTS) + 2
    own_T = reference.row_positions(rows, num_tokens, torch.device(DEVICE)) // BLOCK
    blocks = torch.stack([torch.randperm(6)[:CHOSEN] for _ in range(num_tokens * GROUPS)])
    blocks = blocks.view(GROUPS, num_tokens, CHOSEN).to(torch.int32).to(DEVICE)
    seen = blocks.masked_fill(blocks > own_T[None, :, None], NO_BLOCK)
    q = torch.randn(num_tokens, HEADS, DIM, device=DEVICE).to(torch.bfloat16)
    # blocks after the row stay in the list: they must count for nothing
    actual = block_attention_prefill(q, pages, blocks, rows, 0.25, tile_rows=tile_rows)
    expected = reference.block_attention(q.float(), pages, seen, rows, 0.25)
    error = (actual.float() - expected).norm() / expected.norm()
    # one rounding of the result to bf16; the interpreter cuts where a GPU rounds
    assert error < 2.0**-7
    assert bool((actual[(seen < 0).all(-1).all(0)] == 0).all())


def test_no_rows_are_served():
    rows, num_pages = ragged_rows()
    pages = poisoned_pages(rows, num_pages, torch.float16)
    none = torch.zeros(0, GROUPS, DIM, device=DEVICE, dtype=torch.float16)
    assert choose_blocks_prefill(none, pages.index_k_PBD, rows, CHOSEN, 1).shape == (2, 0, CHOSEN)
    q = torch.zeros(0, HEADS, DIM, device=DEVICE, dtype=torch.float16)
    blocks = torch.zeros(GROUPS, 0, CHOSEN, dtype=torch.int32, device=DEVICE)
    assert block_attention_prefill(q, pages, blocks, rows, 1.0).shape == q.shape


def test_sizes_that_are_no_power_of_two_are_named():
    rows, _ = ragged_rows()
    pages = torch.zeros(1, 1, 24, 16, device=DEVICE)
    blocks = torch.zeros(1, 1, CHOSEN, dtype=torch.int32, device=DEVICE)
    q = torch.zeros(1, 2, 16, device=DEVICE)
    with pytest.raises(ValueError, match="page size must be a power of two of at least 16, not 24"):
        block_attention_prefill(q, LayerPages(pages, pages, None), blocks, rows, 1.0)
    good = torch.zeros(1, 1, 16, 16, device=DEVICE)
    with pytest.raises(ValueError, match="tiles of 1, 2, 4 or 8 rows, not 3"):
        block_attention_prefill(q, LayerPages(good, good, None), blocks, rows, 1.0, tile_rows=3)


def cpu_rows(lengths, counts) -> PagedRows:
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    table = torch.zeros(len(lengths), 1, dtype=torch.int32)
    return PagedRows(starts, torch.tensor(lengths).int(), table, max(counts), max(lengths))


def test_tiles_never_cross_sequences_and_cover_every_row_with_keys():
    rows = cpu_rows(LENGTHS, COUNTS)
    tiles = cut_rows(rows, 8)
    starts = rows.query_start_S1.tolist()
    covered = [tile.first_row + i for tile in tiles for i in range(tile.num_rows)]
    with_keys = [row for row in range(starts[-1]) if not starts[3] <= row < starts[4]]
    assert covered == with_keys
    for tile in tiles:
        assert starts[tile.sequence] <= tile.first_row
        assert tile.first_row + tile.num_rows <= starts[tile.sequence + 1]
    on_device = cut_tiles(rows, starts[-1], 8, 1)
    used = [tuple(row) for row in on_device.tolist() if row[1] > 0]
    assert used == [(t.first_row, t.num_rows, t.position, t.sequence) for t in tiles]


def test_a_union_names_every_chooser_of_every_block_once():
    rows = cpu_rows((40, 9), (7, 2))
    blocks_TK = torch.tensor([[1, 3, -1], [0, 3, -1], [3, -1, -1], [2, 1, 0]] * 2 + [[0, -1, -1]])
    first, *_ = cut_rows(rows, 4)
    union = tile_union(blocks_TK, first)
    assert union.blocks == (0, 1, 2, 3)
    assert union.members == (0b1010, 0b1001, 0b1000, 0b0111)


@pytest.mark.parametrize(("new_blocks", "of_four", "of_eight"), [(0, 1, 1), (2, 1.375, 1.875)])
def test_rolling_selections_agree_as_much_as_they_say(new_blocks, of_four, of_eight):
    rows = cpu_rows((128 * 300 + 64,), (64,))
    blocks_GTK = rolling_selection(rows, 64, 2, new_blocks, seed=3)
    assert load_factor(blocks_GTK, rows, 4) == of_four
    assert load_factor(blocks_GTK, rows, 8) == of_eight
    own = torch.full((64,), 300)
    for group, row in itertools.product(range(2), range(64)):
        chosen = blocks_GTK[group, row].tolist()
        assert chosen == sorted(set(chosen))
        assert chosen[-1] == own[row]


def test_an_inversion_holds_every_edge_once_in_row_order():
    rows = cpu_rows((900, 0, 700), (30, 2, 25))
    generator = torch.Generator().manual_seed(5)
    blocks_GTK = torch.randint(-1, 6, (3, 57, 5), generator=generator)
    blocks_GTK[:, 30:32] = -1
    inversion = invert_blocks(blocks_GTK, rows, 8)
    starts = inversion.starts_N1.tolist()
    found = {}
    for bucket, (start, end) in enumerate(itertools.pairwise(starts)):
        edges = inversion.edges_E[start:end].tolist()
        assert edges == sorted(edges)
        group, sequence, block = bucket // 24, bucket // 8 % 3, bucket % 8
        for edge in edges:
            assert rows.query_start_S1[sequence] <= edge // 5 < rows.query_start_S1[sequence + 1]
            found[group, edge // 5, edge % 5] = block
    expected = {
        (group, row, slot): int(blocks_GTK[group, row, slot])
        for group, row, slot in itertools.product(range(3), range(57), range(5))
        if blocks_GTK[group, row, slot] >= 0
    }
    assert found == expected


def reader_steps(needed: list[bool], lookahead: int) -> list[tuple[str, str, int]]:
    """What one warpgroup of the union kernel waits for and releases, in its order."""
    steps: list[tuple[str, str, int]] = []
    at = {"keys": 0, "values": 0}

    def wait(ring: str, index: int) -> None:
        while at[ring] < index:
            steps.append(("wait", ring, at[ring]))
            release(ring)
        steps.append(("wait", ring, index))

    def release(ring: str) -> None:
        steps.append(("release", ring, at[ring]))
        at[ring] += 1

    def skip_to(index: int) -> None:
        while at["keys"] < index:
            for ring in ("keys", "values"):
                wait(ring, at[ring])
                release(ring)

    def begin(index: int) -> None:
        skip_to(index)
        wait("keys", index)
        release("keys")

    def finish(index: int) -> None:
        wait("values", index)
        release("values")

    own = [index for index, need in enumerate(needed) if need]
    if own:
        begin(own[0])
    for current, after in itertools.pairwise(own):
        if after - current <= lookahead:
            wait("keys", after)
            wait("values", current)
            release("keys")
            release("values")
        else:
            finish(current)
            begin(after)
    if own:
        finish(own[-1])
    skip_to(len(needed))
    return steps


def finishes(readers: list[list[tuple[str, str, int]]], stages: int) -> bool:
    """Whether all readers reach their end; a stage is refilled once all have released it."""
    done = [0] * len(readers)
    released = {"keys": [0] * len(readers), "values": [0] * len(readers)}
    moved = True
    while moved:
        moved = False
        for reader, steps in enumerate(readers):
            while done[reader] < len(steps):
                action, ring, index = steps[done[reader]]
                if action == "wait" and index >= stages + min(released[ring]):
                    break
                if action == "release":
                    released[ring][reader] += 1
                done[reader] += 1
                moved = True
    return all(count == len(steps) for count, steps in zip(done, readers, strict=True))


def test_two_warpgroups_never_wait_for_each_other():
    stages, draw = 3, random.Random(7)
    patterns = [list(choice) for choice in itertools.product((1, 2, 3), repeat=9)]
    for _ in range(300):
        share = draw.choice([0.05, 0.3, 0.7])
        size = draw.randint(20, 70)
        patterns.append([draw.choice([1, 2]) if draw.random() > share else 3 for _ in range(size)])
    for pattern in patterns[:: 1 if len(patterns) < 5000 else 4]:
        masks = [[bool(bits & side) for bits in pattern] for side in (1, 2)]
        assert finishes([reader_steps(mask, stages) for mask in masks], stages), pattern
    # one more block of lookahead and they do: the model can tell
    stuck = [1, 2, 2, 2, 3, 2, 2, 2, 1]
    masks = [[bool(bits & side) for bits in stuck] for side in (1, 2)]
    assert not finishes([reader_steps(mask, stages + 1) for mask in masks], stages)


COMPILED = """
import re, subprocess, triton
from pathlib import Path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from m3stack.kernels.msa.prefill import with_triton
B, I, L, F = "*bf16", "i32", "*i64", "*fp32"
kernels = {
    "score_span": (dict(index_q=B, index_k=B, tiles=L, page_table="*i32", scores=F, first_page=I,
        num_groups=I, table_pitch=I, page_pitch=I, key_pitch=I),
        dict(ROWS=128, BLOCK=128, DIM=128, SPAN=1024, PAGES=32, WIDE=False), 8),
    "attend_unions": (dict(q=B, k_pages=B, v_pages=B, out=B, tiles=L, lengths="*i32",
        unions="*i32", sizes="*i32", scale_log2="fp32", num_heads=I, per_group=I, q_pitch=I,
        k_page_pitch=I, k_group_pitch=I, k_pitch=I, v_page_pitch=I, v_group_pitch=I, v_pitch=I),
        dict(ROWS=4, HEADS=16, SLOTS=16, BLOCK=128, DIM=128, WIDE=False), 4),
}
signature, constants, warps = kernels["attend_unions"]
kernels["attend_unions:e4m3"] = (
    {**signature, "k_pages": "*fp8e4nv", "v_pages": "*fp8e4nv"}, constants, warps)
tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
for name, (signature, constants, warps) in kernels.items():
    function = getattr(with_triton, name.partition(":")[0])
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values())
               if kind.startswith("*") or list(signature)[i].endswith("pitch")}
    source = ASTSource(function, {**signature, **dict.fromkeys(constants, "constexpr")},
        constants, aligned)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32),
        options=dict(num_warps=warps, num_stages=2))
    Path(f"{name}.cubin").write_bytes(built.asm["cubin"])
    code = subprocess.run([tool, "-sass", f"{name}.cubin"], capture_output=True, text=True).stdout
    count = lambda word: len(re.findall(rf"\\b{word}\\b", code))
    print(name, "HGMMA", len(re.findall("HGMMA", code)), "spills", count("LDL") + count("STL"))
"""


def test_the_portable_kernels_compile_to_warpgroup_products(tmp_path):
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
    assert done.returncode == 0, done.stderr[-2000:]
    report = {line.split()[0]: line.split() for line in done.stdout.splitlines()}
    assert int(report["score_span"][2]) > 0, report
    assert int(report["attend_unions"][2]) > 0, report
    assert int(report["attend_unions:e4m3"][2]) > 0, report
    assert int(report["score_span"][4]) == 0, report


class FullGroups(CudaPrefill):
    """The reference in the place of the kernels, which serve whole groups of heads only."""

    def __init__(self) -> None:
        pass

    def block_attention(self, q_THD, pages, blocks_GTK, rows, scale):
        if q_THD.shape[1] != blocks_GTK.shape[0] * HEADS_PER_GROUP:
            return super().block_attention(q_THD, pages, blocks_GTK, rows, scale)
        return reference.block_attention(q_THD, pages, blocks_GTK, rows, scale)


@pytest.mark.parametrize("heads", [1, 8, 16])
def test_groups_of_fewer_heads_are_filled_up_and_emptied_again(heads):
    shape = BatchShape(seq_lens=(300, 0, 70), num_rows=(5, 1, 3), groups=2, heads_per_group=heads)
    batch = make_batch(shape, device=DEVICE, seed=5, dtype=torch.float32)
    blocks_GTK = rolling_selection(batch.rows, 9, 2, 1, seed=6)
    inputs = (batch.pages, blocks_GTK, batch.rows, 128**-0.5)
    actual = FullGroups().block_attention(batch.q_THD, *inputs)
    expected = reference.block_attention(batch.q_THD, *inputs)
    # fp32 on both sides; more heads are summed in another order
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=1e-5)
