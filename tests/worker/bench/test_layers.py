"""The layer bench: parts that add up to the layer, floors by hand, a report of them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from m3stack.bench import layers, layers_report
from m3stack.bench.kernels.harness import Ceilings
from m3stack.bench.layers_floors import decode_work, prefill_work, touched_experts
from m3stack.checkpoints import builtin_checkpoint
from m3stack.memory_plan import released_model_config
from m3stack.models.minimax_m3.config import M3Config

CEILINGS = Ceilings(4.3e12, 766e12, "a GPU", "torch")


def test_floors_are_those_of_the_released_widths() -> None:
    config = released_model_config()
    work = decode_work(config, "bf16", 1, 131072)
    # index keys of 256 B a token, 2,048 tokens of 4 heads twice, in bf16
    assert work["attention"].num_bytes == 131072 * 256 + 2048 * 2 * 4 * 128 * 2
    # four routed experts and the shared one of 113 MB, and the router
    assert work["moe"].num_bytes == pytest.approx(5 * 3 * 6144 * 3072 * 2 + 3.15e6, rel=1e-3)
    assert work["projections"].num_bytes == pytest.approx((9856 + 8192) * 6144 * 2, rel=1e-3)
    assert touched_experts(config, 64) == pytest.approx(111, abs=1)
    whole = prefill_work(config, "mxfp8", 8192, 8192)
    # a causal half for the index; dense up to 2,048 tokens each
    assert whole["attention"].flops == pytest.approx(
        4 * 256 * 8192 * 8193 / 2 + 4 * 8192 * (8192 * 2048 - 2048 * 2047 / 2)
    )
    plain = prefill_work(config, "bf16", 8192, 8192)
    assert 0.51 < whole["moe"].num_bytes / plain["moe"].num_bytes < 0.53


@pytest.mark.parametrize("form", layers.FORMS)
def test_a_truncated_model_is_timed_part_by_part(form: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    config = layers.truncated(M3Config.from_dir(builtin_checkpoint("tiny")), 2)
    bench = layers.LayerBench(
        config, form, torch.device("cpu"), pool_tokens=64 * config.block_tokens, kernels="auto"
    )
    rows = []
    for phase, tokens, context in (("decode", 1, 700), ("prefill", 40, 300)):
        floors = {"attention": 1.0, "moe": 2.0, "projections": 3.0}
        row = bench.row(phase, batch=2, context=context, tokens=tokens, floors=floors)
        parts = row.attention_us + row.moe_us + row.projections_us + row.rest_us
        assert parts == pytest.approx(row.layer_us)
        assert row.moe_us > 0 < row.dense_attention_us
        rows.append(row)
    layers._keep(rows, CEILINGS, tmp_path)
    document = json.loads((tmp_path / "layer-h200.json").read_text())
    assert document["rows"] == [asdict(row) for row in rows]
    assert "m3stack bench layers" in (tmp_path / "layer-h200.md").read_text()
    assert (tmp_path / "layer-h200.svg").read_text().startswith("<svg")


def test_ratios_are_those_of_the_times() -> None:
    row = {"layer_us": 100.0, "attention_us": 20.0, "dense_attention_us": 200.0}
    value = layers_report.ratios(row)
    assert value["attention_layer"] == pytest.approx(10)
    assert value["attention_model"] == pytest.approx(60 * 200 / (57 * 20 + 3 * 200))
    assert value["whole_layer"] == pytest.approx(2.8)
    assert value["whole_model"] == pytest.approx(60 * 280 / (57 * 100 + 3 * 280))
    step = row | {
        "phase": "decode", "batch": 1, "tokens": 1, "moe_us": 40.0, "projections_us": 32.0,
        "rest_us": 8.0, "dense_layer_us": 240.0, "ends_us": 80.0,
    }  # fmt: skip
    step["context"] = 131072
    # index keys of 256 B a token whole, 4 MiB of chosen keys and values to a quarter
    index, keys = 131072 * 256, 2048 * 2048
    share = (index + keys / 4) / (index + keys)
    assert layers_report.attention_share(step) == pytest.approx(share)
    expected = 57 * (72 / 8 + 8 + 20 * share + 24) + 3 * (40 / 8 + 50 + 24) + 10
    assert layers_report.whole_model_us(step) == pytest.approx(expected)
    chunk = {"phase": "prefill", "tokens": 8192, "context": 1048576}
    # nearly all of it is scores, of which a rank does a quarter
    assert 0.24 < layers_report.attention_share(chunk) < 0.25


def test_a_library_s_faster_dense_attention_stands_in_for_a_slower_one(tmp_path: Path) -> None:
    row = {"context": 131072, "dense_attention_us": 180.0, "dense_layer_us": 190.0}
    rows = [row | {"phase": "prefill"}, row | {"phase": "decode"}]
    report = tmp_path / "msa.json"
    assert layers_report.with_library_dense(rows, report) == rows
    for dense_us, expected in ((67.0, (67.0, 77.0)), (200.0, (180.0, 190.0))):
        report.write_text(json.dumps([{"name": "prefill_8k_after_128k", "dense_us": dense_us}]))
        prefill, decode = layers_report.with_library_dense(rows, report)
        assert (prefill["dense_attention_us"], prefill["dense_layer_us"]) == expected
        assert decode == rows[1]


def test_the_command_needs_a_gpu_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert layers.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
