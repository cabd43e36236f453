"""The processes of a tensor-parallel worker: starts followers, talks to them, notices their end."""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch.distributed as dist

from m3stack.config import WorkerConfig
from m3stack.engine.leader import Command, apply
from m3stack.engine.plan import FatalStepError
from m3stack.engine.runner import Runner
from m3stack.errors import StartupError
from m3stack.telemetry import set_up_logging

_log = logging.getLogger(__name__)

# longest that one rank may be behind another in a step, and all of them in starting
BEHIND_S = 60.0
# how long an ending follower gets before it is killed, and a dying one to be seen dead
GOODBYE_S = 5.0
NOTICE_S = 2.0


class RankLostError(FatalStepError):
    """A rank has ended, and the worker with it."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What all ranks must have in common, as the leader found it.

    Attributes:
        num_pages: of every rank's pool.
        num_host_slots: of every rank's host tier; 0 where there is none.
    """

    num_pages: int
    num_host_slots: int


BuildFollower = Callable[[WorkerConfig, dist.ProcessGroup, Callable[[], Setup]], Runner]
"""Loads this rank's part of the model, waits for the setup, builds the runner around both."""


class RankGroup:
    """The leader's side. Everything but `start_watching` is called from one thread at a time.

    Args:
        config: of the worker; `tensor_parallel` is the number of ranks.
        build: makes a follower's runner, in its own process.
    """

    def __init__(self, config: WorkerConfig, build: BuildFollower) -> None:
        size = config.tensor_parallel
        context = multiprocessing.get_context("spawn")
        store = _store(0, size, is_leader=True)
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for rank in range(1, size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=follow,
                args=(config, rank, store.port, theirs, build),
                name=f"m3stack-rank-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self._is_stopping = False
        try:
            self.group = _join(store, rank=0, size=size)
        except Exception as error:
            lost = self.lost()
            self.stop()
            raise StartupError(str(lost or f"the ranks could not be joined: {error}")) from error

    def set_up(self, setup: Setup) -> None:
        """Tells every follower what to build, once they have loaded.

        Raises:
            StartupError: one of them could not start.
        """
        try:
            self._send_object(setup)
        except FatalStepError as error:
            raise StartupError(f"{error}; see its messages above") from error

    def send(self, command: Command) -> None:
        """Gives a command to every follower.

        Raises:
            RankLostError: one of them is gone.
        """
        self._send_object(command)

    def lost(self) -> RankLostError | None:
        """Which rank has ended, if one has or is about to."""
        ended = wait([process.sentinel for process in self._processes], timeout=NOTICE_S)
        for rank, process in enumerate(self._processes, start=1):
            if process.sentinel in ended:
                process.join()
                return RankLostError(f"rank {rank} ended with exit code {process.exitcode}")
        return None

    def start_watching(self, on_loss: Callable[[RankLostError], None]) -> None:
        """Calls `on_loss`, on a thread of its own, as soon as a follower ends unasked."""

        def watch() -> None:
            wait([process.sentinel for process in self._processes])
            if not self._is_stopping:
                lost = self.lost()
                assert lost is not None
                _log.critical("rank_lost what=%s", lost)
                on_loss(lost)

        threading.Thread(target=watch, name="m3stack-ranks", daemon=True).start()

    def stop(self) -> None:
        """Ends the followers; those that do not go are killed."""
        self._is_stopping = True
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(GOODBYE_S)
            if process.is_alive():
                process.kill()
                process.join()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _send_object(self, what: object) -> None:
        data = pickle.dumps(what, protocol=pickle.HIGHEST_PROTOCOL)
        for connection in self._connections:
            try:
                connection.send_bytes(data)
            except OSError as error:
                raise self.lost() or RankLostError("a rank cannot be reached") from error


def follow(
    config: WorkerConfig, rank: int, store_port: int, leader: Connection, build: BuildFollower
) -> None:
    """The life of a follower: load, then do what the leader says until it is gone.

    Whatever goes wrong here ends the process, and thereby the worker.
    """
    # signals reach every process of a terminal or a service: the leader decides what they mean
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    set_up_logging(config.log_level)
    store = _store(store_port, config.tensor_parallel, is_leader=False)
    group = _join(store, rank=rank, size=config.tensor_parallel)

    def receive() -> object:
        return pickle.loads(leader.recv_bytes())

    def receive_setup() -> Setup:
        setup = receive()
        assert isinstance(setup, Setup)
        return setup

    try:
        runner = build(config, group, receive_setup)
        _log.info("rank_ready rank=%d", rank)
        while True:
            command = receive()
            apply(command, runner)  # type: ignore[arg-type]
    except EOFError:
        # the leader has closed its end, or is gone
        return
    except StartupError as error:
        _log.critical("rank_failed rank=%d reason=%s", rank, error)
        sys.exit(1)


def _store(port: int, size: int, *, is_leader: bool) -> Any:
    """Where ranks find each other, on the loopback address; port 0 picks a free one."""
    # torch exports it without saying so
    store = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
    return store("127.0.0.1", port, size, is_master=is_leader, wait_for_workers=False)


def _join(store: Any, *, rank: int, size: int) -> dist.ProcessGroup:
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=BEHIND_S),
    )
    group = dist.group.WORLD
    assert group is not None
    return group
