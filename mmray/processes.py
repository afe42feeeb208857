"""Child processes of this machine, for work that needs no Ray cluster: one protocol, and an ordered
map that survives crashes.

Children are spawned, not forked, because the parent has threads.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from mmray.errors import MmrayError

SPAWN = multiprocessing.get_context("spawn")
# For multiprocessing's cleanup process, which reports the semaphores of a killed process as leaked.
sys.warnoptions.append("ignore:resource_tracker:UserWarning")
EXIT_TIMEOUT_S = 10.0  # for a process to exit after it has closed its connection
Item = TypeVar("Item")
Result = TypeVar("Result")
_start_lock = threading.Lock()


class ChildDied(Exception):
    """A child process ended before it had sent its result.

    `exit_code` is negative for a signal, and None if the process closed its connection but did not
    end.
    """

    def __init__(self, name: str, exit_code: int | None) -> None:
        super().__init__(describe_exit(exit_code, name))
        self.exit_code = exit_code


def describe_exit(exit_code: int | None, name: str = "worker") -> str:
    """Return how a process ended; None: it closed its connection and did not end."""
    if exit_code is None:
        return f"the {name} process closed its connection"
    if exit_code >= 0:
        return f"the {name} process exited with code {exit_code}"
    return f"the {name} process was ended by {describe_signal(-exit_code)}"


def describe_signal(number: int) -> str:
    """Return the name of the signal that ended a process, and what sends it if that is not
    obvious.
    """
    memory = " (the kernel sends it when the machine is out of memory)" * (number == signal.SIGKILL)
    return f"{signal.Signals(number).name}{memory}"


class Channel:
    """The end of a child process's connection to its parent; several threads may use it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._lock = threading.Lock()

    def send(self, message: Any) -> None:
        """Send a message to the parent's `on_message`."""
        with self._lock:
            self.connection.send(("message", message))

    def call(self, message: Any) -> Any:
        """Send a message, and return what the parent's `on_message` returned."""
        with self._lock:
            self.connection.send(("call", message))
            return self.connection.recv()

    def send_outcome(self, work: Callable[[], Any]) -> None:
        """Send what `work` returns or raises, which `ChildProcess.result` returns or raises."""
        try:
            outcome = "returned", work()
        except Exception as error:  # noqa: BLE001 - raised again in the parent
            if not isinstance(error, MmrayError):
                error.add_note(traceback.format_exc())
            outcome = "raised", pickled(error)
        with self._lock:
            self.connection.send(outcome)


class ChildProcess:
    """A process that runs `target(channel, *args)`, a module-level function, and sends what it
    returns or raises.

    The process ignores Ctrl-C, which the parent handles, and exits with its parent, also if that is
    killed. Its connection ends with it, so its death is noticed at once.

    Args:
        name: Of the process in messages: "the `name` process was ended by SIGKILL".
        target: What the process runs. `channel` is a Channel to this process.
        args: Pickled for the process.
    """

    def __init__(self, name: str, target: Callable[..., Any], *args: Any) -> None:
        self.name = name
        self.connection, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(
            target=_run_target, args=(theirs, target, args), name=f"mmray-{name}"
        )
        with starting_children():
            self.process.start()
        theirs.close()  # so that the end of the process is read as EOF

    def send(self, message: Any) -> None:
        """Send an object that the process receives from `channel.connection`. Raises ChildDied."""
        try:
            self.connection.send(message)
        except OSError:
            raise self.death() from None

    def result(self, on_message: Callable[[Any], Any] | None = None) -> Any:
        """Wait until the process has sent its result, and return it.

        Args:
            on_message: Called with each message of the process; what it returns is the reply to
                `channel.call`.

        Raises:
            ChildDied: The process ended before.
            Exception: What the process raised. The traceback is a note, except of an MmrayError.
        """
        while True:
            try:
                kind, value = self.connection.recv()
                if kind in ("message", "call"):
                    assert on_message is not None, f"the {self.name} process sends no messages"
                    reply = on_message(value)
                    if kind == "call":
                        self.connection.send(reply)
            except (EOFError, OSError):
                raise self.death() from None
            if kind == "returned":
                return value
            if kind == "raised":
                raise pickle.loads(value)

    def death(self) -> ChildDied:
        """Return how the process ended, after its connection was lost."""
        self.process.join(EXIT_TIMEOUT_S)
        return ChildDied(self.name, self.process.exitcode)

    def close(self) -> None:
        """Close the connection, and wait until the process exits; kill it after EXIT_TIMEOUT_S."""
        self.connection.close()
        self.process.join(EXIT_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def _run_target(connection: Connection, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    channel = Channel(connection)
    with suppress(EOFError, ConnectionError):  # the parent has closed the connection
        channel.send_outcome(lambda: target(channel, *args))


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a child process"
    parent.join()
    os._exit(1)


def pickled(error: Exception) -> bytes:
    """Pickle an error, or its text if its class cannot be pickled."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
        return data
    except Exception:  # noqa: BLE001 - a user's class that cannot be pickled
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", ()):
            plain.add_note(note)
        return pickle.dumps(plain)


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


class _Pool:
    """Child processes that run `work`, each called by one thread at a time.

    Each has a pipe of its own. In the pipe that the processes of a ProcessPoolExecutor share, the
    rest of a result is waited for forever if its sender is killed.
    """

    def __init__(self, work: Callable[..., Any], count: int) -> None:
        self._threads = ThreadPoolExecutor(count, "mmray-map")
        self._children = [ChildProcess("data", _serve, work) for _ in range(count)]
        self._idle = SimpleQueue[ChildProcess]()
        for child in self._children:
            self._idle.put(child)

    def submit(self, item: Any, after_crash: bool) -> Future[Any]:
        return self._threads.submit(self._call, item, after_crash)

    def _call(self, item: Any, after_crash: bool) -> Any:
        child = self._idle.get()
        try:
            child.send((item, after_crash))
            return child.result()
        finally:
            self._idle.put(child)

    def kill(self) -> None:
        """End the processes at once; running calls raise ChildDied."""
        for child in self._children:
            child.process.kill()

    def close(self) -> None:
        """Wait until running calls return, and end the processes."""
        self._threads.shutdown(cancel_futures=True)
        for child in self._children:
            child.connection.close()
        for child in self._children:
            child.close()


def _serve(channel: Channel, work: Callable[..., Any]) -> None:
    """Send the result or the error of each item, until the parent closes the pipe."""
    while True:
        item, after_crash = channel.connection.recv()
        channel.send_outcome(lambda: work(item, after_crash))  # noqa: B023 - called at once


class ProcessMap(Generic[Item, Result]):
    """Iterates `work(item, after_crash)` of each item, in order, computed by child processes.

    The processes start at once, and work on up to `max_in_flight` items ahead of the results that
    were requested. After a process died all are replaced, and items without a result are repeated
    with after_crash True. Iterating raises what `work` raises.

    Args:
        work: Pickled once per process.
        on_crash: Called with the number of crashes before items are repeated; raises to end the
            repetition.
    """

    def __init__(
        self,
        work: Callable[[Item, bool], Result],
        items: Iterable[Item],
        num_processes: int,
        max_in_flight: int,
        on_crash: Callable[[int], None],
    ) -> None:
        self._work = work
        self._num_processes = num_processes
        self._max_in_flight = max_in_flight
        self._on_crash = on_crash
        self._unsent = iter(items)
        self._pending = deque[tuple[Item, Future[Result]]]()
        self._crashes = 0
        self._interrupted = False
        self._pool = _Pool(work, num_processes)
        self._submit()

    def __iter__(self) -> ProcessMap[Item, Result]:
        return self

    def __next__(self) -> Result:
        while True:
            self._submit()
            if self._interrupted or not self._pending:
                raise StopIteration
            try:
                result = self._pending[0][1].result()
            except ChildDied:
                if not self._interrupted:
                    self._replace_processes()
                continue
            self._pending.popleft()
            return result

    def _submit(self) -> None:
        while len(self._pending) < self._max_in_flight and not self._interrupted:
            item = next(self._unsent, None)
            if item is None:
                return
            self._pending.append((item, self._pool.submit(item, self._crashes > 0)))

    def _replace_processes(self) -> None:
        self._crashes += 1
        self._on_crash(self._crashes)
        self._pool.close()
        self._pool = _Pool(self._work, self._num_processes)
        items = [item for item, _ in self._pending]
        self._pending.clear()
        if not self._interrupted:  # otherwise `interrupt` may have killed the processes before
            self._pending.extend((item, self._pool.submit(item, True)) for item in items)

    def interrupt(self) -> None:
        """Kill the processes and end the iteration, also in a thread that waits for the next
        result.
        """
        self._interrupted = True
        self._pool.kill()

    def close(self) -> None:
        """Wait until running work returns, and end the processes; no thread may be iterating."""
        self._pool.close()
