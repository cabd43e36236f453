"""Patch bytes that a client of this host left in a sealed memory file of its own.

Files are named by process and descriptor, in no directory: whoever dies, nothing is left behind.
Whether the worker can read them is tried with the first file that a client shows it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat

from m3stack.errors import ErrorKind, WorkerError
from m3stack.worker.v1 import worker_pb2 as pb

# what memory files of gateways are called, as their links show it
_LINK = "/memfd:m3stack-"
_MAX_TOKEN_BYTES = 64


def reads_memory(memory: pb.SharedPiece, token: bytes) -> bool:
    """Whether the file is there for this process, sealed, and holds just the token.

    Nobody of another host, of other process numbers or without the rights gets that far.
    """
    if not 0 < len(token) <= _MAX_TOKEN_BYTES or memory.num_bytes != len(token):
        return False
    found = bytearray(len(token))
    try:
        read_piece(memory, memoryview(found), "memory")
    except WorkerError:
        return False
    return found == token


def read_piece(piece: pb.SharedPiece, into: memoryview, name: str) -> None:
    """Copies a piece of `len(into)` bytes.

    Raises:
        WorkerError: MEDIA_REJECTED if its file cannot be read, is none of a gateway, has another
            size, or can still change; OVERLOADED if this process may open no more files.
    """
    path = f"/proc/{piece.process_id}/fd/{piece.descriptor}"
    try:
        if not os.readlink(path).startswith(_LINK):
            raise _rejected(name, "names a file that is no memory file of a gateway")
        # should the number mean another file by now, that must not hold anybody up
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _copy(descriptor, into, name)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            # nothing is wrong with the picture
            message = f"this worker has no file descriptor left to read {name} with; try again"
            raise WorkerError(ErrorKind.OVERLOADED, message, name) from None
        raise _rejected(
            name, f"cannot be read from its sender's memory: {error.strerror}"
        ) from None


def _copy(descriptor: int, into: memoryview, name: str) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size != len(into):
        raise _rejected(name, f"has a memory file of {status.st_size} bytes, not {len(into)}")
    wanted = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & wanted != wanted:
        raise _rejected(name, "has a memory file that may still change")
    done = 0
    while done < len(into):
        done += os.preadv(descriptor, [into[done:]], done)


def _rejected(name: str, complaint: str) -> WorkerError:
    return WorkerError(ErrorKind.MEDIA_REJECTED, f"{name} {complaint}", name)
