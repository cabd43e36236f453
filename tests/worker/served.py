"""Runs a whole worker, as `m3stack worker` does, around a scenario in another thread."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from m3stack.client import WorkerClient
from m3stack.config import WorkerConfig, resolve
from m3stack.serve import Listening, run_worker
from m3stack.types import Event, Request, Tokens, WorkerState
from tests.parity import golden

# a bound on hangs, not on speed
TIMEOUT_S = 100


class Served:
    """A worker that listens, seen from a client.

    Attributes:
        ports: where it listens.
        client: connected to it.
        is_asked_to_stop: whether it was told to end already.
    """

    def __init__(self, ports: Listening) -> None:
        self.ports = ports
        self.target = f"127.0.0.1:{ports.port}"
        self.client = WorkerClient(self.target)
        self.is_asked_to_stop = False

    def wait_until(self, state: WorkerState) -> None:
        for update in self.client.watch():
            if update.state is state:
                return
        # a worker that corrects its identity ends the watch once
        self.wait_until(state)

    def events(self, request: Request) -> list[Event]:
        return list(self.client.generate(request))

    def tokens(self, request: Request) -> list[int]:
        return [t for e in self.events(request) if isinstance(e, Tokens) for t in e.token_ids]

    def stop(self) -> None:
        """What a process manager does."""
        self.is_asked_to_stop = True
        # a worker's loop leaves the default behind when it closes: to end this very process
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            os.kill(os.getpid(), signal.SIGTERM)


def config(path: Path = golden.DIRECTORY, **flags: object) -> WorkerConfig:
    """A CPU worker on free ports with a small pool, changed by name."""
    defaults: dict[str, object] = {
        "model_path": str(path),
        "listen": "127.0.0.1:0",
        "device": "cpu",
        "num_pages": 64,
        "max_sequences": 16,
        "max_batch_tokens": 256,
        "cpu_threads": 1,
        "drain_s": 20,
        "log_level": "error",
    }
    return resolve(flags=defaults | flags, environ={})


def serve_around(settings: WorkerConfig, scenario: Callable[[Served], None]) -> int:
    """Serves on this, the main thread while `scenario` runs; returns the exit code.

    The scenario must end the worker, or may leave that to this function by returning.
    """
    done: Future[None] = Future()
    threads: list[threading.Thread] = []

    def follow(ports: Listening) -> None:
        def act() -> None:
            served = Served(ports)
            try:
                scenario(served)
                done.set_result(None)
            except BaseException as error:  # noqa: BLE001 - raised again on the main thread
                done.set_exception(error)
            finally:
                served.client.close()
                if not served.is_asked_to_stop:
                    served.stop()

        threads.append(threading.Thread(target=act, name="scenario", daemon=True))
        threads[0].start()

    # a signal that comes after the loop has ended must not end the test run
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        code = run_worker(settings, on_listening=follow)
        done.result(TIMEOUT_S)
    finally:
        # its last signal is for this worker, not for the next one
        for thread in threads:
            thread.join(TIMEOUT_S)
        signal.signal(signal.SIGTERM, before)
    return code
