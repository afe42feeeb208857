"""Child processes of this machine, for work that needs no Ray cluster: an ordered map that survives
crashes.

Children are spawned, not forked, because the parent has threads.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, TypeVar

SPAWN = multiprocessing.get_context("spawn")
# For multiprocessing's cleanup process, which reports the semaphores of a killed process as leaked.
sys.warnoptions.append("ignore:resource_tracker:UserWarning")
Item = TypeVar("Item")
Result = TypeVar("Result")
POLL_INTERVAL_S = 0.2
_start_lock = threading.Lock()


class _ProcessDied(Exception):
    """A child process died before it had sent its result."""


class _Processes:
    """Child processes that run `work`, each called by one thread at a time.

    Each has a pipe of its own, which ends with it. In the pipe that the processes of a
    ProcessPoolExecutor share, the rest of a result is waited for forever if its sender is killed.
    """

    def __init__(self, work: Callable[..., Any], count: int) -> None:
        self._threads = ThreadPoolExecutor(count, "mmray-map")
        self._idle, self._children = SimpleQueue[Connection](), []
        with starting_children():
            for _ in range(count):
                connection, theirs = SPAWN.Pipe()
                child = SPAWN.Process(target=_serve, args=(theirs, work))
                child.start()
                theirs.close()
                self._children.append((child, connection))
                self._idle.put(connection)

    def submit(self, item: Any, after_crash: bool) -> Future[Any]:
        return self._threads.submit(self._call, item, after_crash)

    def _call(self, item: Any, after_crash: bool) -> Any:
        connection = self._idle.get()
        try:
            connection.send((item, after_crash))
            error, result = connection.recv()
        except (EOFError, OSError) as lost:
            raise _ProcessDied from lost
        finally:
            self._idle.put(connection)
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Wait until running calls return, and end the processes."""
        self._threads.shutdown(cancel_futures=True)
        for child, connection in self._children:
            connection.close()
            child.join()


def map_in_processes(
    work: Callable[[Item, bool], Result],
    items: Iterable[Item],
    num_processes: int,
    max_in_flight: int,
    on_crash: Callable[[int], None],
    interrupted: threading.Event | None = None,
) -> Generator[Result, None, None]:
    """Yield `work(item, after_crash)` of each item, in order; `work` is pickled once per process.

    After a process died all are replaced, and items without a result are repeated with after_crash
    True. `on_crash` is called before with the number of crashes, and ends the repetition by
    raising. `interrupted` ends the results within POLL_INTERVAL_S, also while one is awaited.
    Raises what `work` raises.
    """
    unsent, pending, crashes = iter(items), deque[tuple[Item, Future[Result]]](), 0
    processes = _Processes(work, num_processes)
    try:
        while True:
            while len(pending) < max_in_flight and (item := next(unsent, None)) is not None:
                pending.append((item, processes.submit(item, crashes > 0)))
            if not pending:
                return
            try:
                result = pending[0][1].result(None if interrupted is None else POLL_INTERVAL_S)
            except TimeoutError:
                if interrupted is not None and interrupted.is_set():
                    return
                continue
            except _ProcessDied:
                crashes += 1
                on_crash(crashes)
                processes.close()
                processes = _Processes(work, num_processes)
                pending = deque((item, processes.submit(item, True)) for item, _ in pending)
                continue
            pending.popleft()
            yield result
    finally:
        processes.close()


@contextmanager
def starting_children() -> Iterator[None]:
    """Processes that start in the block ignore Ctrl-C, which the parent handles, from their first
    instruction.

    They do not run the user's script again, as spawned processes do otherwise; it may start a run
    without a guard.
    """
    main = sys.modules["__main__"]
    with _start_lock:
        in_main_thread = threading.current_thread() is threading.main_thread()
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main_thread else None
        hidden: dict[str, Any] = {
            name: vars(main).pop(name) for name in ("__file__", "__spec__") if name in vars(main)
        }
        vars(main)["__spec__"] = None
        try:
            yield
        finally:
            vars(main).update(hidden)
            if in_main_thread:
                signal.signal(signal.SIGINT, handler)


def describe_signal(number: int) -> str:
    """Return the name of the signal that ended a process, and what sends it if that is not
    obvious.
    """
    memory = " (the kernel sends it when the machine is out of memory)" * (number == signal.SIGKILL)
    return f"{signal.Signals(number).name}{memory}"


def init_child() -> None:
    """Ignore Ctrl-C, and exit with the parent, also if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a child process"
    parent.join()
    os._exit(1)


def _serve(connection: Connection, work: Callable[..., Any]) -> None:
    """Send the result or the error of each item, until the parent closes the pipe or dies."""
    init_child()
    with suppress(EOFError, ConnectionError):
        while True:
            item, after_crash = connection.recv()
            try:
                connection.send((None, work(item, after_crash)))
            except Exception as error:  # noqa: BLE001 - raised again in the parent
                error.add_note(traceback.format_exc())
                connection.send((error, None))
