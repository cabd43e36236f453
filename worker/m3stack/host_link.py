"""One end of the connection between two hosts of a worker: messages, and signs of life."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from contextlib import suppress
from enum import Enum
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

from m3stack.errors import StartupError

# how long the other end gets to show that it knows the key
HANDSHAKE_S = 10.0
# longest that an end may take nothing although it lives: ranks give each other up before that
BUSY_S = 120.0
# signs of life in the time after which an end counts as lost
SIGNS = 5
# what is said before anything is commanded is short
MAX_GREETING_BYTES = 1 << 20
# where no secret is set, the exchange still tells strangers that speak something else apart
OPEN_KEY = b"m3stack"


_INT_MAX = (1 << 31) - 1


class Kind(bytes, Enum):
    """What a message is; its first byte."""

    # a host's settings, or that it is one of the worker's now
    HELLO = b"h"
    WELCOME = b"w"
    # its ranks have started
    UP = b"u"
    # bytes for every rank behind the link
    COMMAND = b"c"
    # nothing but that the sender lives
    ALIVE = b"a"
    # the end of all, and why; without a reason it is an orderly one
    END = b"e"


class LinkLostError(Exception):
    """The other end is gone, silent, or no end of such a link."""


class Link:
    """Messages in both directions. Threads may send at once; one receives.

    Args:
        sock: connected; belongs to the link from now on.
        silence_s: longest time without a message, after which the other end counts as lost. One
            that takes nothing for as long is busy if it gives signs of life meanwhile.
        busy_s: longest time for that.

    Raises:
        LinkLostError: the other end has gone again already; the socket is closed.
    """

    def __init__(self, sock: socket.socket, *, silence_s: float, busy_s: float = BUSY_S) -> None:
        self._sock = sock
        self._silence_s = silence_s
        self._busy_s = max(busy_s, silence_s)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # a socket of both families writes the addresses of one in the form of the other
            self.own_host: str = sock.getsockname()[0].removeprefix("::ffff:")
            self.peer_host: str = sock.getpeername()[0].removeprefix("::ffff:")
        except OSError as error:
            sock.close()
            raise LinkLostError("is gone") from error
        self._connection = Connection(os.dup(sock.fileno()))
        self._heard_at = time.monotonic()
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def authenticate(self, key: bytes, *, is_leader: bool) -> None:
        """Each end shows the other that it knows the key, which itself does not travel.

        Raises:
            LinkLostError: the other end does not know it, or says nothing.
        """
        self._bound(HANDSHAKE_S)
        steps = (deliver_challenge, answer_challenge)
        try:
            for step in steps if is_leader else reversed(steps):
                step(self._connection, key)
        except Exception as error:
            # authentication errors, nonsense instead of messages, ends of files
            raise LinkLostError(f"it does not show that it knows the key: {error}") from error
        finally:
            self._bound(self._silence_s)

    def start_signs(self) -> None:
        """Tells the other end, on a thread of its own and until `close`, that this one lives."""
        threading.Thread(target=self._give_signs, name="m3stack-signs", daemon=True).start()

    def send(self, kind: Kind, data: bytes = b"") -> None:
        """Raises LinkLostError if the other end is gone, or takes nothing and is silent.

        The end of all is not worth patience: it is said within `silence_s` or not at all.
        """
        patience_s = self._silence_s if kind is Kind.END else self._busy_s
        until = time.monotonic() + patience_s
        size = len(kind.value) + len(data)
        # as `Connection` writes a message, which cannot go on with one that was taken in part
        head = struct.pack("!i", size) if size <= _INT_MAX else struct.pack("!iQ", -1, size)
        if not self._lock.acquire(timeout=patience_s):
            raise LinkLostError(f"has taken nothing for {patience_s:g} s")
        try:
            self._send_all(head + kind.value, until)
            self._send_all(data, until)
        finally:
            self._lock.release()

    def receive(self, max_bytes: int | None = None) -> tuple[Kind, bytes]:
        """The next message that is more than a sign of life.

        Raises:
            LinkLostError: the other end is gone or silent, or says nonsense.
        """
        while True:
            try:
                message = self._connection.recv_bytes(max_bytes)
                kind = Kind(message[:1])
            except BlockingIOError as error:
                raise LinkLostError(f"has been silent for {self._silence_s:g} s") from error
            except (OSError, EOFError) as error:
                raise LinkLostError("is gone") from error
            except ValueError as error:
                raise LinkLostError("says what is no message") from error
            self._heard_at = time.monotonic()
            if kind is not Kind.ALIVE:
                return kind, message[1:]

    def close(self) -> None:
        """Ends the link; whoever sends or receives on it is told that the other end is gone."""
        self._closed.set()
        # where the other end has ended, there is nothing to shut
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _send_all(self, data: bytes, until: float) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._sock.send(rest) :]
            except BlockingIOError as error:
                # the other end reads nothing while its ranks have no room, and lives
                now = time.monotonic()
                if now > until or now - self._heard_at > self._silence_s:
                    raise LinkLostError("takes nothing") from error
            except OSError as error:
                raise LinkLostError("is gone") from error

    def _bound(self, seconds: float) -> None:
        """How long a read or a write of the socket may wait."""
        whole, part = divmod(round(seconds * 1e6), 1_000_000)
        limit = struct.pack("@ll", whole, part)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._sock.setsockopt(socket.SOL_SOCKET, option, limit)

    def _give_signs(self) -> None:
        while not self._closed.wait(self._silence_s / SIGNS):
            try:
                self.send(Kind.ALIVE)
            except LinkLostError:
                # whoever receives notices by itself
                return


def read_key(path: str) -> bytes:
    """The secret that all hosts of a worker hold.

    Raises:
        StartupError: the file cannot be read, or is empty.
    """
    if not path:
        return OPEN_KEY
    try:
        key = Path(path).read_bytes()
    except OSError as error:
        raise StartupError(f"host_key_file {path} cannot be read: {error.strerror}") from error
    if not key.strip():
        raise StartupError(f"host_key_file {path} is empty")
    return key
