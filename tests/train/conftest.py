"""Two gloo ranks, started once for all tests that ask what they came to."""

import json

import pytest
import torch
import torch.multiprocessing as mp

from tests.train import two_ranks


@pytest.fixture(scope="session")
def played(tmp_path_factory):
    """Results of all scenes, by rank, and the lines that rank 0 logged in the first of the loop's."""
    folder = tmp_path_factory.mktemp("two-ranks")
    mp.spawn(two_ranks.play, args=(str(folder),), nprocs=two_ranks.WORLD)
    results = [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(two_ranks.WORLD)]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return results, [json.loads(line) for line in lines]
