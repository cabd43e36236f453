"""Through which network the ranks of several hosts meet."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct

_log = logging.getLogger(__name__)

# the variable that gloo reads; one that is set is somebody's choice
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
# Source: linux/sockios.h
_GET_ADDRESS = 0x8915


def choose_interface(address: str) -> None:
    """Has the ranks of this process and its children meet on the interface of an address.

    Left to itself, gloo takes the one that the host's own name leads to, which often is loopback.
    Processes that run already keep theirs. An address of no interface (IPv6) changes nothing.
    """
    if INTERFACE_VARIABLE in os.environ:
        return
    name = interface_of(address)
    if name is not None:
        os.environ[INTERFACE_VARIABLE] = name
        _log.info("interface name=%s address=%s", name, address)


def interface_of(address: str) -> str | None:
    """The interface that has an IPv4 address as its first."""
    if address.startswith("127."):
        # the whole network is that of one interface
        address = "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(probe, _GET_ADDRESS, request)
            except OSError:
                # an interface without such an address
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None
