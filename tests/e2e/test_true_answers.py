"""The built-in model answers truly, asked over REST: what a broken part anywhere would spoil.

A sample of `m3stack eval`; the thresholds leave room for the sample's size, not for a fault.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from m3stack.checkpoints import builtin_checkpoint
from m3stack.eval import servers
from m3stack.eval.questions import SKILLS, Skill
from m3stack.eval.scores import Asker, source
from tests.e2e.conftest import Server

SAMPLES = 8
# right answers of eight, and the most that the control may get
THRESHOLDS = {
    "picture_colour": (8, 5),
    "picture_shape": (8, 5),
    "picture_count": (8, 5),
    "picture_position": (8, 5),
    "colour_of_many": (8, 5),
    "shape_of_many": (8, 5),
    "position_of_many": (8, 5),
    "picture_digit": (8, 5),
    "clip_motion": (8, 7),
    "clip_order": (8, 4),
    "clip_flashes": (8, 6),
    # a document of 4k tokens, of which the sparse layers see an eighth
    "needle_4k": (8, 8),
    "tool_call": (7, 8),
    "text_qa": (8, 4),
}
SKILL = {skill.name: skill for skill in reversed(SKILLS)}


@pytest.mark.parametrize("name", THRESHOLDS)
def test_a_sample_of_questions_is_answered_truly(gateway: Server, name: str) -> None:
    skill: Skill = SKILL[name]
    least, most = THRESHOLDS[name]
    with Asker(gateway.url) as asker:
        # a long document is read once, if it is asked about one question after the other
        at_once = 1 if name.startswith("needle") else None
        right = asker.share_right(skill.make(source(skill), SAMPLES), at_once=at_once) * SAMPLES
        assert right >= least
        if not name.startswith(("clip_motion", "clip_flashes", "needle", "tool")):
            assert skill.control_make is not None
            blank = skill.control_make(source(skill), SAMPLES)
            assert asker.share_right(blank) * SAMPLES <= most


def test_passwords_are_not_found_in_blocks_chosen_at_random(tmp_path: Path) -> None:
    skill = SKILL["needle_4k"]
    servers.without_index(builtin_checkpoint("tiny"), tmp_path)
    with servers.served(tmp_path) as url, Asker(url) as asker:
        # `m3stack eval` asks a hundred; the bar there is a tenth
        right = asker.share_right(skill.make(source(skill), SAMPLES), at_once=1) * SAMPLES
    assert right <= 2
