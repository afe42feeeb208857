"""Each strategy takes the steps of one process on one device; parallel branches run at the same time."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmray.data.stream.order import SamplePlan
from mmray.engine.collectives import Group
from tests.engine import ranks, toy

OBJECTIVES = tuple(ranks.OOM_OBJECTIVES)
TOLERANCE = {"bf16 gradients": 3e-2, "fp16 gradients": 3e-3}  # relative to the update
CPUS = (torch.device("cpu"),) * 2


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


class Sleep(torch.autograd.Function):
    """Sleeps for each row, in forward and backward."""

    @staticmethod
    def forward(ctx, rows, row_s):
        ctx.row_s = row_s
        time.sleep(len(rows) * row_s)
        return rows.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(len(gradient) * ctx.row_s)
        return gradient, None


class Delayed(nn.Module):
    """A branch that takes `row_s` seconds per row in forward and in backward."""

    def __init__(self, branch: nn.Module, row_s: float):
        super().__init__()
        self.branch, self.row_s = branch, row_s

    def forward(self, *columns):
        return F.normalize(Sleep.apply(self.branch(*columns), self.row_s), dim=-1)


def test_branches_run_at_the_same_time():
    """With equal delays, no device is idle."""
    model = toy.Branched()
    model.image, model.text = Delayed(model.image, 0.004), Delayed(model.text, 0.004)
    log, plan = toy.Lines(), SamplePlan(num_rows=256, global_rows=64, world=1, micro=32, seed=1, steps=6)
    train = toy.train_settings(parallel="branches", log_every=1)
    toy.run(model, plan, log=log, train=train, devices=CPUS)
    idle = [[line[f"branches/idle_share_{device}"] for device in (0, 1)] for line in log[3:]]
    assert sum(map(max, idle)) / len(idle) <= 0.10
    one_device_s = 2.5 * 64 * 0.008  # a forward and a backward of both branches, and half the rows forward once more
    assert min(line["time/step_s"] for line in log[3:]) < 0.75 * one_device_s  # 0.5 on an idle machine
