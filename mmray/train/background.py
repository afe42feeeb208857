"""A call of Ray's that blocks until the end, in a thread beside the one that draws and hears Ctrl-C."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

POLL_S = 0.25
T = TypeVar("T")


def run_in_thread(call: Callable[[], T], look: Callable[[], None]) -> T:
    """What `call` returns or raises, from another thread; this one calls `look` every POLL_S, and once after its end.

    What `look` or a signal raises leaves at once, and the other thread to itself: it ends with the process.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001 - carried over to the thread that waits, which raises it
            done.set_exception(error)

    thread = threading.Thread(target=run, name="mmray-aside", daemon=True)
    thread.start()
    running = True
    while running:
        thread.join(POLL_S)
        running = thread.is_alive()  # before the look: nothing that came to its end in between is missed
        look()
    return done.result()
