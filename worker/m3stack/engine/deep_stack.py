"""Work that recurses as deep as its input says, on a thread with room for that."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

# address space; what is touched of it is given back with the thread
STACK_BYTES = 512 << 20

Result = TypeVar("Result")


class NoThreadError(Exception):
    """A thread with so much room could not be started."""


_lock = threading.Lock()


def on_deep_stack(work: Callable[[], Result]) -> Result:
    """What `work` returns or raises, done on a thread of its own with a stack of `STACK_BYTES`.

    Raises:
        NoThreadError: such a thread could not be started.
    """
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whoever waits is to have it
            outcome.set_exception(error)

    # the size is the process's: who begins a thread meanwhile gets as much, which is no harm
    with _lock:
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="m3stack-deep", daemon=True)
            thread.start()
        except RuntimeError as error:
            raise NoThreadError(str(error)) from error
        finally:
            threading.stack_size(usual)
    thread.join()
    return outcome.result()
