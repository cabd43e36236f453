"""Patches that another process of this host left in its memory: read, or refused, never kept."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from m3stack.errors import ErrorKind, WorkerError
from m3stack.rpc.shared_pieces import read_piece, reads_memory
from m3stack.worker.v1 import worker_pb2 as pb

CONTENT = bytes(range(256)) * 4000

CLIENT = """
import fcntl, os, sys
seals = int(sys.argv[1])
descriptor = os.memfd_create(sys.argv[2], os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
os.write(descriptor, bytes(range(256)) * 4000)
fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
print(descriptor, flush=True)
sys.stdin.read()
"""
# fcntl.F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE
ALL_SEALS = 0b1110


@contextmanager
def client(seals: int = ALL_SEALS, name: str = "m3stack-clip") -> Iterator[pb.SharedPiece]:
    """A process that holds CONTENT in a memory file until the end."""
    command = [sys.executable, "-c", CLIENT, str(seals), name]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        descriptor = int(process.stdout.readline())
        yield pb.SharedPiece(process_id=process.pid, descriptor=descriptor, num_bytes=len(CONTENT))
        process.kill()


def refused(piece: pb.SharedPiece, num_bytes: int = len(CONTENT)) -> WorkerError:
    with pytest.raises(WorkerError) as caught:
        read_piece(piece, memoryview(bytearray(num_bytes)), "media[0]")
    return caught.value


def test_another_process_s_memory_is_copied_and_let_go() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    buffer = bytearray(len(CONTENT) + 2)
    with client() as piece:
        read_piece(piece, memoryview(buffer)[1:-1], "media[0]")
    assert buffer == b"\0" + CONTENT + b"\0"
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_client_that_died_leaves_nothing_to_read() -> None:
    with client() as piece:
        pass
    assert refused(piece).kind is ErrorKind.MEDIA_REJECTED


def test_a_worker_without_descriptors_does_not_blame_the_picture() -> None:
    with client() as piece:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            error = refused(piece)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert error.kind is ErrorKind.OVERLOADED


@pytest.mark.parametrize(("seals", "num_bytes"), [(0, len(CONTENT)), (ALL_SEALS, 5)])
def test_a_file_that_may_change_or_has_another_size_is_refused(seals: int, num_bytes: int) -> None:
    with client(seals) as piece:
        assert refused(piece, num_bytes).kind is ErrorKind.MEDIA_REJECTED


def test_only_memory_files_of_this_product_are_opened() -> None:
    with client(name="somebody-else") as piece:
        assert refused(piece).kind is ErrorKind.MEDIA_REJECTED
        standard_input = pb.SharedPiece(process_id=piece.process_id, descriptor=0)
        assert refused(standard_input).kind is ErrorKind.MEDIA_REJECTED


def test_memory_is_tried_by_what_is_in_it() -> None:
    with client() as piece:
        assert not reads_memory(piece, CONTENT), "longer than any token"
        assert not reads_memory(piece, b"token")
    token = b"0123456789abcdef"
    descriptor = os.memfd_create("m3stack-clip", os.MFD_ALLOW_SEALING)
    os.write(descriptor, token)
    piece = pb.SharedPiece(process_id=os.getpid(), descriptor=descriptor, num_bytes=len(token))
    assert not reads_memory(piece, token), "not sealed"
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, ALL_SEALS)
    assert reads_memory(piece, token)
    assert not reads_memory(piece, b"another's token.")
    os.close(descriptor)
    assert not reads_memory(piece, token)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes somebody else")
def test_another_user_s_process_finds_out_that_it_cannot_read() -> None:
    token = b"0123456789abcdef"
    descriptor = os.memfd_create("m3stack-clip", os.MFD_ALLOW_SEALING)
    os.write(descriptor, token)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, ALL_SEALS)
    piece = pb.SharedPiece(process_id=os.getpid(), descriptor=descriptor, num_bytes=len(token))
    child = os.fork()
    if child == 0:
        os.setresuid(65534, 65534, 65534)
        os._exit(int(reads_memory(piece, token)))
    _, status = os.waitpid(child, 0)
    os.close(descriptor)
    assert os.waitstatus_to_exitcode(status) == 0
