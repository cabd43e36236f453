"""How fast pages of the released model's size go from one worker to another on this machine.

Two processes with the whole path between them: pages out of a pool, hashed, over gRPC, checked,
into another pool; engines that do nothing else. Beside it, the ceiling: as many bytes through a
bare TCP connection, unchecked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import torch

from m3stack.cache.media import MediaLedger
from m3stack.cache.pages import PageAllocator
from m3stack.cache.pool import KvPool, PageShape
from m3stack.cache.prefix import PrefixCache
from m3stack.client import default_sampling
from m3stack.engine.messages import Hand
from m3stack.engine.runner import Runner
from m3stack.rpc.transfer_client import GrpcTransport
from m3stack.rpc.transfer_service import TransferService
from m3stack.transfer.keys import chain
from m3stack.transfer.layout import page_form
from m3stack.transfer.port import RankPort
from m3stack.transfer.pull import Puller
from m3stack.transfer.store import ContentStore
from m3stack.types import Request, Source
from m3stack.worker.v1 import worker_pb2_grpc as pb_grpc

CPU = torch.device("cpu")
# Source: the released config.json; three dense layers, then sparse ones
LAYERS, DENSE, HEADS, HEAD_DIM, INDEX_DIM, PAGE_TOKENS = 60, 3, 4, 128, 128, 128
PIECE_BYTES = 2 << 20


class _Book:
    """Nobody reads it."""

    def transferred(self, kind: str, num_bytes: int) -> None:
        pass

    def transfer_ended(self, outcome: str) -> None:
        self.outcome = outcome


class _IdleEngine:
    """An engine thread without steps."""

    def __init__(self, pages: PrefixCache) -> None:
        self._thread = ThreadPoolExecutor(1)
        runner: Runner = None  # type: ignore[assignment]
        self._hand = Hand(pages, MediaLedger(1), runner, is_settled=True)

    def between_steps(self, work: Callable[[Hand | None], None]) -> None:
        self._thread.submit(work, self._hand)


@dataclass(frozen=True, slots=True)
class _Side:
    pool: KvPool
    pages: PrefixCache
    store: ContentStore


def _side(num_pages: int, layers: int) -> _Side:
    sparse = tuple(layer >= min(DENSE, layers) for layer in range(layers))
    shape = PageShape(sparse, HEADS, HEAD_DIM, INDEX_DIM, PAGE_TOKENS, torch.bfloat16)
    pool = KvPool(shape, num_pages, CPU)
    form = page_form(shape, HEADS)
    pages = PrefixCache(PageAllocator(num_pages))
    features = None
    port = RankPort(pool, form, range(HEADS), features=features, width=1, device=CPU)  # type: ignore[arg-type]
    store = ContentStore(
        _IdleEngine(pages),
        port,
        page_layout="bench",
        feature_layout="bench",
    )
    return _Side(pool, pages, store)


def _request(num_pages: int) -> Request:
    ids = tuple(index % 1000 for index in range(num_pages * PAGE_TOKENS + 1))
    return Request("bench", ids, default_sampling(1))


def _serve(num_pages: int, layers: int, ready: Connection) -> None:
    """The source: a pool full of the request's pages."""
    torch.set_num_threads(1)
    side = _side(num_pages, layers)
    for layer in side.pool.layers:
        for tensor in (layer.k_PGBD, layer.v_PGBD, layer.index_k_PBD):
            if tensor is not None:
                tensor.view(torch.int16).random_(0, 1 << 14)
    taken = side.pages.take(num_pages)
    keys = chain(_request(num_pages), page_tokens=PAGE_TOKENS, epoch=0)
    for page, key in zip(taken, keys, strict=True):
        side.pages.register(page, key)
    side.pages.release(taken)

    async def serve() -> None:
        server = grpc.aio.server()
        service = TransferService()
        service.open_for(side.store)
        pb_grpc.add_TransferServiceServicer_to_server(service, server)
        ready.send(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await server.wait_for_termination()

    asyncio.run(serve())


def _flood(num_bytes: int, ready: Connection) -> None:
    """The ceiling's source: so many bytes to everyone who connects."""
    listener = socket.create_server(("127.0.0.1", 0))
    ready.send(listener.getsockname()[1])
    piece = bytes(PIECE_BYTES)
    while True:
        peer, _ = listener.accept()
        with peer:
            for _ in range(num_bytes // PIECE_BYTES):
                peer.sendall(piece)


async def _pull(port: int, num_pages: int, layers: int) -> float:
    """Seconds that a whole transfer takes, into a pool of its own."""
    side, book = _side(num_pages, layers), _Book()
    # memory is there before the clock starts
    for layer in side.pool.layers:
        layer.k_PGBD.zero_()
        layer.v_PGBD.zero_()
    transport = GrpcTransport()
    puller = Puller(side.store, transport, page_tokens=PAGE_TOKENS, book=book)
    began = time.perf_counter()
    tokens = await puller.pages(_request(num_pages), Source(f"127.0.0.1:{port}"))
    taken = time.perf_counter() - began
    await transport.close()
    if (tokens, book.outcome) != (num_pages * PAGE_TOKENS, "whole"):
        raise SystemExit(f"the transfer was not whole: {tokens} tokens, {book.outcome}")
    return taken


def _drain(port: int, num_bytes: int) -> float:
    buffer = bytearray(PIECE_BYTES)
    began = time.perf_counter()
    left = num_bytes // PIECE_BYTES * PIECE_BYTES
    with socket.create_connection(("127.0.0.1", port)) as peer:
        while left > 0:
            count = peer.recv_into(buffer)
            if count == 0:
                raise SystemExit(f"the peer closed with {left} bytes to come")
            left -= count
    return time.perf_counter() - began


def _started(target: Callable[..., None], *args: object) -> tuple[multiprocessing.Process, int]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=target, args=(*args, theirs), daemon=True
    )
    process.start()
    # a source that cannot start ends the wait
    theirs.close()
    return process, ours.recv()  # type: ignore[return-value]


def _cpu_s(process: multiprocessing.Process) -> float:
    """What a process has computed so far: a figure that others on the machine do not change."""
    times = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="m3stack bench transfer", description=__doc__)
    parser.add_argument("--pages", type=int, default=32, help="of 128 tokens each")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    page_bytes = _side(1, arguments.layers).store.page_bytes
    total = arguments.pages * page_bytes
    source, port = _started(_serve, arguments.pages, arguments.layers)
    flood, flood_port = _started(_flood, total)
    given: list[float] = []
    taken_in: list[float] = []
    pulls: list[float] = []
    drains: list[float] = []
    try:
        for run in range(arguments.runs + 1):
            before, own = _cpu_s(source), time.process_time()
            taken = asyncio.run(_pull(port, arguments.pages, arguments.layers))
            cpu_s, own = _cpu_s(source) - before, time.process_time() - own
            bare = _drain(flood_port, total)
            # the first one warms up
            if run:
                pulls.append(total / taken / 1e6)
                given.append(cpu_s / total * 1e9)
                taken_in.append(own / total * 1e9)
                drains.append(total / bare / 1e6)
    finally:
        source.kill()
        flood.kill()
    row = {
        "name": "transfer_grpc_loopback",
        "page_bytes": page_bytes,
        "pages": arguments.pages,
        "mb_per_s": round(statistics.median(pulls), 1),
        "spread": [round(min(pulls), 1), round(max(pulls), 1)],
        "tokens_per_s": round(statistics.median(pulls) * 1e6 / page_bytes * PAGE_TOKENS),
        # these two do not depend on what else the machine does
        "source_cpu_s_per_gb": round(statistics.median(given), 2),
        "target_cpu_s_per_gb": round(statistics.median(taken_in), 2),
        "bare_tcp_mb_per_s": round(statistics.median(drains), 1),
        "cores": len(os.sched_getaffinity(0)),
    }
    print(json.dumps(row, indent=1))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([row], indent=1) + "\n")
    return 0
