"""The media benchmark compares before it times, and reports every arm of every row."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from m3stack.bench import media, media_arms


def test_patch_rows_follow_merge_blocks() -> None:
    noise = np.random.default_rng(0)
    frame = noise.integers(0, 256, (56, 84, 3), dtype=np.uint8)
    rows = media_arms.patch_rows(frame)
    assert rows.shape == (24, 3, 14, 14)
    # the second row is right of the first, the third below it, the fifth opens the next block
    for row, (y, x) in {0: (0, 0), 1: (0, 14), 2: (14, 0), 4: (0, 28), 12: (28, 0)}.items():
        np.testing.assert_array_equal(rows[row], frame[y : y + 14, x : x + 14].transpose(2, 0, 1))


def test_the_report_holds_every_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(media, "PICTURES", (("small JPEG", 320, 200),))
    path = tmp_path / "media.json"
    assert media.main(["--only", "pictures", "--rounds", "1", "--json", str(path)]) == 0
    pictures, seen, sent, avif = json.loads(path.read_text())["rows"]
    for arm in ("ours", "bare_decode", "torch", "pillow", "transformers"):
        assert pictures[arm] >= pictures["best"][arm] >= 0
        assert pictures["wall"][arm] > 0
    assert {"ours", "ours_without_cache", "ours_without_picture"} < set(seen)
    assert avif["name"] == "small AVIF"
    assert {"ours", "torch", "pillow", "transformers"} < set(avif)
    assert sent["ours"] == 22 * 14 * 14 * 14 * 3
    assert "small JPEG" in capsys.readouterr().out


def test_a_byte_that_differs_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "PICTURES", (("small JPEG", 320, 200),))
    real = media_arms.patch_rows
    monkeypatch.setattr(media_arms, "patch_rows", lambda frame: real(frame) ^ 1)
    assert media.main(["--only", "pictures", "--rounds", "1"]) == 1
