"""Questions have one true answer, their files show what they say, and scores are what they seem."""

from __future__ import annotations

import io
import random
import subprocess

import numpy as np
import pytest
from PIL import Image

from m3stack.cli import eval as command
from m3stack.eval.media_files import mp4, png
from m3stack.eval.questions import SKILLS, Question, Skill, one_frame, shuffled
from m3stack.eval.scores import Row, picture, table
from m3stack.train import pictures


def test_a_png_holds_the_pixels() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (28, 56, 3)).astype(np.uint8)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png(pixels)))), pixels)


def test_an_mp4_holds_every_frame_in_order() -> None:
    clip = pictures.draw_motion("left", "circle", "red", random.Random(1)).frames
    command_line = ["ffmpeg", "-v", "error", "-i", "pipe:0", "-f", "rawvideo"]
    command_line += ["-pix_fmt", "rgb24", "pipe:1"]
    raw = subprocess.run(command_line, input=mp4(clip), capture_output=True, check=True).stdout
    decoded = np.frombuffer(raw, np.uint8).reshape(clip.shape)
    gaps = np.abs(decoded.astype(int) - clip).mean(axis=(1, 2, 3))
    others = np.abs(decoded[1:].astype(int) - clip[:-1]).mean(axis=(1, 2, 3))
    assert gaps.max() < others.min() / 2


def test_controls_keep_the_frames_but_not_their_order() -> None:
    rng = random.Random(2)
    clip = pictures.draw_colours(["red", "blue", "green"], rng)
    mixed = shuffled(clip, rng)
    assert sorted(f.tobytes() for f in mixed.frames) == sorted(f.tobytes() for f in clip.frames)
    assert not np.array_equal(mixed.frames, clip.frames)
    assert len({frame.tobytes() for frame in one_frame(clip, rng).frames}) == 1


def test_types_of_a_calls_arguments_count() -> None:
    question = Question("tool_call", (), call=("f", {"n": 3, "on": True}))

    def message(arguments: str) -> dict[str, object]:
        return {"tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}

    assert question.is_answered_by(message('{"on": true, "n": 3}'))
    assert not question.is_answered_by(message('{"on": true, "n": "3"}'))
    assert not question.is_answered_by(message('{"on": 1, "n": 3}'))
    assert not question.is_answered_by(message('{"on": tr'))
    assert not question.is_answered_by({"content": "f"})


@pytest.mark.parametrize("skill", SKILLS, ids=lambda skill: f"{skill.name}, {skill.control}")
def test_questions_are_the_same_every_time(skill: Skill) -> None:
    if skill.name == "needle_64k":
        pytest.skip("like needle_4k, sixteen times as long")
    first = list(skill.make(random.Random(3), 2))
    assert first == list(skill.make(random.Random(3), 2))
    assert len(first) == 2


def test_rows_below_their_bar_are_marked() -> None:
    rows = [
        Row("clip_order", 0.97, 100, "frames shuffled", 0.2, 0.17, 0.9),
        Row("needle_4k", 0.5, 20, "none", None, 0.01, 0.95),
    ]
    lines = table(rows).splitlines()
    assert "(below)" not in lines[2]
    assert "(below)" in lines[3]
    assert "not asked" in lines[3]
    assert picture(rows).count("<rect") == 4


def test_an_unknown_skill_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--skills", "singing"]) == 2
    assert "'singing'" in capsys.readouterr().err
