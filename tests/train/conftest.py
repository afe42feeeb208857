"""Two gloo ranks, and four, started once for all tests that ask what they came to."""

import json

import pytest
import torch
import torch.multiprocessing as mp
from torch.multiprocessing import get_context

from tests.train import four_ranks, two_ranks

# What the ranks of all scenes import, and what torch and transformers import when they are first used: many seconds.
IMPORTED_ONCE = (
    "tests.train.four_ranks",
    "tests.engine.checkpoint.shard_ranks",
    "torch._dynamo",
    "torch._inductor.fx_passes.post_grad",
    "functorch.compile",
    "torch.distributed.fsdp",
    "transformers.models.clip.modeling_clip",
)


def spawned(play, folder, world, *given, apart=0):
    """What each of `world` ranks that `play` was called in has left; forks of one process that has imported everything.

    There is one such process for all that pytest starts, and it imports what the first asks for. `apart`: further ranks
    in a group of their own, which leave nothing here.
    """
    get_context("forkserver").set_forkserver_preload(list(IMPORTED_ONCE))
    mp.start_processes(play, args=(str(folder), *given), nprocs=world + apart, start_method="forkserver")
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(world)]


@pytest.fixture(scope="session")
def played(tmp_path_factory):
    """Results of all scenes, by rank, and the lines that rank 0 logged in the first of the loop's."""
    folder = tmp_path_factory.mktemp("two-ranks")
    results = spawned(two_ranks.play, folder, two_ranks.WORLD)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return results, [json.loads(line) for line in lines]


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """Results of four ranks, and of further ones that only part in pairs."""
    return spawned(four_ranks.play, tmp_path_factory.mktemp("four-ranks"), 2 * four_ranks.PAIRS)


@pytest.fixture(scope="session")
def four(pairs):
    """Results of all scenes of four ranks, by rank."""
    return pairs[: four_ranks.WORLD]
