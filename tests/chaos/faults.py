"""What is done to the fleet, one thing at a time, and how it is undone."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.chaos.fleet import Fleet, Node

Act = Callable[[Fleet], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        begin: what goes wrong; may take as long as it takes.
        hold_s: how long it stays so.
        heal: what mends it.
    """

    name: str
    begin: Act
    hold_s: float
    heal: Act


def _nothing(_: Fleet) -> None:
    """There is nothing to mend."""


def _kill(pick: Callable[[Fleet], Node]) -> Act:
    def act(made: Fleet) -> None:
        node = pick(made)
        assert node.process is not None
        node.process.kill()
        node.process.wait()

    return act


def _start(pick: Callable[[Fleet], Node]) -> Act:
    def act(made: Fleet) -> None:
        pick(made).start()
        made.wait_all_ready()

    return act


def _signal(pick: Callable[[Fleet], Node], number: signal.Signals) -> Act:
    return lambda made: pick(made).signal(number)


def _restart(pick: Callable[[Fleet], Node]) -> Act:
    """It is drained and begun again, as a rolling update does with one after the other."""

    def act(made: Fleet) -> None:
        node = pick(made)
        code = node.end()
        if code != 0:
            print(f"{node.name} ended with {code} after SIGTERM", flush=True)
        node.start()
        made.wait_all_ready()

    return act


def _step_all(seconds: int) -> Act:
    def act(made: Fleet) -> None:
        for node in made.nodes:
            node.step_clock(seconds)

    return act


def _jump_about(made: Fleet) -> None:
    _step_all(3600)(made)
    # long enough for leases and timers to be set by the wrong clock before it goes back
    time.sleep(3)
    _step_all(-7200)(made)


def _fill(made: Fleet) -> None:
    for node in made.nodes:
        node.fill_disk()


def _free(made: Fleet) -> None:
    for node in made.nodes:
        node.free_disk()


def _first_worker(made: Fleet) -> Node:
    return made.workers[0]


def _second_worker(made: Fleet) -> Node:
    return made.workers[1]


def _last_worker(made: Fleet) -> Node:
    return made.workers[-1]


def _last_gateway(made: Fleet) -> Node:
    return made.gateways[-1]


FAULTS = (
    Fault("worker killed", _kill(_second_worker), 6, _start(_second_worker)),
    Fault(
        "worker hangs",
        _signal(_first_worker, signal.SIGSTOP),
        15,
        _signal(_first_worker, signal.SIGCONT),
    ),
    Fault(
        "worker cut off",
        lambda made: made.network.cut(_last_worker(made).host),
        15,
        lambda made: made.network.mend(_last_worker(made).host),
    ),
    Fault(
        "slow link to a worker",
        lambda made: made.network.slow(_first_worker(made).host),
        15,
        lambda made: made.network.quicken(_first_worker(made).host),
    ),
    Fault("gateway killed", _kill(_last_gateway), 4, _start(_last_gateway)),
    Fault("disks full", _fill, 10, _free),
    Fault("clocks jump", _jump_about, 5, _step_all(0)),
    *(
        Fault("rolling restart", _restart(pick), 0, _nothing)
        for pick in (_second_worker, _last_worker, _last_gateway)
    ),
)
