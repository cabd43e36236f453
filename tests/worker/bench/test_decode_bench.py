"""What the decode bench reads is not what it has just read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

from m3stack.bench.kernels import report
from m3stack.bench.kernels.decode import GROUPS, LAYERS, NUM_CHOSEN, DecodeShape
from m3stack.bench.kernels.harness import Ceilings, Row


@pytest.mark.parametrize("shape", [DecodeShape(3, 1 << 13), DecodeShape(2, 1 << 15, num_rows=4)])
def test_turns_of_attention_share_no_block_while_there_are_others(shape: DecodeShape) -> None:
    num_blocks = shape.seq_len // 128
    turns = num_blocks // (NUM_CHOSEN * shape.num_rows)
    seen: set[tuple[int, int, int]] = set()
    for turn in range(turns):
        blocks_GTK = shape.fresh_blocks(turn)
        assert blocks_GTK.shape == (GROUPS, shape.batch * shape.num_rows, NUM_CHOSEN)
        assert (blocks_GTK.diff(dim=-1) > 0).all()
        for group in range(GROUPS):
            for row, blocks in enumerate(blocks_GTK[group].tolist()):
                seen |= {(group, row // shape.num_rows, block) for block in blocks}
    assert len(seen) == GROUPS * shape.batch * turns * shape.num_rows * NUM_CHOSEN
    assert max(block for *_, block in seen) < num_blocks


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_a_row_has_fresh_blocks_for_turns_of_three_times_the_l2(name: str) -> None:
    shape = LAYERS[name]
    l2_bytes = 60 << 20
    turns = 1 + 3 * l2_bytes / shape.attend_bytes()
    sets = max(2, 1 + 3 * l2_bytes / shape.index_bytes())
    assert turns / sets * shape.num_rows * NUM_CHOSEN <= shape.seq_len // 128


def test_rows_of_other_selections_take_the_dense_time_of_their_run(tmp_path: Path) -> None:
    def row(name: str, dense_us: float | None = None) -> Row:
        return Row(name, "", 10.0, 9.0, 11.0, 8.0, dense_us)

    ceilings = Ceilings(4.3e12, 766e12, "a GPU", "torch")
    path = tmp_path / "rows.json"
    report.write_json(path, [row("a", 60.0), row("a_disjoint"), row("b_identical")], ceilings, "c")
    report.write_json(path, [row("a_identical")], ceilings, "another run")
    rows = json.loads(path.read_text())
    assert all(set(report.COMMON) <= set(one) for one in rows)
    found = {one["name"]: one["dense_us"] for one in rows}
    assert found == {"a": 60.0, "a_disjoint": 60.0, "b_identical": None, "a_identical": None}
