"""Who is let in where hosts join a leader, and who cannot keep them out."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from m3stack import hosts
from m3stack.config import WorkerConfig
from m3stack.host_link import Kind, Link, LinkLostError
from m3stack.hosts import Hosts, greeting
from m3stack.local_ports import free_port
from tests.worker.test_several_hosts import END_S, START_S, spread


class Door:
    """A leader that waits for hosts, and what one that knocks is told."""

    def __init__(self, settings: WorkerConfig, address: str = "127.0.0.1") -> None:
        self.settings = settings
        self.address = address
        self.hosts = Hosts(settings, store_port=1)
        self.is_closed = False
        self.pool = ThreadPoolExecutor(1)
        self.waiting = self.pool.submit(self.hosts.await_joined, self.check)

    def check(self) -> None:
        if self.is_closed:
            raise InterruptedError

    def connect(self) -> socket.socket:
        port = int(self.settings.leader_address.rpartition(":")[2])
        deadline = time.monotonic() + START_S
        while True:
            try:
                return socket.create_connection((self.address, port), timeout=10)
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                # not listening yet, and nothing tells when it does
                time.sleep(0.02)

    def knock(self, said: bytes, key: bytes = b"m3stack") -> tuple[Kind, bytes]:
        sock = self.connect()
        sock.settimeout(None)
        link = Link(sock, silence_s=10)
        try:
            link.authenticate(key, is_leader=False)
            link.send(Kind.HELLO, said)
            return link.receive()
        finally:
            link.close()

    def close(self) -> None:
        self.is_closed = True
        # it has let all hosts in, lost one again, or is told to stop
        self.waiting.exception(END_S)
        self.pool.shutdown()
        self.hosts.stop("")


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    secret = tmp_path / "secret"
    secret.write_bytes(b"of three hosts")
    door = Door(spread(3, 3, host_key_file=str(secret)))
    yield door
    door.close()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"host_index": 0}, "host_index is 0, expected 1 to 2"),
        ({"host_index": 7}, "host_index is 7, expected 1 to 2"),
        ({"max_batch_tokens": 128}, "max_batch_tokens is 128, the leader's is 256"),
        ({"random_weights": True}, "random_weights is True, the leader's is False"),
    ],
)
def test_a_host_that_does_not_fit_is_refused_by_name(
    change: dict[str, int], complaint: str, door: Door
) -> None:
    other = replace(door.settings, host_index=1)
    kind, said = door.knock(greeting(replace(other, **change)), b"of three hosts")
    assert (kind, said.decode()) == (Kind.END, complaint)
    # whoever fits is still welcome
    assert door.knock(greeting(other), b"of three hosts")[0] is Kind.WELCOME


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_leader_with_a_name_is_joined_by_either_family(address: str) -> None:
    if address == "::1" and not socket.has_dualstack_ipv6():
        # containers without IPv6 cannot be joined by it
        pytest.skip("no IPv6 here")
    port = free_port()
    door = Door(replace(spread(2, 2), leader_address=f"m3-0.m3.serving:{port}"), address)
    try:
        assert door.knock(greeting(replace(door.settings, host_index=1)))[0] is Kind.WELCOME
        door.waiting.result(END_S)
        assert door.hosts.own_address == address
    finally:
        door.close()


def test_a_host_without_the_key_and_what_is_no_host_is_turned_away(door: Door) -> None:
    own = greeting(replace(door.settings, host_index=1))
    with pytest.raises(LinkLostError):
        door.knock(own, b"another key")
    with door.connect() as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        # an answer, if any, and then the end
        while stranger.recv(4096):
            pass
    assert door.knock(own, b"of three hosts")[0] is Kind.WELCOME


def test_strangers_that_say_nothing_do_not_hold_the_door(door: Door) -> None:
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(door.connect())
        own = greeting(replace(door.settings, host_index=1))
        # whoever joins is as impatient as one stranger is patient
        assert door.knock(own, b"of three hosts")[0] is Kind.WELCOME
        assert door.knock(own, b"of three hosts")[0] is Kind.END


def test_strangers_that_drip_are_turned_away_after_a_while(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "GREETING_S", 2.0)
    own = greeting(replace(door.settings, host_index=1))
    is_over = threading.Event()

    def drip(stranger: socket.socket) -> None:
        with suppress(OSError):
            while not is_over.wait(0.2):
                stranger.sendall(b"\0")

    with ExitStack() as stack:
        strangers = [stack.enter_context(door.connect()) for _ in range(hosts.MAX_GREETED)]
        dripping = [threading.Thread(target=drip, args=(each,)) for each in strangers]
        for thread in dripping:
            thread.start()
        deadline = time.monotonic() + START_S
        kind = None
        while kind is None:
            # as a host does that finds the door full
            with suppress(LinkLostError):
                kind = door.knock(own, b"of three hosts")[0]
            assert time.monotonic() < deadline
        assert kind is Kind.WELCOME
        is_over.set()
        for thread in dripping:
            thread.join()


def test_whoever_is_gone_before_being_let_in_is_no_trouble() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        # as a probe of a load balancer does: a reset right behind the connection
        with socket.create_connection(server.getsockname()) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock, _ = server.accept()
        with pytest.raises(LinkLostError, match="is gone"):
            Link(sock, silence_s=10)
        assert sock.fileno() == -1
