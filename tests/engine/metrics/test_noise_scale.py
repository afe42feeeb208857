"""The noise scale is that of a toy whose gradients have a known mean and covariance."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import nn

from mmray.data.stream.order import SamplePlan
from mmray.engine.metrics import noise_scale
from mmray.objectives.contrastive import Contrastive
from mmray.objectives.protocol import RowLoss
from tests.engine import toy

PLAN = SamplePlan(num_rows=512, global_rows=32, world_size=1, micro=4, seed=1, steps=150)
SCALE = "train/noise_scale"


class Linear(nn.Module):
    """The gradient of a row is its features, whatever the weights are."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3 * toy.SIDE**2))

    def forward(self, batch):
        return {"loss": features(batch) @ self.weight}


class Sum(RowLoss):
    gathered_outputs = scalar_output_names = ()

    def compute_loss(self, outputs, batch, gathered=None):
        return outputs["loss"].sum(), self.count(batch), {}


def features(batch):
    return batch["image"].flatten(1) / 255 - 0.4


def true_noise_scale():
    rows = features(toy.rows(PLAN.num_rows, 0))
    return float(rows.var(0).sum() / rows.mean(0).square().sum())


def log_of(plan, group=None, model=None, **options):
    """The lines of a run with long averages, in which every step is logged."""
    log, train = toy.Lines(), options.pop("train", toy.train_settings(log_every=1))
    with patch.object(noise_scale, "DECAY", 0.99):
        toy.run(model or Linear(), plan, group, log=log, train=train, **{"objective": Sum()} | options)
    return log


def test_noise_scale_is_that_of_known_gradients():
    assert log_of(PLAN)[-1][SCALE] == pytest.approx(true_noise_scale(), rel=0.15)


def test_noise_scale_in_fp16_is_not_scaled_like_the_loss():
    train, plan = toy.train_settings(log_every=1, precision="fp16"), replace(PLAN, steps=50)
    assert log_of(plan, train=train)[-1][SCALE] == pytest.approx(true_noise_scale(), rel=0.5)


@pytest.mark.parametrize("options", [{"model": toy.Toy(), "objective": Contrastive()}, {"group_by_length": True}])
def test_noise_scale_of_dependent_micro_batches_is_not_reported(options):
    plan = SamplePlan(num_rows=32, global_rows=8, world_size=1, micro=2, seed=1, steps=4)
    assert all(SCALE not in line for line in log_of(plan, **options))
    with_accumulation = [line for line in log_of(plan) if SCALE in line]
    assert with_accumulation and all(SCALE not in line for line in log_of(SamplePlan(32, 8, 1, 8, seed=1, steps=4)))


def test_only_logged_steps_are_measured():
    plan = SamplePlan(num_rows=32, global_rows=8, world_size=1, micro=2, seed=1, steps=12)
    with patch.object(noise_scale, "get_total_norm", side_effect=noise_scale.get_total_norm) as spy:
        log_of(plan, train=toy.train_settings(log_every=4))
    assert spy.call_count == 3
