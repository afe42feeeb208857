"""Child processes that are forked from a server which has imported torch and the engine: they start
in milliseconds, where a spawned process imports for seconds.
"""

import os
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, ForkServerProcess
from unittest.mock import patch

# Imports of the ranks and workers, and lazy imports of torch and transformers, which take many
# seconds.
PRELOADED = (
    "tests.engine.ranks",
    "tests.engine.checkpoint.shard_ranks",
    "tests.training.faults",
    "mmray.bench.strategies",
    "mmray.training.local_worker",
    "mmray.engine.worker",
    "torch._dynamo",
    "torch._inductor.fx_passes.post_grad",
    "functorch.compile",
    "torch.distributed.fsdp",
    "transformers.models.clip.modeling_clip",
)


class _Process(ForkServerProcess):
    """A process with the environment variables of its parent, not those of the server."""

    def __init__(self, target, args, name=None):
        super().__init__(target=_run, args=(dict(os.environ), target, args), name=name)


class _Context(ForkServerContext):
    Process = _Process


CONTEXT = _Context()


def preload():
    """Let the fork server import all this when it starts."""
    CONTEXT.set_forkserver_preload(list(PRELOADED))


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
