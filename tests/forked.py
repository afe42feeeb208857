"""Child processes that are forked from a server which has imported torch and the engine: they start
in milliseconds, where a spawned process imports for seconds.
"""

import faulthandler
import logging
import os
import select
import stat
import sys
import threading
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from unittest.mock import patch

from mmray import processes

SPAWN_PROCESS = util.spawnv_passfds


class _Process(ForkServerProcess):
    """A process with the environment variables of its parent, not those of the server."""

    def __init__(self, target, args, name=None):
        super().__init__(target=_run, args=(dict(os.environ), target, args), name=name)


class _Context(ForkServerContext):
    Process = _Process


CONTEXT = _Context()
# Variable with the address of the server, from which forked processes fork their children too.
SERVER = "MMRAY_TEST_FORK_SERVER"


def preload():
    """Let the fork server import what the ranks and workers need when it starts."""
    CONTEXT.set_forkserver_preload(["tests.preloaded"])


@cache
def start_server():
    """Fork the server from this process, if it has imported torch to collect tests.

    The first test calls it: the output of the server is captured, and torch has no threads yet,
    which a fork would not copy. The server waits for its first request before it imports the rest.
    """
    if "torch" not in sys.modules:
        return
    preload()
    resource_tracker.ensure_running()
    with patch("multiprocessing.util.spawnv_passfds", _fork_server):
        forkserver.ensure_running()


def _fork_server(_executable, words, files):
    """Fork a process for the code of a server, instead of spawning Python with these words."""
    pid = os.fork()
    if pid:
        return pid
    try:
        _forget_session(files)
        requests, alive, *_ = files  # the second can be read when the parent has ended
        if requests in select.select([requests, alive], [], [])[0]:
            exec(words[-1], {})
    except Exception:  # noqa: BLE001 - the session must not continue in this process
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


def _forget_session(kept_files):
    """Give the process the files, output and hooks of one that Python has started.

    The pipes and sockets of the parent would otherwise stay open after its end.
    """
    with Path(os.devnull).open("rb") as devnull:
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 (names only)
            file = int(name)
            with suppress(OSError):  # the file of this list
                mode = os.fstat(file).st_mode
                if file > 2 and file not in kept_files and not stat.S_ISREG(mode):
                    os.dup2(devnull.fileno(), file)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
    logging.root.handlers.clear()
    faulthandler.disable()
    forkserver._forkserver._lock = threading.Lock()  # the parent holds it
    util.spawnv_passfds = SPAWN_PROCESS


def _run(environment, target, args):
    os.environ.clear()
    os.environ.update(environment)
    use_server()
    target(*args)


def use_server():
    """Fork the children of this process from the server that its environment names, if any."""
    if SERVER in os.environ:
        server = forkserver._forkserver
        server.ensure_running = lambda: None
        server._forkserver_address = os.environ[SERVER]
        if server._forkserver_alive_fd is None:  # a worker of Ray, not forked from the server
            server._forkserver_alive_fd = os.pipe()[1]
        processes.SPAWN = CONTEXT


@contextmanager
def forked_children():
    """Fork the processes of `mmray.processes.ChildProcess` from the server."""
    preload()
    with patch("mmray.processes.SPAWN", CONTEXT):
        yield


@contextmanager
def forked_grandchildren():
    """Let forked children fork theirs, such as the data processes of a worker, and workers of a Ray
    that is started in the block.
    """
    forkserver.ensure_running()
    with patch.dict(os.environ, {SERVER: forkserver._forkserver._forkserver_address}):
        yield
