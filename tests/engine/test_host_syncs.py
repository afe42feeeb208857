"""A training step reads from its device once, because each read is a synchronization that idles the device.

Built-in models in each precision are tested in test_on_gpu.py.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest

from mmray.data.stream.order import SamplePlan
from mmray.engine import loop
from mmray.engine.collectives import Group
from mmray.engine.prefetch import make_local_batch
from mmray.engine.step import optimizer_step
from tests.engine import toy
from tests.engine.fake_cuda import DEVICES, share_on
from tests.engine.gpu_devices import gpus

pytestmark = pytest.mark.usefixtures("one_thread")
GPU = DEVICES[0]
QUIET = SimpleNamespace(**vars(toy.TRAIN) | {"log_every": 0, "checkpoint_every": 0})


@pytest.mark.parametrize("clip", ["model", "branch"])
@pytest.mark.parametrize("objective", [toy.objective("contrastive"), toy.Regression()])
def test_unlogged_step_reads_from_the_device_once(monkeypatch, objective, clip):
    """Norms and stop request in one read; three micro-batches."""
    plan = SamplePlan(num_rows=30, global_rows=10, world=1, micro=4, seed=1, steps=6)
    settings = SimpleNamespace(**vars(toy.OPTIMIZER) | {"clip_per": clip})
    with gpus(monkeypatch) as waits:
        model = toy.Branched().to(GPU)
        counts = [waits.count]
        seen = SimpleNamespace(on_step=lambda step, metrics: counts.append(waits.count))
        options = {"objective": objective, "optimizer": settings, "train": QUIET, "callbacks": (seen,)}
        loop.run(toy.task(model, plan, Group(device=GPU), **options), toy.steps_of(plan, 0))
    of_steps = [after - before for before, after in pairwise(counts)]
    assert of_steps[:-1] == [1] * (plan.steps - 1)  # the last is logged


@pytest.mark.parametrize("kind", ["sigmoid", "language_modelling", "contrastive + 0.5 * matching + region_text"])
def test_step_of_each_objective_reads_from_the_device_once(monkeypatch, kind):
    share = make_local_batch(toy.cut(toy.rows(9, 0), 4))
    with gpus(monkeypatch) as waits:
        state = toy.train_state(toy.Toy(kind=kind), Group(device=GPU), toy.objective(kind))
        moved, before = share_on(share, GPU), waits.count
        assert optimizer_step(state, moved, lambda index: index).finite
        assert waits.count == before + 1
