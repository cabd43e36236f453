"""Under every fault each request ends once, says the truth, and leaves nothing behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# of faults; each comes at least once, however long that takes
SECONDS = 60
# the fleet needs hosts of its own
CAN_UNSHARE = (
    shutil.which("unshare") is not None
    and not subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True).returncode
)


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of one run."""
    folder = tmp_path_factory.mktemp("chaos")
    command = ["unshare", "--net", "--mount", sys.executable, "-m", "tests.chaos.run"]
    command += [
        "--seconds",
        str(SECONDS),
        "--calm-s",
        "20",
        "--report",
        str(folder / "report.json"),
    ]
    command += ["--folder", str(folder / "fleet")]
    subprocess.run(command, check=True, cwd=ROOT, timeout=1500)
    return json.loads((folder / "report.json").read_text())


pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1600),
    pytest.mark.skipif(not CAN_UNSHARE, reason="needs the right to make network namespaces"),
]


def test_every_request_ends_exactly_once(figures: dict[str, Any]) -> None:
    for row in figures["rows"]:
        assert row["requests"] > 0
        assert row["ended_once"] == row["requests"], row
        assert row["cut_silently"] == 0, row


def test_no_token_is_wrong_lost_or_given_twice(figures: dict[str, Any]) -> None:
    assert figures["all"]["wrong_text"] == 0


def test_nothing_is_held_when_nobody_asks(figures: dict[str, Any]) -> None:
    assert figures["held_when_quiet"] == {}


def test_what_lived_through_it_holds_no_more_descriptors(figures: dict[str, Any]) -> None:
    assert figures["descriptor_growth"].keys() == {"gateway0", "worker0"}
    # connections come and go; a leak would be one a request, and there are hundreds
    assert all(more < 32 for more in figures["descriptor_growth"].values())
