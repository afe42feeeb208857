"""A step on several ranks has the gradient of one, and no rank waits for images of another."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from mmray.data.stream.token_batches import assign_rows
from mmray.data.vlm.encoder import ProcessorEncoder
from mmray.engine.collectives import Group
from tests.engine.conftest import spawn_ranks
from tests.models.vlm import folders, two_ranks
from tests.models.vlm.rows import double_model, encode_rows

# Run by the process of pytest that has started the fork server.
pytestmark = pytest.mark.usefixtures("forked_children")
FAMILIES = [
    family
    for family in folders.FAMILIES
    if family != "smolvlm" or importlib.util.find_spec("num2words")
]


@pytest.fixture(scope="module")
def results(folder_of, tmp_path_factory):
    """One family takes 4 steps before, in which a rank often has no image."""
    steps = {"qwen3_vl": 4}
    models = {each: (str(folder_of(each)), steps.get(each, 0)) for each in FAMILIES}
    return spawn_ranks(two_ranks.main, tmp_path_factory.mktemp("ranks"), 2, models)


def check_gradients(family, results, folder_of):
    expected = two_ranks.gradient(double_model(folder_of(family)), Group(), "ddp")
    tolerance = 1e-7 if family == "gemma3" else 1e-9
    for parallel in ("ddp", "fsdp"):
        first, second = (rank[f"{family} {parallel}"] for rank in results)
        assert torch.equal(first, second)
        difference = (first - expected).abs().max()
        assert difference < tolerance * expected.abs().max(), parallel


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_of_two_ranks_equals_that_of_one(family, results, folder_of):
    check_gradients(family, results, folder_of)


def test_ranks_of_a_node_divide_its_rows_under_hsdp(folder_of, tmp_path):
    """The first of two nodes has rows without images only."""
    weights = str(folder_of("qwen3_vl"))
    rows = encode_rows(ProcessorEncoder(weights, 500, frames=4))
    step = [0, 0, 0, 0, 2, 1, 4, 3]
    num_tokens = np.array([len(rows[number].input_ids) for number in step])
    assignment = assign_rows(num_tokens, 4, int(num_tokens.max()), ranks_per_group=2)
    split = [[[step[index] for index in part] for part in rank] for rank in assignment]
    assert {number for rank in split[:2] for part in rank for number in part} == {0}
    expected = two_ranks.gradient(double_model(weights), Group(), "ddp", split=split)
    for result in spawn_ranks(two_ranks.hybrid, tmp_path, 4, weights, split):
        assert (result - expected).abs().max() < 1e-9 * expected.abs().max()


@pytest.mark.slow  # two minutes
@pytest.mark.timeout(900)
def test_no_rank_waits_in_200_steps_in_which_it_often_has_no_image(folder_of, tmp_path):
    weights = str(folder_of("qwen3_vl"))
    models = {"qwen3_vl": (weights, 200)}
    check_gradients("qwen3_vl", spawn_ranks(two_ranks.main, tmp_path, 2, models), folder_of)
