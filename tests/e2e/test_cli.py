"""The command line as a person meets it: help, answers, errors that say what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from m3stack.cli import COMMANDS
from m3stack.local_ports import free_port
from tests.e2e.conftest import Server
from tests.e2e.media import clip, picture


def m3stack(*arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "m3stack", *arguments],
        input=typed,
        capture_output=True,
        text=True,
        timeout=90,
    )


def test_help_names_every_command() -> None:
    done = m3stack("--help")
    assert done.returncode == 0
    assert all(f"\n  {name}" in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help_of_its_own(command: str) -> None:
    done = m3stack(command, "--help")
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()


def test_an_unknown_command_is_named() -> None:
    done = m3stack("serve-me")
    assert done.returncode == 2
    assert "serve-me" in done.stderr


def test_the_doctor_finds_this_machine_fit() -> None:
    done = m3stack("doctor")
    assert done.returncode == 0, done.stdout
    assert "can serve here" in done.stdout


def test_the_doctor_says_what_is_wrong_with_a_checkpoint(tmp_path: Path) -> None:
    done = m3stack("doctor", "--model", str(tmp_path))
    assert done.returncode == 1
    assert "checkpoint" in done.stdout


def test_the_doctor_plans_memory_before_anyone_buys_a_machine() -> None:
    fits = m3stack("doctor", "--plan", "8", "139", "mxfp8", "131072", "8")
    assert fits.returncode == 0
    assert "MiniMax-M3 on 8 GPUs" in fits.stdout
    wrong = m3stack("doctor", "--plan", "8", "139", "int3", "131072", "8")
    assert wrong.returncode == 1
    assert "int3" in wrong.stderr


def test_one_message_with_a_picture_and_a_clip_is_answered(gateway: Server, tmp_path: Path) -> None:
    picture(tmp_path, size="112x112", name="card.jpg")
    clip(tmp_path, size="112x112", seconds=2, name="card.mp4")
    done = m3stack(
        "chat", "--url", gateway.url, "What is this?", "--max-tokens", "8",
        "--image", str(tmp_path / "card.jpg"), "--video", str(tmp_path / "card.mp4"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "tokens" in done.stdout.splitlines()[-1]


def test_a_conversation_remembers_and_ends_at_the_end_of_input(gateway: Server) -> None:
    done = m3stack(
        "chat", "--url", gateway.url, "--max-tokens", "4", "--thinking", "disabled",
        typed="first\nsecond\n/image /nowhere.png\nthird\n",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = [int(line.split()[0]) for line in done.stdout.splitlines() if " tokens" in line]
    # each prompt holds the turns before it as well
    assert len(figures) == 3
    assert figures == sorted(set(figures))
    assert "cannot read /nowhere.png" in done.stdout


def test_chat_without_a_gateway_says_how_to_start_one() -> None:
    done = m3stack("chat", "--url", f"http://127.0.0.1:{free_port()}", "hello")
    assert done.returncode == 1
    assert "m3stack up" in done.stderr


def test_a_refusal_is_shown_as_the_gateway_words_it(gateway: Server) -> None:
    done = m3stack("chat", "--url", gateway.url, "hello", "--model", "gpt-9")
    assert done.returncode == 1
    assert "gpt-9" in done.stderr
    assert "404" in done.stderr


def test_a_worker_says_which_setting_is_wrong() -> None:
    done = m3stack("worker", "--max-sequences", "none")
    assert done.returncode == 2
    assert "max-sequences" in done.stderr
