"""A port that was handed out stays its holder's until a server listens on it."""

from __future__ import annotations

import contextlib
import socket

import pytest

from m3stack.local_ports import free_port


def test_a_port_is_given_to_nobody_else_and_a_server_may_have_it() -> None:
    ports = {free_port() for _ in range(20)}
    assert len(ports) == 20
    with contextlib.ExitStack() as held:
        # of all ports that the system gives away, a fair part
        others = [held.enter_context(socket.socket()) for _ in range(500)]
        for other in others:
            other.bind(("127.0.0.1", 0))
        assert ports.isdisjoint(other.getsockname()[1] for other in others)
        for port in ports:
            held.enter_context(socket.create_server(("127.0.0.1", port)))


def test_nobody_answers_on_a_port_before_a_server_does() -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", free_port()))
