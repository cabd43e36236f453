"""Patches reach a worker of the same host through memory, and nothing of it stays behind."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e import media
from tests.e2e.conftest import MODEL_NAME, Server, Stack, wait_for

OTHER_NUMBERS = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
PIECES = re.compile(r'm3stack_gateway_media_pieces_total\{way="(\w+)"\} (\d+)')


def pieces(gateway: Server) -> dict[str, int]:
    """How many pieces went which way so far."""
    page = httpx.get(f"{gateway.url}/metrics", timeout=20).text
    return {way: int(count) for way, count in PIECES.findall(page)}


def memory_files(server: Server) -> int:
    """Memory files of ours that a process holds open."""
    folder = Path(f"/proc/{server.process.pid}/fd")
    links = [os.readlink(link) for link in folder.iterdir() if link.is_symlink()]
    return sum(link.startswith("/memfd:m3stack-") for link in links)


def ask(gateway: Server, picture: bytes) -> httpx.Response:
    content = [media.image_part(picture), media.text_part("What is it?")]
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 3,
        "temperature": 0,
    }
    return httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=120)


def test_patches_are_shared_and_every_file_is_let_go(stack: Stack, tmp_path: Path) -> None:
    worker = stack.worker()
    gateway = stack.gateway(worker)
    wait_for(gateway, "/ready")
    sizes = [f"{480 + 28 * n}x{360 + 28 * n}" for n in range(4)]
    pictures = [media.picture(tmp_path, size=size, name=f"{size}.jpg") for size in sizes]

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda picture: ask(gateway, picture), pictures))

    assert [answer.status_code for answer in answers] == [200] * 4
    ways = pieces(gateway)
    assert ways["shared"] >= 4
    assert ways["sent"] == 0
    assert memory_files(gateway) == 1, "that by which it is known"
    assert memory_files(worker) == 0
    worker.kill()
    assert memory_files(gateway) == 1


def test_files_are_let_go_while_the_answer_still_comes(stack: Stack, tmp_path: Path) -> None:
    worker = stack.worker()
    gateway = stack.gateway(worker)
    wait_for(gateway, "/ready")
    picture = media.picture(tmp_path, size="592x444", name="card.jpg")
    content = [media.image_part(picture), media.text_part("Talk for ever.")]
    body = {
        "messages": [{"role": "user", "content": content}],
        "stream": True,
        "max_tokens": 20_000,
        "ignore_eos": True,
    }
    url = f"{gateway.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=120) as reply:
        texts = (line for line in reply.iter_lines() if '"choices":[{' in line)
        for _ in range(3):
            next(texts)
        # the worker has said that it took them, long before the end of the call
        assert pieces(gateway)["shared"] >= 1
        assert memory_files(gateway) == 1
        assert running(gateway) == 1, "the call goes on"


def running(gateway: Server) -> float:
    page = httpx.get(f"{gateway.url}/metrics", timeout=20).text
    found = re.search(r"^m3stack_gateway_running_requests (\S+)$", page, re.MULTILINE)
    assert found, page
    return float(found[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a process other numbers")
def test_a_worker_with_other_process_numbers_is_sent_the_same_patches(
    stack: Stack, tmp_path: Path
) -> None:
    near, far = stack.worker(), stack.worker(within=OTHER_NUMBERS)
    picture = media.picture(tmp_path, size="508x388", name="card.jpg")
    said = []
    for worker, way in ((near, "shared"), (far, "sent")):
        gateway = stack.gateway(worker)
        wait_for(gateway, "/ready")
        answer = ask(gateway, picture)
        assert answer.status_code == 200, answer.text
        said.append(answer.json()["choices"])
        ways = pieces(gateway)
        assert ways.pop(way) >= 1
        assert list(ways.values()) == [0]
    assert said[0] == said[1]
    # the program that gives it other numbers waits for it whatever SIGTERM says
    far.kill()
