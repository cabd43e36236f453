"""Which addresses a request may name as those of other workers."""

from __future__ import annotations

import ipaddress
import re

MAX_CHARS = 256
MAX_PORT = 65535
# a name, an IPv4 address, or an IPv6 address in brackets; nothing that a resolver would take for
# another kind of address
_ADDRESS = re.compile(
    r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>\w[\w.-]*)):(?P<port>\d+)", re.ASCII
)


class AllowedSources:
    """What `allowed_sources` says.

    Args:
        text: names, `*.suffixes`, addresses and networks, separated by commas; empty: all.
    """

    def __init__(self, text: str = "") -> None:
        self._text = text
        self._names: set[str] = set()
        self._suffixes: list[str] = []
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for entry in filter(None, (part.strip().lower() for part in text.split(","))):
            try:
                self._networks.append(ipaddress.ip_network(entry))
            except ValueError:
                if entry.startswith("*."):
                    self._suffixes.append(entry[1:])
                else:
                    self._names.add(entry)

    def refusal(self, address: str) -> str | None:
        """What is expected instead of an address; None if it may be fetched from."""
        found = _ADDRESS.fullmatch(address) if len(address) <= MAX_CHARS else None
        if found is None or not 0 < int(found["port"]) <= MAX_PORT:
            return "host:port"
        host = (found["six"] or found["name"]).lower().rstrip(".")
        try:
            number = ipaddress.ip_address(host)
        except ValueError:
            if found["six"]:
                return "host:port"
            is_allowed = host in self._names or any(map(host.endswith, self._suffixes))
        else:
            is_allowed = any(number in network for network in self._networks)
        return None if is_allowed or not self._text else f"one of allowed_sources ({self._text})"
