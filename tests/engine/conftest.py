"""Results of two and four gloo ranks, started once per session."""

import json

import pytest
import torch
import torch.multiprocessing as mp
from torch.multiprocessing import get_context

from tests.engine import four_ranks, two_ranks

# Imports of all ranks, and lazy imports of torch and transformers, which take many seconds.
IMPORTED_ONCE = (
    "tests.engine.four_ranks",
    "tests.engine.checkpoint.shard_ranks",
    "torch._dynamo",
    "torch._inductor.fx_passes.post_grad",
    "functorch.compile",
    "torch.distributed.fsdp",
    "transformers.models.clip.modeling_clip",
)


def spawned(play, folder, world, *given, apart=0):
    """Run `play` in `world` processes and load the result of each rank.

    Processes are forked from one server that imports everything once. `apart`: further ranks in a separate group,
    which leave no results.
    """
    get_context("forkserver").set_forkserver_preload(list(IMPORTED_ONCE))
    mp.start_processes(play, args=(str(folder), *given), nprocs=world + apart, start_method="forkserver")
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(world)]


@pytest.fixture(scope="session")
def played(tmp_path_factory):
    """Results of all scenarios, by rank, and the lines that rank 0 logged in the first scenario of the loop."""
    folder = tmp_path_factory.mktemp("two-ranks")
    results = spawned(two_ranks.play, folder, two_ranks.WORLD)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return results, [json.loads(line) for line in lines]


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """Results of four ranks, and of the pairs whose group breaks."""
    return spawned(four_ranks.play, tmp_path_factory.mktemp("four-ranks"), 2 * four_ranks.PAIRS)


@pytest.fixture(scope="session")
def four(pairs):
    """Results of all scenarios of four ranks, by rank."""
    return pairs[: four_ranks.WORLD]
