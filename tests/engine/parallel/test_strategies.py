"""Each strategy takes the steps of one process on one device."""

from __future__ import annotations

import pytest
import torch

from mmray.engine.collectives import Group
from tests.engine import ranks, toy

OBJECTIVES = tuple(ranks.OOM_OBJECTIVES)
TOLERANCE = {"bf16 gradients": 3e-2, "fp16 gradients": 3e-3}  # relative to the update


@pytest.fixture(scope="module")
def single():
    return {objective: ranks.train_strategy(Group(), objective, parallel="single") for objective in OBJECTIVES}


@pytest.mark.parametrize("name", ranks.STRATEGIES)
def test_ranks_under_any_strategy_equal_one_process(two, single, name):
    objective, _ = ranks.STRATEGIES[name]
    expected, tolerance = single[objective], TOLERANCE.get(name, 0)
    initial = toy.Branched(kind=objective).double().state_dict().values()
    start = torch.cat([tensor.flatten() for tensor in initial])
    for result in two:
        result = result["strategies"][name]
        error = (result["weights"] - expected["weights"]).norm() / (expected["weights"] - start).norm()
        assert error <= (tolerance or 1e-9)
        assert (error > 1e-9) == (tolerance > 0)  # compression was applied
        assert result["losses"] == pytest.approx(expected["losses"], rel=tolerance or 1e-9)


@pytest.mark.parametrize("name", ranks.COMPILED)
def test_ranks_with_compiled_branches_equal_eager_ones_with_dropout(two, name):
    for result in two:
        result = result["compiled"][name]
        assert result["graphs"] >= (2 if "row-wise" in name else 4)  # per branch and training forward
        toy.assert_equal_weights(result["weights"], result["eager"], result["start"])


def test_checkpoint_resumes_under_another_strategy(two, single):
    for result in two:
        for name in ("ddp to fsdp", "fsdp to ddp"):
            toy.assert_equal_weights(result["strategies"][name]["weights"], single["contrastive"]["weights"])
    state = two[1]["strategies"]["fsdp, contrastive"]["state"]
    resumed = ranks.train_strategy(Group(), "contrastive", state, parallel="single")
    toy.assert_equal_weights(resumed["weights"], single["contrastive"]["weights"])


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_branches_on_two_devices_equal_one_device(single, objective):
    expected, result = single[objective], ranks.train_strategy(Group(), objective, parallel="branches")
    toy.assert_equal_weights(result["weights"], expected["weights"])
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-9)
    resumed = ranks.train_strategy(Group(), objective, result["state"], parallel="branches")
    toy.assert_equal_weights(resumed["weights"], expected["weights"])
