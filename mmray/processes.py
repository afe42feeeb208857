"""Child processes of this machine, for work that needs no Ray cluster: one protocol, and a pool for
ordered maps (ordered_map.py).

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
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from mmray.errors import MmrayError

SPAWN = multiprocessing.get_context("spawn")
# For multiprocessing's cleanup process, which reports the semaphores of a killed process as leaked.
sys.warnoptions.append("ignore:resource_tracker:UserWarning")
EXIT_TIMEOUT_S = 10.0  # time for a process to exit after it has closed its connection
Item = TypeVar("Item")
Result = TypeVar("Result")
_start_lock = threading.Lock()


class ChildDied(Exception):
    """A child process ended before it had sent its result.

    Args:
        name: Name of the process in the message, such as `worker`.
        exit_code: Exit code of `multiprocessing.Process`, also an attribute. Negative for a signal;
            None: the process closed its connection but did not end.
    """

    def __init__(self, name: str, exit_code: int | None) -> None:
        super().__init__(describe_exit(exit_code, name))
        self.exit_code = exit_code


def describe_exit(exit_code: int | None, name: str = "worker") -> str:
    """Return how a process ended; None: it closed its connection, but did not end."""
    if exit_code is None:
        return f"the {name} process closed its connection"
    if exit_code >= 0:
        return f"the {name} process exited with code {exit_code}"
    return f"the {name} process was ended by {describe_signal(-exit_code)}"


def describe_signal(number: int) -> str:
    """Return the name of a signal, such as `SIGTERM`; of SIGKILL also what sends it."""
    memory = " (the kernel sends it when the machine is out of memory)" * (number == signal.SIGKILL)
    return f"{signal.Signals(number).name}{memory}"


class Channel:
    """A child process's connection to its parent; several threads may use it.

    ChildProcess passes one to its `target`, and reads the messages in `ChildProcess.result`.

    `send(message)` sends one without a reply, `call(message)` returns the parent's reply, and
    `send_outcome(work)` sends what `work()` returns or raises.

    Args:
        connection: The child's end of a pipe.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._lock = threading.Lock()

    def send(self, message: object) -> None:
        """Send a message to the function `on_message` that the parent has passed to `result`,
        without waiting for a reply.
        """
        with self._lock:
            self.connection.send(("message", message))

    def call(self, message: object) -> Any:
        """Send a message to the function `on_message` that the parent has passed to `result`, and
        wait for its reply.
        """
        with self._lock:
            self.connection.send(("call", message))
            return self.connection.recv()

    def send_outcome(self, work: Callable[[], Any]) -> None:
        """Call a function, and send its result or its exception to the parent.

        `ChildProcess.result` of the parent returns the result or raises the exception. An exception
        that is no MmrayError gets its traceback as a note.

        Args:
            work: Called without arguments. Its result must be picklable.
        """
        try:
            outcome = "returned", work()
        except Exception as error:  # noqa: BLE001 - raised again in the parent
            if not isinstance(error, MmrayError):
                error.add_note(traceback.format_exc())
            outcome = "raised", pickled(error)
        with self._lock:
            self.connection.send(outcome)


class ChildProcess:
    """A process that runs `target(channel, *args)`, and sends what it returns or raises.

    The process ignores Ctrl-C, which the parent handles, and exits with its parent, also if that is
    killed. Its connection ends with it, so its death is noticed at once.

    `result(on_message)` waits for the end, and returns or raises the same.

    Args:
        name: Name of the process in messages, such as `worker`.
        target: Module-level function that the process calls as `target(channel, *args)`, where the
            channel is its Channel to the parent.
        args: Further arguments of `target`, which are pickled.
    """

    def __init__(self, name: str, target: Callable[..., Any], *args: object) -> None:
        ours, theirs = SPAWN.Pipe()
        self.name = name
        self.connection = ours
        self.process = SPAWN.Process(
            target=_run_target, args=(theirs, target, args), name=f"mmray-{name}"
        )
        with starting_children():
            self.process.start()
        theirs.close()  # so that the end of the process is read as EOF

    def send(self, message: object) -> None:
        """Send an object to the process, which receives it with `connection.recv()` of its Channel.

        Raises:
            ChildDied: The process has ended.
        """
        try:
            self.connection.send(message)
        except OSError:
            raise self.death() from None

    def result(self, on_message: Callable[[Any], Any] | None = None) -> Any:
        """Wait until the process has sent its result, and return it.

        Args:
            on_message: Called with each message that the process sends with `channel.send` or
                `channel.call`. What it returns is the reply to `channel.call`. None: the process
                sends no messages.

        Returns:
            What a child's `target` returned, or the result of the work that was passed to
            `channel.send_outcome`.

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
        """Return the error after the connection to the process was lost."""
        self.process.join(EXIT_TIMEOUT_S)
        return ChildDied(self.name, self.process.exitcode)

    def close(self) -> None:
        """Close the connection, wait until the child exits, and kill it after EXIT_TIMEOUT_S (10
        s).
        """
        self.connection.close()
        self.process.join(EXIT_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """Kill the child with SIGKILL, and wait until it has ended."""
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
    """Return the bytes of an error, pickled.

    Args:
        error: The error. If its class cannot be pickled, a RuntimeError with its type, message and
            notes is pickled instead.
    """
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
        return data
    except Exception:  # noqa: BLE001 - a user's class that cannot be pickled
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        for note in vars(error).get("__notes__", ()):
            plain.add_note(note)
        return pickle.dumps(plain)


@contextmanager
def starting_children() -> Iterator[None]:
    """Context manager in whose block child processes can be started safely.

    The children ignore Ctrl-C from their first instruction, because the parent handles it. They do
    not import the user's script again, as spawned processes do otherwise: the script may start a
    run without a guard `if __name__ == "__main__"`. Threads enter the block one at a time.
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


class _Child(Generic[Item, Result]):
    """A process of a ChildPool, and the thread that calls it.

    The thread receives a result while the caller of the map does something else, so the process can
    start its next item.
    """

    node = "here"

    def __init__(self, work: Callable[[Item, bool], Result]) -> None:
        self.process = ChildProcess("data", _serve, work)
        self._thread = ThreadPoolExecutor(1, "mmray-map")

    def submit(self, item: Item, careful: bool) -> Future[Result]:
        return self._thread.submit(self._call, item, careful)

    def _call(self, item: Item, careful: bool) -> Result:
        self.process.send((item, careful))
        result: Result = self.process.result()
        return result

    def finish(self, cancel: bool = True) -> None:
        """Wait until a running call returns; the process then starts to exit."""
        self._thread.shutdown(cancel_futures=cancel)
        self.process.connection.close()


def _serve(channel: Channel, work: Callable[..., Any]) -> None:
    """Send the result or the error of each item, until the parent closes the pipe."""
    while True:
        item, careful = channel.connection.recv()
        channel.send_outcome(lambda: work(item, careful))  # noqa: B023 - called at once


class ChildPool(Generic[Item, Result]):
    """Child processes that run `work(item, careful)` for an OrderedMap, which iterates the results
    in order.

    They start at once. Each has a pipe of its own: in the pipe that the processes of a
    ProcessPoolExecutor share, the rest of a result is waited for forever if its sender is killed.

    Args:
        work: Called as `work(item, careful)` in a child process, to which it is pickled once.
            `careful` is True if the item may have killed a process before.
        num_processes: Number of processes.
        max_in_flight: Largest number of items that are submitted and whose results the caller has
            not taken yet.
        on_crash: Called with the number of processes that died so far before one is replaced;
            raises to end the map.

    Attributes:
        workers: The processes; `submit(item, careful)` of each returns a future of the result.
        max_in_flight: As given.
    """

    def __init__(
        self,
        work: Callable[[Item, bool], Result],
        num_processes: int,
        max_in_flight: int,
        on_crash: Callable[[int], None],
    ) -> None:
        self.max_in_flight = max_in_flight
        self._work = work
        self._on_crash = on_crash
        self._crashes = 0
        self.workers = [_Child(work) for _ in range(num_processes)]

    def node_limit(self, node: str) -> int:
        """Return the largest number of items that may be submitted and whose results were not taken
        yet.

        Args:
            node: Unused, because all processes are on this machine.
        """
        return self.max_in_flight

    def is_lost_worker(self, error: BaseException) -> bool:
        """Return whether an error means that a process died, not that the pool's function raised
        it.
        """
        return isinstance(error, ChildDied)

    def replace(self, worker: Any) -> None:
        """Start a new process in place of one that died. Raises what the pool's `on_crash`, which
        is called first, raises.

        Args:
            worker: The process that died, a member of the pool's `workers`.
        """
        self._crashes += 1
        self._on_crash(self._crashes)
        # It may have closed its connection and not ended. Its queued calls fail then.
        worker.process.kill()
        worker.finish(cancel=False)
        self.workers[self.workers.index(worker)] = _Child(self._work)

    def compute_here(self, item: Item) -> Result:
        """Compute an item in this process: call `work(item, True)`, so that it protects the
        process.
        """
        return self._work(item, True)

    def update(self, waited_s: float) -> None:
        """Do nothing, because the number of processes is fixed.

        Args:
            waited_s: Unused.
        """

    def kill(self) -> None:
        """Kill the processes with SIGKILL; running calls raise ChildDied."""
        for worker in self.workers:
            worker.process.process.kill()

    def close(self) -> None:
        """Wait until running calls return, and end the processes."""
        for worker in self.workers:
            worker.finish()
        for worker in self.workers:
            worker.process.close()
