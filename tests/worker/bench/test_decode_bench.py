"""What the decode bench reads is not what it has just read."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from m3stack.bench.kernels.decode import GROUPS, LAYERS, NUM_CHOSEN, DecodeShape


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
