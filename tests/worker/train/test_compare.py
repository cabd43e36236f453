"""The comparison at toy scale: every run leaves its finding, and the maps are drawn."""

from __future__ import annotations

import json
from pathlib import Path

from m3stack.models.minimax_m3 import tiny
from m3stack.train.compare import HEAT_CELLS, main
from m3stack.train.plot import HeatMap, heat_maps


def test_every_run_leaves_its_finding(tmp_path: Path) -> None:
    tiny.write_tiny_checkpoint(tmp_path)
    out = tmp_path / "compare.jsonl"
    command = [str(tmp_path), str(out), "--batch-tokens", "1024", "--longest", "1"]
    command += ["--seconds", "0.01", "--arm-seconds", "0.01", "--device", "cpu"]
    command += ["--runs", "own,shared,step_0,text_first"]
    assert main(command) == 0
    findings = {
        finding["run"]: finding
        for finding in map(json.loads, out.read_text().splitlines())
        if "run" in finding
    }
    assert list(findings) == ["shipped", "own", "shared", "step_0", "text_first"]
    # runs that stand beside one another have equally many steps
    assert findings["shared"]["steps"] == findings["own"]["steps"] > 0
    assert findings["text_first"]["steps"] == findings["step_0"]["steps"] > 0
    for name in ("shipped", "own", "shared"):
        for rows in ("recall", "telling"):
            own = findings[name][f"{rows}_own"]
            assert [len(groups) for groups in own] == [4] * 4
            assert all(0 < share <= 1.001 for groups in own for share in groups)
    for name in ("step_0", "text_first"):
        heat = findings[name]["heat"]
        assert len(heat) == len(heat[0]) == len(findings[name]["heat_media"]) == HEAT_CELLS
        assert sum(findings[name]["heat_media"]) > 0
        assert findings[name]["text"]
        assert len(findings[name]["vision_mass"]) == 4
    drawn = out.with_suffix(".svg").read_text()
    assert "step_0" in drawn
    assert "text_first" in drawn


def test_a_map_is_darker_for_more_and_marks_pictures() -> None:
    drawn = heat_maps({"one": HeatMap([[1.0, 0.0], [0.1, 0.9]], [0.0, 1.0])})
    assert drawn.count('opacity="1.00"') == 1
    assert drawn.count('opacity="0.67"') == 1
    # what stands behind a token, and what nothing attends to, is left white
    assert drawn.count("opacity") == 3
    assert drawn.count("#cf222e") == 1
