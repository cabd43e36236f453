"""The processes of a tensor-parallel worker: starts followers, talks to them, notices their end."""

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
from m3stack.engine.leader import Command, apply
from m3stack.engine.plan import FatalStepError
from m3stack.engine.runner import Runner
from m3stack.errors import StartupError
from m3stack.hardware import choose_hardware
from m3stack.telemetry import set_up_logging

_log = logging.getLogger(__name__)

# longest that processes may take to start, and one rank may then be behind another
START_S = 300.0
BEHIND_S = 60.0
# how long ending followers get before they are killed, and a dying one to be seen dead
GOODBYE_S = 5.0
NOTICE_S = 2.0
# longest that the worker may outlive a rank, whatever else hangs
OUTLIVE_S = 8.0
EXIT_FAILED = 1


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


class RankGroup:
    """The leader's side. Everything but `start_watching` is called from one thread at a time.

    Args:
        config: of the worker; `tensor_parallel` is the number of ranks.
        build: makes a follower's runner, in its own process.

    Attributes:
        noticed: which rank has ended, once the watch has seen it.
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
        self._stopped = threading.Event()
        self._joined: Joined | None = None
        self.noticed: RankLostError | None = None
        try:
            self._await_all()
            self._joined = _join(config, store, rank=0)
        except Exception as error:
            reason = self.lost() or f"the ranks could not be joined: {error}"
            self.stop()
            raise StartupError(str(reason)) from error

    @property
    def joined(self) -> Joined:
        """The groups, of which this process is rank 0."""
        assert self._joined is not None
        return self._joined

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
        """Calls `on_loss`, on a thread of its own, as soon as a follower ends unasked.

        Collectives of GPUs would wait for it for ever: they are broken off. Should the worker hang
        all the same, its process is ended here.
        """

        def watch() -> None:
            wait([process.sentinel for process in self._processes])
            if self._is_stopping:
                return
            lost = self.lost()
            assert lost is not None
            _log.critical("rank_lost what=%s", lost)
            # before anything is broken off: what a broken step gives must not be taken
            self.noticed = lost
            on_loss(lost)
            _break_off(self.joined)
            if not self._stopped.wait(OUTLIVE_S):
                _log.critical("rank_lost what=the worker hangs, and is ended")
                os._exit(EXIT_FAILED)

        threading.Thread(target=watch, name="m3stack-ranks", daemon=True).start()

    def stop(self) -> None:
        """Ends the followers; those that do not go are killed."""
        self._is_stopping = True
        for connection in self._connections:
            connection.close()
        # after a loss the others hang in a collective, and would not go
        deadline = time.monotonic() + (GOODBYE_S if self.noticed is None else 0.0)
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
        if self._joined is not None:
            # an orderly end would wait for ranks that are gone
            _break_off(self._joined)
        if dist.is_initialized():
            dist.destroy_process_group()
        self._stopped.set()

    def _await_all(self) -> None:
        """Returns when every follower's process is up; raises as soon as one has ended instead."""
        waited = dict(zip(self._connections, self._processes, strict=True))
        deadline = time.monotonic() + START_S
        while waited:
            sentinels = [process.sentinel for process in waited.values()]
            ready = wait([*waited, *sentinels], max(0.0, deadline - time.monotonic()))
            if not ready:
                names = ", ".join(process.name for process in waited.values())
                raise TimeoutError(f"not started within {START_S:g} s: {names}")
            for connection in [connection for connection in waited if connection in ready]:
                # an end of file where the process is gone
                connection.recv_bytes()
                del waited[connection]

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
    _end_with_parent()
    store = _store(store_port, config.tensor_parallel, is_leader=False)

    def receive() -> object:
        return pickle.loads(leader.recv_bytes())

    def receive_setup() -> Setup:
        setup = receive()
        assert isinstance(setup, Setup)
        return setup

    code = 0
    try:
        device = choose_hardware(config, rank).device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        leader.send_bytes(b"up")
        runner = build(config, _join(config, store, rank=rank), receive_setup)
        _log.info("rank_ready rank=%d", rank)
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


def _end_with_parent() -> None:
    """Ends this process when the leader's is gone, even out of a collective that never returns."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(EXIT_FAILED)

    threading.Thread(target=watch, name="m3stack-leader", daemon=True).start()


def _store(port: int, size: int, *, is_leader: bool) -> Any:
    """Where ranks find each other, on the loopback address; port 0 picks a free one."""
    # torch exports it without saying so
    store = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
    return store("127.0.0.1", port, size, is_master=is_leader, wait_for_workers=False)


def _join(config: WorkerConfig, store: Any, *, rank: int) -> Joined:
    size, timeout = config.tensor_parallel, timedelta(seconds=BEHIND_S)
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


def _break_off(joined: Joined) -> None:
    """Makes collectives of GPUs end, whoever is missing; gloo's fail by themselves."""
    if joined.tensors is not joined.control:
        joined.tensors.abort()
