"""Ports on the loopback address for servers that are about to be started."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A TCP port on 127.0.0.1 that the system gives to nobody else for a minute.

    A connection is made on it and closed at the listening end, which keeps the port in TIME_WAIT:
    whoever then asks for any port, or connects from one, gets another, while a server that names
    this one and sets SO_REUSEADDR, as ours and most do, may listen on it.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address):
            listener.accept()[0].close()
        return address[1]
