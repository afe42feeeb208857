"""A step on two ranks has the gradient of one, and no rank waits for images of another."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from mmray.engine.collectives import Group
from tests.engine.conftest import spawn_ranks
from tests.models.vlm import folders, two_ranks

FAMILIES = [
    family
    for family in folders.FAMILIES
    if family != "smolvlm" or importlib.util.find_spec("num2words")
]


@pytest.fixture(scope="module")
def results(folder_of, tmp_path_factory):
    """Two families take 20 steps before, in which a rank often has no image."""
    steps = {"qwen3_vl": 20, "gemma3": 20}
    models = {each: (str(folder_of(each)), steps.get(each, 0)) for each in FAMILIES}
    return spawn_ranks(two_ranks.main, tmp_path_factory.mktemp("ranks"), 2, models)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_of_two_ranks_equals_that_of_one(family, parallel, results, folder_of):
    expected = two_ranks.gradient(str(folder_of(family)), Group(), "ddp")
    tolerance = 1e-7 if family == "gemma3" else 1e-9
    for rank in results:
        difference = (rank[f"{family} {parallel}"] - expected).abs().max()
        assert difference < tolerance * expected.abs().max()
    assert torch.equal(results[0][f"{family} {parallel}"], results[1][f"{family} {parallel}"])
