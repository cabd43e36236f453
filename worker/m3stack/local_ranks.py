"""The rank processes of one host, and the process they follow: started, told, watched, ended."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from m3stack.config import WorkerConfig
from m3stack.engine.leader import apply
from m3stack.engine.runner import Runner
from m3stack.errors import StartupError
from m3stack.hardware import choose_hardware
from m3stack.log_lines import set_up_logging

_log = logging.getLogger(__name__)

# longest that one rank may be behind another
BEHIND_S = 60.0
# longest from one rank's start to the last one's: hosts come up one by one
BEGIN_S, BEGIN = 3600.0, "begin"
EXIT_FAILED = 1
# what a rank says once its process runs, and once its part of the model is ready
UP, READY = b"up", b"ready"


@dataclass(frozen=True, slots=True)
class Setup:
    """What all ranks must have in common, as the leader found it.

    Attributes:
        num_pages: of every rank's pool.
        num_host_slots: of every rank's host tier; 0 where there is none.
    """

    num_pages: int
    num_host_slots: int


@dataclass(frozen=True, slots=True)
class Joined:
    """The two groups of all ranks.

    Attributes:
        control: moves plain objects between hosts' memories.
        tensors: moves tensors between the ranks' devices; the same one on CPUs.
    """

    control: dist.ProcessGroup
    tensors: dist.ProcessGroup


BuildFollower = Callable[[WorkerConfig, Joined, Callable[[], Setup]], Runner]
"""Loads this rank's part of the model, waits for the setup, builds the runner around both."""


@dataclass(frozen=True, slots=True)
class StorePlace:
    """Where the store is in which ranks find each other."""

    host: str
    port: int


class LocalRanks:
    """Ranks in processes of their own; belongs to one thread, but for `sentinels` and `ended`.

    Args:
        config: of the worker.
        ranks: which of them these are.
        place: of the store.
        build: makes a rank's runner, in its own process.

    Attributes:
        sentinels: become ready as a process ends.
        connections: to each; ready once it has said something.
    """

    def __init__(
        self, config: WorkerConfig, ranks: range, place: StorePlace, build: BuildFollower
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._ranks = ranks
        self._processes: list[BaseProcess] = []
        self.connections: list[Connection] = []
        # a process is waited for by one thread at a time: to a second one its exit code is unknown
        self._reaping = threading.Lock()
        for rank in ranks:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=follow,
                args=(config, rank, place, theirs, build),
                name=f"m3stack-rank-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self.connections.append(ours)
            self._processes.append(process)
        self.sentinels = [process.sentinel for process in self._processes]

    def await_up(self, deadline: float) -> None:
        """Returns when every process is up, or as soon as one has ended instead.

        Raises:
            TimeoutError: it is later than `deadline` (of `time.monotonic`), and some are not.
            EOFError, OSError: one has ended.
        """
        waited = dict(zip(self.connections, self._processes, strict=True))
        while waited:
            sentinels = [process.sentinel for process in waited.values()]
            ready = wait([*waited, *sentinels], max(0.0, deadline - time.monotonic()))
            if not ready:
                names = ", ".join(process.name for process in waited.values())
                raise TimeoutError(f"not started in time: {names}")
            for connection in [connection for connection in waited if connection in ready]:
                # an end of file where the process is gone
                connection.recv_bytes()
                del waited[connection]

    def send(self, data: bytes) -> None:
        """Gives bytes to every rank; raises OSError if one cannot be reached."""
        for connection in self.connections:
            connection.send_bytes(data)

    def ended(self, timeout_s: float) -> str | None:
        """Which rank has ended, if one has or does within a time; any thread may ask."""
        if not self.sentinels:
            return None
        done = wait(self.sentinels, timeout=timeout_s)
        for rank, process in zip(self._ranks, self._processes, strict=True):
            if process.sentinel in done:
                with self._reaping:
                    process.join()
                    return f"rank {rank} ended with exit code {process.exitcode}"
        return None

    def stop(self, grace_s: float) -> None:
        """Ends all; those that do not go within the time are killed."""
        for connection in self.connections:
            connection.close()
        deadline = time.monotonic() + grace_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()


def follow(
    config: WorkerConfig, rank: int, place: StorePlace, leader: Connection, build: BuildFollower
) -> None:
    """The life of a rank that follows: load, then do what it is told until nobody is there.

    Whatever goes wrong here ends the process, and thereby the worker.
    """
    # signals reach every process of a terminal or a service: the leader decides what they mean
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    set_up_logging(config.log_level)
    _end_with_parent()

    def receive() -> object:
        try:
            return pickle.loads(leader.recv_bytes())
        except ConnectionResetError as error:
            # how an end looks whose other side has not read all that was said to it
            raise EOFError from error

    def receive_setup() -> Setup:
        setup = receive()
        assert isinstance(setup, Setup)
        return setup

    code = 0
    try:
        device = choose_hardware(config, rank).device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        store = store_at(place, config.tensor_parallel, is_leader=False)
        leader.send_bytes(UP)
        runner = build(config, join_ranks(config, store, rank=rank), receive_setup)
        _log.info("rank_ready rank=%d", rank)
        leader.send_bytes(READY)
        while True:
            command = receive()
            apply(command, runner)  # type: ignore[arg-type]
    except EOFError:
        # the leader has closed its end, or is gone
        pass
    except StartupError as error:
        _log.critical("rank_failed rank=%d reason=%s", rank, error)
        code = EXIT_FAILED
    except Exception:  # noqa: BLE001 - whatever it is, it ends this rank and is said
        _log.exception("rank_failed rank=%d", rank)
        code = EXIT_FAILED
    # without the farewells of an orderly end, which wait for ranks that may hang
    logging.shutdown()
    os._exit(code)


def store_at(place: StorePlace, size: int, *, is_leader: bool) -> Any:
    """Where ranks find each other; the leader makes it, on port 0 at a free one."""
    # torch exports it without saying so
    store = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
    return store(place.host, place.port, size, is_master=is_leader, wait_for_workers=False)


def join_ranks(config: WorkerConfig, store: Any, *, rank: int) -> Joined:
    """This rank's end of the groups of all ranks; waits for the others."""
    size, timeout = config.tensor_parallel, timedelta(seconds=BEHIND_S)
    # the leader joins last, when all are there: nobody's patience begins before
    if rank == 0:
        store.set(BEGIN, b"")
    else:
        store.wait([BEGIN], timedelta(seconds=BEGIN_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    control = dist.group.WORLD
    assert control is not None
    device = choose_hardware(config, rank).device
    if device.type == "cpu":
        return Joined(control, control)
    # with a device it connects now, and what is wrong shows before anything is loaded
    tensors = dist.new_group(backend="nccl", timeout=timeout, device_id=device)
    assert isinstance(tensors, dist.ProcessGroup)
    return Joined(control, tensors)


def break_off(joined: Joined) -> None:
    """Makes collectives of GPUs end, whoever is missing; gloo's fail by themselves."""
    if joined.tensors is not joined.control:
        joined.tensors.abort()


def _end_with_parent() -> None:
    """Ends this process when its parent is gone, even out of a collective that never returns."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(EXIT_FAILED)

    threading.Thread(target=watch, name="m3stack-leader", daemon=True).start()
