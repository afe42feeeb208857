"""The engine on GPUs, true or made up: it takes the steps of a CPU, and the host waits for the device once a step."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_map_only

from mmray.data.order import Plan
from mmray.models.build import build
from mmray.models.synthetic import synthetic_batch
from mmray.train import loop, memory, optimizer, precision
from mmray.train.feed import share_of
from mmray.train.group import Group
from mmray.train.learner import Learner
from mmray.train.shaping import shape
from mmray.train.step import accumulate, suspects
from mmray.train.telemetry import Phases
from mmray.train.writer import copy_to_cpu
from tests.train import real_models, toy
from tests.train.gpus import gpus, true, within
from tests.train.lone_worker import ran, rows_of
from tests.train.made_up_gpu import CPU, DEVICES, OnDevice, share_on

pytestmark = pytest.mark.usefixtures("one_thread")
GPU = DEVICES[0]
PLAN = Plan(num_rows=20, global_rows=8, world=1, micro=3, seed=1, steps=3)  # the last of 4 rows and padding
SETTINGS = vars(toy.TRAIN) | {
    "recompute": (),
    "compile": "none",
    "channels_last": False,
    "log_every": 2,
    "checkpoint_every": 0,
}
QUIET = {"log_every": 0}


def steps_of(spec, first=0):
    for step in range(first, PLAN.steps):
        positions = torch.from_numpy(PLAN.positions(step, 0))
        batch = synthetic_batch(spec.inputs, real_models.VOCAB, len(positions), CPU, seed=step)
        yield toy.cut(batch | {"valid": positions >= 0, "pos": positions}, PLAN.micro)


class Watch:
    """The waits of each step, and the metrics of those that were logged."""

    def __init__(self, waits):
        self.waits, self.counts, self.lines = waits, [waits.count], []

    def on_step(self, step, metrics):
        self.counts.append(self.waits.count)
        self.lines += [metrics] if metrics else []

    def of_steps(self):
        return [after - before for before, after in pairwise(self.counts)]


def task_of(kind, device, double=True, options=None, watch=None, **settings):
    """A run of a built-in kind; the same weights at its begin wherever it runs."""
    spec, objective = real_models.MODELS[kind]
    train = SimpleNamespace(**SETTINGS | settings)
    torch.manual_seed(3)
    model = build(spec, real_models.VOCAB).train()
    model = shape(model.double() if double else model, train, toy.OPTIMIZER, device)
    callbacks = () if watch is None else (watch,)
    given = {"objective": toy.objective(objective), "train": train, "callbacks": callbacks} | (options or {})
    return toy.task(model, PLAN, Group(device=device), **given)


def trained(kind, device, **given):
    """The weights of a whole run, on the CPU."""
    task = task_of(kind, device, **given)
    outcome = loop.run(task, steps_of(real_models.MODELS[kind][0]))
    assert (outcome.status, outcome.steps) == ("finished", PLAN.steps)
    return flat(task.model)


def flat(model):
    return torch.cat([weight.detach().cpu().flatten() for weight in model.parameters()])


@pytest.mark.parametrize("kind", real_models.MODELS)
def test_runs_take_the_steps_of_a_cpu(monkeypatch, kind):
    plain = trained(kind, CPU)
    with gpus(monkeypatch):
        assert (trained(kind, GPU) - plain).abs().max() < within(kind)
        again = trained(kind, GPU, recompute=("image", "text"), channels_last=True, ema=0.9)
    assert (again - plain).abs().max() < within(kind)


@pytest.mark.parametrize("kind", real_models.MODELS)
def test_in_half_precision_the_host_waits_once_a_step(monkeypatch, kind):
    losses = {}
    with gpus(monkeypatch) as waits:
        for number in ("fp32", "bf16", "fp16"):
            watch = Watch(waits)
            weights = trained(kind, GPU, double=False, precision=number, ema=0.9, watch=watch, **QUIET)
            assert watch.of_steps()[1:-1] == [1] * (PLAN.steps - 2)  # the model moves in the first, the last is logged
            assert weights.dtype == torch.float32 and bool(weights.isfinite().all())
            assert watch.lines[-1]["memory/peak_gib"] > 0
            losses[number] = watch.lines[-1]["train/loss"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.05) and losses["bf16"] != losses["fp32"]
    assert math.isfinite(losses["fp16"])  # its first steps may be skipped, until the loss scale fits


@pytest.mark.parametrize("kind", real_models.MODELS)
def test_a_run_goes_on_from_what_it_saved(monkeypatch, kind):
    kept = {}
    with gpus(monkeypatch):
        given = {"options": {"save": lambda step, state, metrics: kept.update({step: copy_to_cpu(state)})}}
        whole = trained(kind, GPU, ema=0.9, **given | {"checkpoint_every": 2})
        assert all(not isinstance(value, OnDevice) for value in tensors_of(kept[2]))
        task = task_of(kind, GPU, ema=0.9)
        loop.run(task, steps_of(real_models.MODELS[kind][0], first=2), kept[2])
        resumed = flat(task.model)
    assert (resumed - whole).abs().max() <= (within(kind) if true() else 0)


def tensors_of(state):
    found = []
    tree_map_only(torch.Tensor, found.append, state)
    assert found
    return found


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@pytest.mark.parametrize("slower", ["image", "text"])
def test_branches_on_two_devices_are_one(monkeypatch, kind, slower):
    plain = trained(kind, CPU)
    with gpus(monkeypatch, count=2):
        options = {"devices": DEVICES, "slower": slower}
        apart = trained(kind, GPU, options=options, parallel="branches", refit_every=2)
    assert (apart - plain).abs().max() < 1e-9


@pytest.mark.parametrize("number", ["bf16", "fp16"])
def test_branches_in_half_precision(monkeypatch, number):
    with gpus(monkeypatch, count=2):
        options = {"devices": DEVICES, "slower": "image"}
        weights = trained("clip", GPU, double=False, options=options, parallel="branches", precision=number)
    assert bool(weights.isfinite().all())


@pytest.mark.parametrize("kind", real_models.MODELS)
def test_the_rehearsal_finds_what_fits_and_leaves_the_model_as_it_was(monkeypatch, kind):
    spec, objective = real_models.MODELS[kind]
    with gpus(monkeypatch):
        model = task_of(kind, GPU, double=False).model
        before, chosen = flat(model), precision.choose("auto", GPU)
        apart = optimizer.build(model, toy.OPTIMIZER)
        phases, group = Phases(GPU), Group(device=GPU)
        learner = Learner(model, toy.objective(objective), group, chosen, apart, chosen.scaler(), {}, phases)

        def batch_of(rows):
            return synthetic_batch(spec.inputs, real_models.VOCAB, rows, GPU)

        found = memory.rehearse(learner, batch_of, 8, None)
        assert torch.equal(flat(model), before)
    assert found.micro == 8 and min(found.table.values()) > 0


@pytest.mark.parametrize("kind", ["sigmoid", "contrastive + 0.5 * matching + region_text"])
def test_what_meets_has_the_gradient_of_a_cpu(monkeypatch, kind):
    def gradient(device):
        learner = toy.learner(toy.Toy(kind=kind).double(), Group(device=device), toy.objective(kind))
        rows = toy.rows(9, 0, invalid=(4,)) | {"pos": torch.arange(9)}
        accumulate(learner, share_on(share_of(toy.cut(rows, 4)), device), lambda index: index)
        return toy.flat_gradient(learner.model).cpu()

    plain = gradient(CPU)
    with gpus(monkeypatch):
        assert torch.allclose(gradient(GPU), plain, rtol=1e-9, atol=1e-12)


def test_rows_that_a_model_fails_on_are_found(monkeypatch):
    with gpus(monkeypatch):
        model = toy.Branched().to(GPU)
        rows = toy.rows(6, 0)
        rows["image"] = rows["image"].float()
        rows["image"][2] = math.nan
        learner = toy.learner(model, Group(device=GPU))
        assert suspects(learner, share_on(share_of(toy.cut(rows, 4)), GPU)).tolist() == [2]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"micro": "auto", "precision": "auto", "ema": 0.9, "recompute": ("text",)},
        {"parallel": "branches"},
        {"parallel": "branches", "precision": "fp16"},
    ],
)
def test_a_worker_does_its_work(monkeypatch, tmp_path, settings):
    """Rehearsal, steps, evaluation and checkpoint; in float32 it comes to what a CPU comes to."""
    prepared, given = rows_of(tmp_path / "set"), {"micro": 4} | settings
    _, plain, _ = ran(prepared, tmp_path / "plain", **given | {"precision": "fp32"})
    with gpus(monkeypatch, count=2 if "parallel" in settings else 1):
        state, lines, notes = ran(prepared, tmp_path / "there", **given, device=GPU)
    assert {tensor.device for tensor in tensors_of(state)} == {CPU}
    assert [line["rows_sha"] for line in lines] == [line["rows_sha"] for line in plain]
    assert ("micro-batches of 8 rows fit" in notes) == (settings.get("micro") == "auto")
    close = 0.1 if "precision" in settings else 0.01 if true() else 1e-4  # a GPU convolves in TF32
    assert lines[-1]["evaluate/loss"] == pytest.approx(plain[-1]["evaluate/loss"], rel=close)
    assert lines[-1]["evaluate/rows"] == 22
