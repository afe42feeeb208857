"""The noise scale is that of a toy whose gradients have a known mean and covariance."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn

from mmray.data.stream.order import SamplePlan
from mmray.engine.metrics import noise_scale
from mmray.engine.precision import micro_seed
from mmray.engine.prefetch import make_local_batch
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
    """The lines of a run with long averages, in which every step is measured."""
    log, train = (
        toy.Lines(),
        options.pop("train", toy.train_settings(log_every=1, noise_scale_every=1)),
    )
    with patch.object(noise_scale, "DECAY", 0.99):
        toy.run(
            model or Linear(), plan, group, log=log, train=train, **{"objective": Sum()} | options
        )
    return log


@pytest.mark.parametrize("micro", [4, 10, 32])  # 8, 4 (one of 2 rows), 1 micro-batches
def test_noise_scale_is_that_of_known_gradients(micro):
    assert log_of(replace(PLAN, micro=micro))[-1][SCALE] == pytest.approx(
        true_noise_scale(), rel=0.15
    )


def test_noise_scale_in_fp16_is_not_scaled_like_the_loss():
    train, plan = (
        toy.train_settings(log_every=1, noise_scale_every=1, precision="fp16"),
        replace(PLAN, steps=50),
    )
    assert log_of(plan, train=train)[-1][SCALE] == pytest.approx(true_noise_scale(), rel=0.5)


@pytest.mark.parametrize("kind", ["contrastive", "sigmoid", "contrastive + 0.5 * matching"])
def test_estimates_are_those_of_the_gradients_of_two_batches(kind):
    """Halves of micro-batches 0 and 2, and 1 and 3, compared with one backward each in plain
    torch.
    """
    model = toy.Toy(kind=kind, dropout=0.3).double()
    parts = toy.cut(toy.rows(16, 0), 4)
    gradients = []
    for half in (parts[0::2], parts[1::2]):
        model.zero_grad()
        toy.reference_gradients(model, half, 0, kind)
        gradients.append(toy.flat_gradient(model).clone())
    model.zero_grad()
    one, other = gradients
    state, seed_of = (
        toy.train_state(model, objective=toy.objective(kind)),
        partial(micro_seed, toy.SEED, 0, 0),
    )
    fraction, rows = noise_scale.measure_noise(state, make_local_batch(parts), seed_of, 16)
    assert (
        fraction == pytest.approx(float(one @ other / ((one @ one + other @ other) / 2)), rel=1e-9)
        and rows == 8
    )
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize(
    "options", [{"dropout": 0.3, "kind": "contrastive + 0.5 * matching"}, {"batch_norm": True}]
)
def test_measured_run_takes_the_same_steps(options):
    plan = SamplePlan(num_rows=33, global_rows=10, world_size=1, micro=4, seed=1, steps=4)
    if "batch_norm" in options:
        plan = replace(plan, micro=10)
    weights = []
    for every in (0, 1):
        model, train = toy.Toy(**options), toy.train_settings(noise_scale_every=every)
        toy.run(
            model, plan, train=train, objective=toy.objective(options.get("kind", "contrastive"))
        )
        weights.append(torch.cat([tensor.flatten() for tensor in model.state_dict().values()]))
    assert torch.equal(*weights)


def test_only_due_steps_are_measured():
    plan = SamplePlan(num_rows=32, global_rows=8, world_size=1, micro=2, seed=1, steps=12)
    with patch("mmray.engine.loop.measure_noise", side_effect=noise_scale.measure_noise) as spy:
        lines = log_of(plan, train=toy.train_settings(log_every=2, noise_scale_every=4))
    assert spy.call_count == 3 and [SCALE in line for line in lines] == [False, True] * 3
