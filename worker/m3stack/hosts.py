"""The leader's side of a worker over several hosts: lets them join, and notices their loss."""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from m3stack import __version__
from m3stack.config import WorkerConfig
from m3stack.errors import StartupError
from m3stack.host_link import MAX_GREETING_BYTES, Kind, Link, LinkLostError, read_key
from m3stack.transfer.layout import weights_id

_log = logging.getLogger(__name__)

# longest that hosts may take to join: images are pulled, machines are booted
JOIN_S = 1800.0
# that are let in at once, and how long one gets to say who it is, however it drips
MAX_GREETED, GREETING_S = 32, 20.0
# how often the wait for them looks whether it is still wanted, and says that it goes on
LOOK_S, SAY_S = 0.5, 15.0
# settings that may differ from host to host
OF_ONE_HOST = frozenset(
    {
        "model_path",
        "served_model_name",
        "log_level",
        "listen",
        "tls_dir",
        "allowed_sources",
        "metrics_listen",
        "vllm_metrics",
        "host_index",
        "leader_address",
        "host_key_file",
        "cpu_threads",
    }
)


def greeting(config: WorkerConfig) -> bytes:
    """What a host says of itself, as JSON: it must be the leader's but for `OF_ONE_HOST`."""
    settings = dataclasses.asdict(config)
    same = {name: value for name, value in settings.items() if name not in OF_ONE_HOST}
    weights = "random" if config.random_weights else weights_id(Path(config.model_path))
    said = {"host_index": config.host_index, "version": __version__, "weights": weights}
    return json.dumps(said | {"settings": same}).encode()


class Hosts:
    """All hosts but the leading one; `start` lets them join.

    Args:
        config: of the worker.
        store_port: of the store in which ranks find each other, on this host.

    Attributes:
        ended: becomes ready, for `multiprocessing.connection.wait`, once a host is lost.
    """

    def __init__(self, config: WorkerConfig, store_port: int) -> None:
        self._config = config
        self._welcome = json.dumps({"store_port": store_port}).encode()
        self._key = read_key(config.host_key_file)
        # read once: a slow disk would keep those that join waiting
        self._own = json.loads(greeting(config))
        self._links: dict[int, Link] = {}
        self._up: dict[int, threading.Event] = {}
        self._loss: str | None = None
        self._is_stopping = False
        self.ended, self._end = multiprocessing.Pipe(duplex=False)
        self._lock = threading.Lock()
        # hosts about to be let in
        self._joining: set[int] = set()
        self._greeters = threading.BoundedSemaphore(MAX_GREETED)

    @property
    def own_address(self) -> str:
        """The address of this host that the others reach."""
        return next(iter(self._links.values())).own_host

    def await_joined(self, check: Callable[[], None]) -> None:
        """Returns when all hosts are there.

        Args:
            check: called every now and then; may raise to end the waiting.

        Raises:
            StartupError: they are not, in time; one that was is lost; the address is taken.
        """
        began_at = said_at = time.monotonic()
        wanted = self._config.hosts - 1
        with self._listen() as listener:
            listener.settimeout(LOOK_S)
            while len(self._links) < wanted:
                check()
                if self._loss is not None:
                    raise StartupError(self._loss)
                now = time.monotonic()
                if now - began_at > JOIN_S:
                    raise StartupError(f"{self._missing()} did not join within {JOIN_S:g} s")
                if now - said_at > SAY_S:
                    said_at = now
                    _log.info("waiting_for_hosts missing=%s", self._missing())
                try:
                    sock, _ = listener.accept()
                except TimeoutError:
                    continue
                # one after the other, a stranger that says nothing would hold the door
                if self._greeters.acquire(blocking=False):
                    threading.Thread(
                        target=self._greet, args=(sock,), name="m3stack-greeting", daemon=True
                    ).start()
                else:
                    sock.close()

    def await_up(self, deadline: float) -> None:
        """Returns when every host's ranks have started, or as soon as one host is lost.

        Raises:
            TimeoutError: it is later than `deadline` (of `time.monotonic`), and some have not.
            LinkLostError: one is lost.
        """
        for index, is_up in self._up.items():
            while not is_up.wait(LOOK_S):
                if self._loss is not None:
                    raise LinkLostError(self._loss)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not started in time: ranks of host {index}")

    def send(self, data: bytes) -> None:
        """Gives bytes to every rank of every host; raises LinkLostError if one is gone."""
        for link in self._links.values():
            link.send(Kind.COMMAND, data)

    def lost(self, timeout_s: float) -> str | None:
        """Which host is lost and why, if one is or is found to be within a time."""
        self.ended.poll(timeout_s)
        return self._loss

    def stop(self, reason: str) -> None:
        """Tells all hosts to end, and with a reason that this is a failure."""
        with self._lock:
            self._is_stopping = True
            links = list(self._links.values())
        for link in links:
            # one that has ended already needs no telling
            with suppress(LinkLostError):
                link.send(Kind.END, reason.encode())
            link.close()

    def _listen(self) -> socket.socket:
        host, _, port = self._config.leader_address.rpartition(":")
        # a name may be that of a service, or not be known here yet
        try:
            if _is_loopback(host):
                return socket.create_server((host, int(port)), backlog=64)
            if not socket.has_dualstack_ipv6():
                return socket.create_server(("", int(port)), backlog=64)
            return socket.create_server(
                ("", int(port)), family=socket.AF_INET6, dualstack_ipv6=True, backlog=64
            )
        except OSError as error:
            raise StartupError(
                f"leader_address: cannot listen on port {port}: {error.strerror}"
            ) from error

    def _greet(self, sock: socket.socket) -> None:
        """Lets one that has connected join, or turns it away."""
        try:
            sock.settimeout(None)
            link = Link(sock, silence_s=self._config.host_silence_s)
        except LinkLostError:
            # a probe that looks whether the port is open
            return
        else:
            self._introduce(link)
        finally:
            self._greeters.release()

    def _introduce(self, link: Link) -> None:
        index = -1
        deadline = threading.Timer(GREETING_S, link.close)
        deadline.daemon = True
        deadline.start()
        try:
            link.authenticate(self._key, is_leader=True)
            kind, data = link.receive(MAX_GREETING_BYTES)
            if kind is not Kind.HELLO:
                raise LinkLostError("does not say who it is")
            with self._lock:
                number, refusal = self._judge(data)
                if refusal is None:
                    index = number
                    self._joining.add(index)
            if refusal is not None:
                link.send(Kind.END, refusal.encode())
                raise LinkLostError(refusal)
            link.send(Kind.WELCOME, self._welcome)
        except LinkLostError as error:
            with self._lock:
                self._joining.discard(index)
            _log.warning("host_turned_away address=%s reason=%s", link.peer_host, error)
            link.close()
            return
        finally:
            deadline.cancel()
        _log.info("host_joined host=%d address=%s", index, link.peer_host)
        with self._lock:
            self._up[index] = threading.Event()
            self._links[index] = link
            self._joining.discard(index)
            if self._is_stopping:
                link.close()
        link.start_signs()
        name = f"m3stack-host-{index}"
        threading.Thread(target=self._follow, args=(index, link), name=name, daemon=True).start()

    def _judge(self, data: bytes) -> tuple[int, str | None]:
        """Which host this is, and why it may not join, if so."""
        try:
            said = json.loads(data)
            index = int(said["host_index"])
            settings = dict(said["settings"])
            version, weights = said["version"], said["weights"]
        except (ValueError, KeyError, TypeError) as error:
            return -1, f"its greeting cannot be read: {error!r}"
        if not 0 < index < self._config.hosts:
            return index, f"host_index is {index}, expected 1 to {self._config.hosts - 1}"
        if index in self._links or index in self._joining:
            return index, f"host_index is {index}, which another host has"
        own = self._own
        if version != own["version"]:
            return index, f"it runs version {version}, the leader {own['version']}"
        for name, value in own["settings"].items():
            if settings.get(name) != value:
                return index, f"{name} is {settings.get(name)!r}, the leader's is {value!r}"
        if weights != own["weights"]:
            return index, "its checkpoint has other weights than the leader's"
        return index, None

    def _follow(self, index: int, link: Link) -> None:
        """Listens to a host until it ends."""
        try:
            while True:
                kind, data = link.receive(MAX_GREETING_BYTES)
                if kind is Kind.UP:
                    self._up[index].set()
                elif kind is Kind.END:
                    reason = data.decode(errors="replace")
                    break
        except LinkLostError as error:
            reason = str(error)
        if self._is_stopping:
            return
        with self._lock:
            if self._loss is None:
                self._loss = f"host {index} ({link.peer_host}): {reason}"
                self._end.send_bytes(b"lost")

    def _missing(self) -> str:
        missing = [index for index in range(1, self._config.hosts) if index not in self._links]
        return "host " + ", ".join(map(str, missing))


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.")
