"""All ranks of a tensor-parallel worker, seen from the leading one: started, spoken to, missed."""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

from m3stack.config import WorkerConfig
from m3stack.engine.leader import Command
from m3stack.engine.plan import FatalStepError
from m3stack.errors import StartupError
from m3stack.host_link import LinkLostError
from m3stack.host_network import choose_interface
from m3stack.hosts import Hosts
from m3stack.local_ranks import (
    EXIT_FAILED,
    BuildFollower,
    Joined,
    LocalRanks,
    Setup,
    StorePlace,
    break_off,
    join_ranks,
    store_at,
)

_log = logging.getLogger(__name__)

# longest that processes may take to start
START_S = 300.0
# how long ending followers get before they are killed, and a dying one to be seen dead
GOODBYE_S = 5.0
NOTICE_S = 2.0
# longest that the worker may outlive a rank, whatever else hangs
OUTLIVE_S = 8.0


class RankLostError(FatalStepError):
    """A rank has ended, and the worker with it."""


def _nothing(error: RankLostError | None = None) -> None:
    pass


def _nothing_held() -> None:
    pass


class RankGroup:
    """The leader's side. Everything but `tell_losses_to` is called from one thread at a time.

    From the moment all ranks have started, a rank or host that ends unasked is told to `on_loss`.
    Collectives of GPUs would wait for it for ever: they are broken off. Should the worker hang all
    the same, its process is ended here.

    Args:
        config: of the worker; `tensor_parallel` is the number of ranks, of which each host has
            equally many.
        build: makes a follower's runner, in its own process.
        check: called while hosts are waited for; may raise to end that.
        on_loss: called on a thread of its own, once, until `tell_losses_to` names another.

    Attributes:
        noticed: which rank or host has ended, once somebody has seen it.
    """

    def __init__(
        self,
        config: WorkerConfig,
        build: BuildFollower,
        *,
        check: Callable[[], None] = _nothing,
        on_loss: Callable[[RankLostError], None] = _nothing,
    ) -> None:
        self._is_stopping = False
        self._stopped = threading.Event()
        self._noticing = threading.Lock()
        self._telling = threading.Lock()
        self._on_loss = on_loss
        self._release = _nothing_held
        self._told: RankLostError | None = None
        self._joined: Joined | None = None
        self._local: LocalRanks | None = None
        self.noticed: RankLostError | None = None
        store = store_at(StorePlace("127.0.0.1", 0), config.tensor_parallel, is_leader=True)
        self._hosts = Hosts(config, store.port) if config.hosts > 1 else None
        try:
            if self._hosts is not None:
                self._hosts.await_joined(check)
            self._start(config, store, build)
        except BaseException as error:
            self.stop(str(error) if isinstance(error, StartupError) else "")
            raise
        threading.Thread(target=self._watch, name="m3stack-ranks", daemon=True).start()

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
        """Which rank or host has ended, if one has or is about to."""
        wait(self._ends(), timeout=NOTICE_S)
        reason = self._local.ended(0.0) if self._local is not None else None
        if reason is None and self._hosts is not None:
            reason = self._hosts.lost(0.0)
        with self._noticing:
            if reason is not None and self.noticed is None:
                self.noticed = RankLostError(reason)
                # whoever asks first says it: the worker may be gone before others do
                _log.critical("rank_lost what=%s", reason)
            return self.noticed

    def tell_losses_to(self, on_loss: Callable[[RankLostError], None]) -> None:
        """Has a loss told to somebody else from now on, and at once if there was one already."""
        with self._telling:
            self._on_loss = on_loss
            told = self._told
        if told is not None:
            on_loss(told)

    def release_first(self, release: Callable[[], None]) -> None:
        """Has something given back before collectives are broken off.

        Recorded steps hold NCCL's communicator, which is not closed while there is one of them.

        Args:
            release: called from any thread, perhaps more than once, also in the middle of a step.
        """
        self._release = release

    def stop(self, reason: str = "") -> None:
        """Ends the followers; those that do not go are killed.

        Args:
            reason: why, if this is no orderly end: other hosts then end as failed.
        """
        self._is_stopping = True
        if self._hosts is not None:
            self._hosts.stop(str(self.noticed) if self.noticed is not None else reason)
        # after a loss the others hang in a collective, and would not go
        if self._local is not None:
            self._local.stop(GOODBYE_S if self.noticed is None else 0.0)
        self._release()
        if self._joined is not None:
            # an orderly end would wait for ranks that are gone
            break_off(self._joined)
        if dist.is_initialized():
            dist.destroy_process_group()
        self._stopped.set()

    def _start(self, config: WorkerConfig, store: Any, build: BuildFollower) -> None:
        """Starts the ranks of this host, and joins all of all hosts."""
        try:
            if self._hosts is not None:
                choose_interface(self._hosts.own_address)
            own = range(1, config.tensor_parallel // config.hosts)
            self._local = LocalRanks(config, own, StorePlace("127.0.0.1", store.port), build)
            deadline = time.monotonic() + START_S
            self._local.await_up(deadline)
            if self._hosts is not None:
                self._hosts.await_up(deadline)
            self._joined = join_ranks(config, store, rank=0)
        except Exception as error:
            reason = self.lost() or f"the ranks could not be joined: {error}"
            raise StartupError(str(reason)) from error

    def _watch(self) -> None:
        wait(self._ends())
        if self._is_stopping:
            return
        # before anything is broken off: what a broken step gives must not be taken
        lost = self.lost()
        assert lost is not None
        with self._telling:
            self._told, on_loss = lost, self._on_loss
        on_loss(lost)
        # it ends the step under way first, then waits until recorded steps are gone
        threading.Thread(
            target=break_off, args=(self.joined,), name="m3stack-break-off", daemon=True
        ).start()
        # a recorded step that hangs is not given back: this must not keep the process from its end
        threading.Thread(target=self._release, name="m3stack-release", daemon=True).start()
        if not self._stopped.wait(OUTLIVE_S):
            _log.critical("rank_lost what=the worker hangs, and is ended")
            os._exit(EXIT_FAILED)

    def _ends(self) -> list[int | Connection]:
        """What becomes ready once a rank or a host is gone."""
        ends: list[int | Connection] = []
        if self._local is not None:
            ends.extend(self._local.sentinels)
        return ends if self._hosts is None else [*ends, self._hosts.ended]

    def _send_object(self, what: object) -> None:
        data = pickle.dumps(what, protocol=pickle.HIGHEST_PROTOCOL)
        assert self._local is not None
        try:
            # those farthest away first
            if self._hosts is not None:
                self._hosts.send(data)
            self._local.send(data)
        except (OSError, LinkLostError) as error:
            raise self.lost() or RankLostError("a rank cannot be reached") from error
