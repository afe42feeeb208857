"""Runs that torchrun starts on one machine: `torchrun --nproc-per-node 2 -m mmray train`.

The process of rank 0 is the driver, with one worker as its child process, as in a run of one worker
(local.py). The process of each other rank starts a worker too, which connects to the driver and
then serves it as the driver's own worker does. So restarts, hang detection, stops and files are
those of every run.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from typing import Any

import psutil

from mmray.config import Config
from mmray.errors import UsageError
from mmray.machine import LOOPBACK, torchrun_world_size
from mmray.processes import EXIT_TIMEOUT_S, ChildDied, ChildProcess, ConnectedProcess
from mmray.training.local_worker import DriverAddress, serve_driver
from mmray.training.monitor import signal_handlers


def with_workers_of_torchrun(config: Config, log: Callable[[str, str], None]) -> Config:
    """Return the settings of a run with one worker in each process that torchrun started.

    Args:
        config: Settings of the run. What they request from Ray has no effect.
        log: Called with a line and the word to print before it.

    Raises:
        UsageError: torchrun started processes on several machines.
    """
    workers = torchrun_world_size()
    on_this_machine = int(os.environ["LOCAL_WORLD_SIZE"])
    if on_this_machine < workers:
        raise UsageError(
            f"torchrun started {on_this_machine} of {workers} processes on this machine, but mmray "
            "trains on several machines with Ray only. Start Ray on them and one command, `mmray "
            f"train ... --cluster.address HEAD:6379 --cluster.workers {workers}`"
        )
    log(
        f"{workers} workers, one in each process; cluster.workers and what else `cluster` requests "
        "from Ray have no effect",
        "torchrun",
    )
    return config.with_cluster(
        workers=workers, address=None, resources_per_worker={}, wait_for_nodes=False
    )


class RankProcess(ConnectedProcess):
    """The worker process of a rank other than 0, as the driver sees it.

    Args:
        rank: The rank.
        pid: Its process ID.
        connection: Connection to it.
    """

    def __init__(self, rank: int, pid: int, connection: Connection) -> None:
        super().__init__(f"rank {rank}", connection)
        self.process = psutil.Process(pid)

    def close(self) -> None:
        """Close the connection, with which the process ends."""
        self.connection.close()

    def kill(self) -> None:
        """Kill the process with SIGKILL, and wait until it has ended."""
        with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            self.process.kill()
            self.process.wait(EXIT_TIMEOUT_S)


class RankListener:
    """Accepts the connections of the workers of ranks 1 to N - 1 to the driver.

    Args:
        world_size: Number of ranks N.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        key = secrets.token_bytes(32)
        self._listener = Listener((LOOPBACK, 0), backlog=world_size, authkey=key)
        host, port = self._listener.address
        self.address: DriverAddress = (str(host), int(port), key.hex())
        self._connected: dict[int, RankProcess] = {}
        self._changed = threading.Condition()
        self._closed = False
        threading.Thread(target=self._accept, name="mmray-ranks", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
                rank, pid = connection.recv()
                process = RankProcess(rank, pid, connection)
            except (AuthenticationError, EOFError, OSError, psutil.NoSuchProcess):
                continue  # no worker, or one that has ended
            with self._changed:
                if self._closed:
                    process.close()
                    continue
                self._connected[rank] = process  # in place of one that has ended
                self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the workers of all ranks have connected.

        Args:
            timeout_s: Longest wait in seconds.

        Returns:
            Whether they have.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: len(self._connected) == self._world_size - 1, timeout_s
            )

    def take(self) -> list[RankProcess]:
        """Return the connected workers in the order of their ranks, for one attempt."""
        with self._changed:
            connected = sorted(self._connected.items())
            self._connected = {}
        return [process for _, process in connected]

    def close(self) -> None:
        """Close the connections of workers that no attempt has taken, also of those that connect
        later; they end.
        """
        with self._changed:
            self._closed = True
            for process in self._connected.values():
                process.close()


def follow_driver() -> None:
    """Run the worker of this rank, which is not 0, until the driver in rank 0's process has ended.

    A worker that was killed, as by the driver after a failure, is replaced.

    Raises:
        KeyboardInterrupt: SIGINT or SIGTERM arrived before the worker was connected to the driver.
            Later the driver handles the signal: it lets the workers end with a checkpoint.
    """
    connected = threading.Event()
    signalled = threading.Event()

    def on_signal(*_: Any) -> None:
        if not connected.is_set():
            raise KeyboardInterrupt
        signalled.set()

    with signal_handlers(on_signal):
        while not signalled.is_set():
            connected.clear()
            child = ChildProcess("worker", serve_driver)
            try:
                child.result(lambda _: connected.set())
                child.close()
                return
            except ChildDied:
                continue
            finally:
                child.kill()  # otherwise Python waits at exit for a child that is not connected
