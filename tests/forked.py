"""Child processes that are forked from a server which has imported torch and the engine: they start
in milliseconds, where a spawned process imports for seconds.
"""

import os
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, ForkServerProcess
from unittest.mock import patch


class _Process(ForkServerProcess):
    """A process with the environment variables of its parent, not those of the server."""

    def __init__(self, target, args, name=None):
        super().__init__(target=_run, args=(dict(os.environ), target, args), name=name)


class _Context(ForkServerContext):
    Process = _Process


CONTEXT = _Context()


def preload():
    """Let the fork server import what the ranks and workers need when it starts."""
    CONTEXT.set_forkserver_preload(["tests.preloaded"])


def _run(environment, target, args):
    os.environ.clear()
    os.environ.update(environment)
    target(*args)


@contextmanager
def forked_children():
    """Fork the processes of `mmray.processes.ChildProcess` from the server."""
    preload()
    with patch("mmray.processes.SPAWN", CONTEXT):
        yield
