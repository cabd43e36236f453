"""A link between hosts tells one that is busy from one that is lost."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from m3stack.host_link import Kind, Link, LinkLostError

SILENCE_S = 1.0
# far more than two sockets hold
LARGE = bytes(range(256)) * (1 << 17)
WAIT_S = 60


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    links = Link(near, silence_s=SILENCE_S), Link(far, silence_s=60.0)
    yield links
    for link in links:
        link.close()


def listen(link: Link) -> threading.Thread:
    """Somebody who hears what the other end says, until it is gone."""

    def run() -> None:
        with suppress(LinkLostError):
            while True:
                link.receive()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def bound(link: Link) -> None:
    """As after the exchange of keys."""
    link._bound(link._silence_s)


def test_an_end_that_reads_late_and_lives_gets_all_that_was_sent(ends: tuple[Link, Link]) -> None:
    near, far = ends
    bound(near)
    hearing = listen(near)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(near.send, Kind.COMMAND, LARGE)
        # several times the silence after which it would count as lost, of which it gives signs
        for _ in range(20):
            far.send(Kind.ALIVE)
            assert not sending.done()
            threading.Event().wait(SILENCE_S / 5)
        assert far.receive() == (Kind.COMMAND, LARGE)
        sending.result(WAIT_S)
        near.send(Kind.COMMAND, b"next")
        assert far.receive() == (Kind.COMMAND, b"next")
    near.close()
    hearing.join(WAIT_S)


def test_an_end_that_reads_nothing_and_says_nothing_is_lost(ends: tuple[Link, Link]) -> None:
    near, _ = ends
    bound(near)
    with pytest.raises(LinkLostError, match="takes nothing"):
        near.send(Kind.COMMAND, LARGE)


def test_an_end_that_lives_and_never_reads_is_given_up(ends: tuple[Link, Link]) -> None:
    near, far = ends
    near._busy_s = 2 * SILENCE_S
    bound(near)
    hearing = listen(near)
    done = threading.Event()

    def live() -> None:
        while not done.wait(SILENCE_S / 5):
            far.send(Kind.ALIVE)

    living = threading.Thread(target=live)
    living.start()
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(near.send, Kind.COMMAND, LARGE)
        assert far._sock.recv(1, socket.MSG_PEEK)  # it is under way
        # nor does the end of all wait behind what is not taken
        with pytest.raises(LinkLostError, match="has taken nothing for 1 s"):
            near.send(Kind.END)
        with pytest.raises(LinkLostError, match="takes nothing"):
            sending.result(WAIT_S)
    done.set()
    living.join(WAIT_S)
    near.close()
    hearing.join(WAIT_S)


def test_a_send_that_waits_ends_with_the_link(ends: tuple[Link, Link]) -> None:
    near, far = ends
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(near.send, Kind.COMMAND, LARGE)
        assert far._sock.recv(1)
        near.close()
        with pytest.raises(LinkLostError, match="is gone"):
            sending.result(WAIT_S)
