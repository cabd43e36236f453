"""Hosts as network namespaces on one bridge; links that can be cut and slowed.

Everything happens in a network and mount namespace that the caller made (`unshare --net --mount`),
so nothing of it is seen outside, and all of it goes when the caller ends.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

BRIDGE = "hub"
SUBNET = "10.77.0"
# a link that a small picture takes seconds over
SLOW_RATE = "128kbit"


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace with one address."""

    name: str
    number: int

    @property
    def address(self) -> str:
        return f"{SUBNET}.{self.number}"

    @property
    def link(self) -> str:
        """The bridge's end of its cable."""
        return f"to-{self.name}"

    def command(self, *command: str) -> list[str]:
        """The command line that runs another one here; the process is that other one."""
        return ["nsenter", f"--net=/run/netns/{self.name}", *command]


class Network:
    """The bridge and its hosts; the caller's own namespace is a host too (.1)."""

    def __init__(self) -> None:
        _run("mount", "--make-rprivate", "/")
        subprocess.run(["mkdir", "-p", "/run/netns"], check=True)
        _run("mount", "-t", "tmpfs", "tmpfs", "/run/netns")
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "link", "set", BRIDGE, "up")
        _run("ip", "addr", "add", f"{SUBNET}.1/24", "dev", BRIDGE)
        self._count = 1

    def add(self, name: str) -> Host:
        self._count += 1
        host = Host(name, self._count)
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "link", "set", host.link, "master", BRIDGE, "up")
        for command in (
            ("ip", "addr", "add", f"{host.address}/24", "dev", "eth0"),
            ("ip", "link", "set", "eth0", "up"),
            ("ip", "link", "set", "lo", "up"),
        ):
            _run(*host.command(*command))
        return host

    def cut(self, host: Host) -> None:
        """Drops every packet to and from the host, without a word to either side."""
        _run("ip", "link", "set", host.link, "down")

    def mend(self, host: Host) -> None:
        _run("ip", "link", "set", host.link, "up")

    def slow(self, host: Host) -> None:
        """Both directions crawl, through a queue that holds seconds."""
        shape = ["root", "tbf", "rate", SLOW_RATE, "burst", "4kb", "latency", "3s"]
        _run("tc", "qdisc", "add", "dev", host.link, *shape)
        _run(*host.command("tc", "qdisc", "add", "dev", "eth0", *shape))

    def quicken(self, host: Host) -> None:
        _run("tc", "qdisc", "del", "dev", host.link, "root")
        _run(*host.command("tc", "qdisc", "del", "dev", "eth0", "root"))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
