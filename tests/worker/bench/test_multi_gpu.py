"""The bench of divided models runs, compares what it times, and says what it did not run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from m3stack.bench.multi_gpu import report
from m3stack.bench.multi_gpu.__main__ import are_equal, main
from m3stack.bench.multi_gpu.arms import Arm, arms_of
from m3stack.bench.multi_gpu.engine_steps import JSON_NAME, write_truncated
from m3stack.bench.multi_gpu.floors import (
    attention_decode_bytes,
    cache_bytes_per_token,
    layer_weights,
)
from m3stack.bench.multi_gpu.steps import step
from m3stack.memory_plan import released_model_config
from m3stack.models.minimax_m3.config import M3Config

CONFIG = released_model_config()


def rows_of(folder: Path) -> list[dict]:
    return json.loads((folder / report.JSON_NAME).read_text())["rows"]


def test_one_rank_of_more_runs_with_its_shapes(tmp_path: Path) -> None:
    arms = ["--arms", "tp1", "tp4 parts"]
    assert main(["--small", "--world", "1", "--out", str(tmp_path), *arms]) == 0
    rows = rows_of(tmp_path)
    timed = {(row["arm"], row["kind"]) for row in rows if row["kind"] in ("decode", "prefill")}
    assert timed == {(a, k) for a in ("tp1", "tp4 parts") for k in ("decode", "prefill")}
    assert {row["is_real"] for row in rows if row["arm"] == "tp4 parts" and "rows" in row} == {
        False
    }
    memory = [row for row in rows if row["kind"] == "memory" and " parts" not in row["arm"]]
    assert all(row["bytes_per_token"] == row["formula_bytes_per_token"] for row in memory)
    picture = (tmp_path / report.PICTURE_NAME).read_text()
    assert picture.count("<text") > len(timed)


def test_what_the_deadline_leaves_out_is_named(tmp_path: Path) -> None:
    flags = ["--small", "--world", "1", "--deadline", "0.000001", "--out", str(tmp_path)]
    assert main(flags) == 0
    left_out = {row["arm"] for row in rows_of(tmp_path) if row["kind"] == "not run"}
    assert left_out == {arm.name for arm in arms_of(1)}


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_every_way_to_divide_gives_the_same_tokens(tmp_path: Path) -> None:
    assert main(["--small", "--world", "2", "--out", str(tmp_path)]) == 0
    equal = [row for row in rows_of(tmp_path) if row["kind"] == "equality"]
    divided = ["tp2", "tp2 parts", "tp2 ep2", "tp2 ep2 parts"]
    assert [row["arm"] for row in equal] == ["tp1", *divided]
    assert all(row["equal_tokens"] == row["tokens"] for row in equal)


@pytest.mark.timeout(120)
def test_whole_engines_of_two_ranks_are_timed_step_by_step(tmp_path: Path) -> None:
    flags = ["--small", "--engine", "--modes", "queued ahead", "--out", str(tmp_path)]
    assert main(flags) == 0
    rows = json.loads((tmp_path / JSON_NAME).read_text())["rows"]
    timed = [row for row in rows if row["kind"] == "engine"]
    assert [row["rows"] for row in timed] == [1, 3]
    assert {row["mode"] for row in timed} == {"queued ahead"}
    assert all(row["timed_steps"] > 10 and row["step_ms"] > 0 for row in timed)
    assert main(["--small", "--engine", "--modes", "recorded", "--out", str(tmp_path)]) == 2


def test_the_truncated_model_has_the_released_widths(tmp_path: Path) -> None:
    write_truncated(tmp_path, 5)
    config = M3Config.from_dir(tmp_path)
    assert config.num_layers == 5
    assert config.sparse_layers == config.moe_layers == (True,) * 5
    assert (config.hidden_size, config.num_experts) == (CONFIG.hidden_size, CONFIG.num_experts)
    assert config.quantization is None


@pytest.mark.parametrize(("num_seqs", "width"), [(8, 128), (64, 16), (5, 300), (3, 1024), (1, 1)])
def test_sequences_share_no_page_that_the_pool_has_room_for(num_seqs: int, width: int) -> None:
    batch = step(
        num_rows=1, ends=[width * 128] * num_seqs, num_pages=1024, page_tokens=128, vocab_size=9,
        device=torch.device("cpu"),
    )  # fmt: skip
    table = batch.rows.page_table_SJ
    assert table.shape == (num_seqs, width)
    assert table.unique().numel() == min(1024, num_seqs * width)


def test_divided_models_are_held_to_the_undivided_one() -> None:
    whole = {"kind": "equality", "relative_error": 0.01, "equal_tokens": 7, "tokens": 8}
    assert are_equal([])
    assert are_equal([whole, whole | {"relative_error": 0.02, "equal_tokens": 5}])
    assert not are_equal([whole, whole | {"relative_error": 0.021}])
    assert not are_equal([whole, whole | {"relative_error": float("nan")}])
    replayed = {"kind": "replayed", "relative_error": 0.02, "replays": 3}
    assert are_equal([whole, replayed])
    assert not are_equal([whole, replayed | {"replays": 0}])
    assert not are_equal([whole, replayed | {"relative_error": 0.021}])
    exact = {"kind": "equality", "relative_error": 1e-7, "equal_tokens": 8, "tokens": 8}
    assert are_equal([exact, exact | {"relative_error": 9e-6}])
    assert not are_equal([exact, exact | {"equal_tokens": 7}])


def test_floors_are_those_of_the_published_arithmetic() -> None:
    # 45.3 KB a token and rank at four ranks, of which 14,592 are index keys
    assert cache_bytes_per_token(CONFIG, Arm(4).place(0)) == 30_720 + 14_592
    assert cache_bytes_per_token(CONFIG, Arm(8).place(0)) == 30_720 + 14_592
    assert cache_bytes_per_token(CONFIG, Arm(4, index_in_parts=True).place(0)) == 30_720 + 3_648
    # an MSA layer reads 256 bytes of index key a token on every rank, a quarter of it in parts
    whole = attention_decode_bytes(CONFIG, Arm(4).place(0), 1, 524_288)
    parts = attention_decode_bytes(CONFIG, Arm(4, index_in_parts=True).place(0), 1, 524_288)
    assert whole - parts == 524_288 * 256 * 3 / 4
    # experts dealt out are as many values as experts cut up
    for arm in (Arm(4), Arm(4, expert_parallel=2), Arm(4, expert_parallel=4)):
        place = arm.place(0)
        _, one = layer_weights(CONFIG, place)
        assert one / place.ep_size == 3 * 3072 * 6144 / 4
