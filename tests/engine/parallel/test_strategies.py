"""Each strategy takes the steps of one process on one device; parallel branches run at the same time."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmray.data.stream.order import SamplePlan
from mmray.engine import loop
from mmray.engine.collectives import Group
from mmray.engine.parallel import branches
from mmray.engine.parallel.branches import BranchParallel
from mmray.objectives.contrastive import Contrastive
from mmray.objectives.sigmoid import Sigmoid
from tests.engine import toy, two_ranks

OBJECTIVES = two_ranks.OBJECTIVES
TOLERANCE = {"bf16": 3e-2, "fp16": 3e-3}  # relative to the update, for gradients communicated in half precision


@pytest.fixture(scope="module")
def single():
    return {kind.__name__: two_ranks.strategy(Group(), kind(), parallel="single") for kind in OBJECTIVES}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", two_ranks.STRATEGIES)
def test_two_ranks_under_any_strategy_equal_one_process(played, single, name, objective):
    plain = single[objective.__name__]
    begun = toy.Branched(bias=objective is Sigmoid).double().state_dict()
    start = torch.cat([tensor.flatten() for tensor in begun.values()])
    tolerance = TOLERANCE.get(two_ranks.STRATEGIES[name].get("grad_compression", ""), 0)
    for result in played[0]:
        found = result["strategies"][f"{name}: {objective.__name__}"]
        error = (found["weights"] - plain["weights"]).norm() / (plain["weights"] - start).norm()
        assert error <= (tolerance or 1e-9)
        assert (error > 1e-9) == (tolerance > 0)  # compression was applied
        assert found["losses"] == pytest.approx(plain["losses"], rel=tolerance or 1e-9)


@pytest.mark.parametrize("name", two_ranks.COMPILED)
def test_two_ranks_with_compiled_branches_equal_one_process(played, name):
    _, objective = two_ranks.COMPILED[name]
    plain = two_ranks.of_compiled(Group(), "single", objective(), "none")
    assert (plain - toy.flat(toy.Branched().double())).abs().max() > 0.01
    for result in played[0]:
        found = result["branches_compiled"][name]
        assert found["graphs"] >= {"ddp": 4, "ddp, row by row": 2, "fsdp": 2}[name]  # per branch and training forward
        torch.testing.assert_close(found["weights"], plain, rtol=0, atol=1e-9)


@pytest.mark.parametrize("way", ["ddp to fsdp", "fsdp to ddp"])
def test_checkpoint_resumes_under_another_strategy(played, single, way):
    for result in played[0]:
        torch.testing.assert_close(result["resharded"][way], single["Contrastive"]["weights"], rtol=0, atol=1e-9)


def test_sharded_checkpoint_resumes_in_one_process(played, single):
    state = played[0][1]["strategies"]["fsdp: Contrastive"]["state"]
    again = two_ranks.strategy(Group(), Contrastive(), state, parallel="single")
    torch.testing.assert_close(again["weights"], single["Contrastive"]["weights"], rtol=0, atol=1e-9)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_branches_on_two_devices_equal_one_device(single, objective):
    found = two_ranks.strategy(Group(), objective(), parallel="branches")
    plain = single[objective.__name__]
    torch.testing.assert_close(found["weights"], plain["weights"], rtol=0, atol=1e-9)
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-9)
    resumed = two_ranks.strategy(Group(), objective(), found["state"], parallel="branches")
    torch.testing.assert_close(resumed["weights"], plain["weights"], rtol=0, atol=1e-9)


class Slow(torch.autograd.Function):
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
        return F.normalize(Slow.apply(self.branch(*columns), self.row_s), dim=-1)


def idle_shares(log):
    return [[line[f"branches/idle_share_{device}"] for device in (0, 1)] for line in log.lines]


def delayed() -> toy.Lines:
    """Log of a run with two branches with equal delays."""
    model = toy.Branched()
    model.image, model.text = Delayed(model.image, 0.004), Delayed(model.text, 0.004)
    log, plan = toy.Lines(), SamplePlan(num_rows=256, global_rows=64, world=1, micro=32, seed=1, steps=6)
    settings = vars(toy.TRAIN) | {"parallel": "branches", "log_every": 1}
    task = toy.task(model, plan, log=log, train=SimpleNamespace(**settings), devices=(torch.device("cpu"),) * 2)
    loop.run(task, toy.steps_of(plan, 0))
    return log


class OneAfterTheOther:
    """Replaces the thread of the second device."""

    def submit(self, work):
        work()
        return SimpleNamespace(result=lambda: None)


def test_devices_waiting_for_each_other_are_reported_as_idle(monkeypatch):
    monkeypatch.setattr(branches, "ThreadPoolExecutor", lambda **_: OneAfterTheOther())
    idle = idle_shares(delayed())[3:]
    assert sum(map(min, idle)) / len(idle) > 0.4


def test_branches_run_at_the_same_time():
    log = delayed()
    idle = idle_shares(log)
    assert sum(map(max, idle[3:])) / len(idle[3:]) <= 0.10
    one_device_s = 2.5 * 64 * 0.008  # a forward and a backward of both branches, and half the rows forward once more
    assert min(line["time/step_s"] for line in log.lines[3:]) < 0.75 * one_device_s  # 0.5 on an idle machine


def test_module_forward_works_with_branches_on_two_devices():
    model = toy.Branched()
    wrapped = BranchParallel(model, (torch.device("cpu"),) * 2)
    batch = toy.rows(5, 0)
    with torch.no_grad():
        for name, value in toy.Branched()(batch).items():
            torch.testing.assert_close(model(batch)[name], value)
            torch.testing.assert_close(wrapped(batch)[name], value)
    assert [name for name, _ in wrapped.named_parameters()] == [
        f"module.{name}" for name, _ in model.named_parameters()
    ]
