"""Child processes of this machine, for work that needs no Ray cluster: an ordered map that survives crashes.

Children are spawned, not forked, because the parent has threads.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

SPAWN = multiprocessing.get_context("spawn")
# For multiprocessing's cleanup process, which reports the semaphores of a killed process as leaked.
sys.warnoptions.append("ignore:resource_tracker:UserWarning")
Item = TypeVar("Item")
Result = TypeVar("Result")
_work: Callable[..., Any]  # of this child process
_start_lock = threading.Lock()


def map_in_processes(
    work: Callable[[Item, bool], Result],
    items: Iterable[Item],
    num_processes: int,
    max_in_flight: int,
    on_crash: Callable[[int], None],
) -> Generator[Result, None, None]:
    """Yield `work(item, after_crash)` of each item, in order; `work` is pickled once per process.

    After a process died all are replaced, and items without a result are repeated with after_crash True. `on_crash` is
    called before with the number of crashes, and ends the repetition by raising. Raises what `work` raises.
    """
    unsent, pending, crashes = iter(items), deque[tuple[Item, Future[Result]]](), 0
    pool = ProcessPoolExecutor(num_processes, SPAWN, _init_map, (work,))

    def submit(item: Item) -> tuple[Item, Future[Result]]:
        try:
            with starting_children():
                return item, pool.submit(_call, item, crashes > 0)
        except BrokenProcessPool as error:
            failed: Future[Result] = Future()
            failed.set_exception(error)
            return item, failed

    try:
        while True:
            while len(pending) < max_in_flight and (item := next(unsent, None)) is not None:
                pending.append(submit(item))
            if not pending:
                return
            try:
                result = pending[0][1].result()
            except BrokenProcessPool:
                crashes += 1
                on_crash(crashes)
                pool.shutdown()
                pool = ProcessPoolExecutor(num_processes, SPAWN, _init_map, (work,))
                pending = deque(submit(item) for item, _ in pending)
                continue
            pending.popleft()
            yield result
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def starting_children() -> Iterator[None]:
    """Processes that start in the block ignore Ctrl-C, which the parent handles, from their first instruction.

    They do not run the user's script again, as spawned processes do otherwise; it may start a run without a guard.
    """
    main = sys.modules["__main__"]
    with _start_lock:
        in_main_thread = threading.current_thread() is threading.main_thread()
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main_thread else None
        hidden: dict[str, Any] = {name: vars(main).pop(name) for name in ("__file__", "__spec__") if name in vars(main)}
        vars(main)["__spec__"] = None
        try:
            yield
        finally:
            vars(main).update(hidden)
            if in_main_thread:
                signal.signal(signal.SIGINT, handler)


def describe_signal(number: int) -> str:
    """Return the name of the signal that ended a process, and what sends it if that is not obvious."""
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


def _init_map(work: Callable[..., Any]) -> None:
    global _work
    init_child()
    _work = work


def _call(item: Any, after_crash: bool) -> Any:
    return _work(item, after_crash)
