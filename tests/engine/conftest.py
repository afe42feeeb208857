"""One thread per process, and results of two and four gloo ranks, started once per session."""

import pytest
import torch
import torch.multiprocessing as mp
from torch.multiprocessing import get_context

from tests.engine import ranks

# Imports of all ranks, and lazy imports of torch and transformers, which take many seconds.
PRELOADED = (
    "tests.engine.ranks",
    "tests.engine.checkpoint.shard_ranks",
    "torch._dynamo",
    "torch._inductor.fx_passes.post_grad",
    "functorch.compile",
    "torch.distributed.fsdp",
    "transformers.models.clip.modeling_clip",
)


def preload():
    """Let the fork server import all this when it starts."""
    get_context("forkserver").set_forkserver_preload(list(PRELOADED))


def spawn_ranks(run, folder, world, *args, others=0):
    """Call `run` in `world` processes and load the result of each rank; `others` leave no results.

    Processes are forked from one server that imports everything once.
    """
    preload()
    mp.start_processes(
        run, args=(str(folder), *args), nprocs=world + others, start_method="forkserver"
    )
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(world)]


@pytest.fixture(autouse=True)
def one_thread_like_the_ranks(one_thread):
    pass


@pytest.fixture(scope="session")
def two(tmp_path_factory):
    """Results of all scenarios of two ranks, by rank."""
    return spawn_ranks(ranks.main_two, tmp_path_factory.mktemp("two-ranks"), 2)


@pytest.fixture(scope="session")
def four(tmp_path_factory):
    """Results of all scenarios of four ranks, and of the pairs whose group breaks, by rank."""
    return spawn_ranks(ranks.main_four, tmp_path_factory.mktemp("four-ranks"), 4)
