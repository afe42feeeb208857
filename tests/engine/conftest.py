"""One thread per process, and results of two and four gloo ranks, started once per session."""

import pytest
import torch
import torch.multiprocessing as mp

from tests.engine import ranks
from tests.forked import preload


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
