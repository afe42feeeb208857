"""The engine on GPUs, real or fake, takes the steps of a CPU and synchronizes once per step."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_map_only

from mmray.data.stream.order import SamplePlan
from mmray.engine import loop, memory_probe, optimizer, precision
from mmray.engine.collectives import Group
from mmray.engine.metrics.timers import PhaseTimers
from mmray.engine.parallel.transforms import apply_transforms
from mmray.engine.prefetch import make_local_batch
from mmray.engine.run_state import TrainState
from mmray.engine.step import accumulate_gradients, nonfinite_samples
from mmray.errors import OutOfMemoryError
from mmray.models.build import build
from mmray.models.synthetic import synthetic_batch
from tests.engine import recipe_models, toy
from tests.engine.fake_cuda import CPU, DEVICES, OnDevice, made_up_gpus, share_on
from tests.engine.gpu_devices import gpus, true, within
from tests.engine.single_worker import ran, rows_of

pytestmark = pytest.mark.usefixtures("one_thread")
GPU = DEVICES[0]
PLAN = SamplePlan(num_rows=20, global_rows=8, world=1, micro=3, seed=1, steps=3)  # the last of 4 rows and padding
SETTINGS = vars(toy.TRAIN) | {
    "activation_checkpointing": (),
    "compile": "none",
    "channels_last": False,
    "log_every": 2,
    "checkpoint_every": 0,
}
QUIET = {"log_every": 0}


def steps_of(spec, first=0):
    for step in range(first, PLAN.steps):
        positions = torch.from_numpy(PLAN.positions(step, 0))
        batch = synthetic_batch(spec.inputs, recipe_models.VOCAB, len(positions), CPU, seed=step)
        yield toy.cut(batch | {"valid": positions >= 0, "pos": positions}, PLAN.micro)


class Watch:
    """The synchronizations of each step, and the logged metrics."""

    def __init__(self, waits):
        self.waits, self.counts, self.lines = waits, [waits.count], []

    def on_step(self, step, metrics):
        self.counts.append(self.waits.count)
        self.lines += [metrics] if metrics else []

    def of_steps(self):
        return [after - before for before, after in pairwise(self.counts)]


def task_of(kind, device, double=True, options=None, watch=None, **settings):
    """A run of a built-in kind, with the same initial weights on each device."""
    spec, objective = recipe_models.MODELS[kind]
    train = SimpleNamespace(**SETTINGS | settings)
    torch.manual_seed(3)
    model = build(spec, recipe_models.VOCAB).train()
    model = apply_transforms(model.double() if double else model, train, toy.OPTIMIZER, device)
    callbacks = () if watch is None else (watch,)
    given = {"objective": toy.objective(objective), "train": train, "callbacks": callbacks} | (options or {})
    return toy.task(model, PLAN, Group(device=device), **given)


def trained(kind, device, **given):
    """The final weights of a run, on the CPU."""
    task = task_of(kind, device, **given)
    outcome = loop.run(task, steps_of(recipe_models.MODELS[kind][0]))
    assert (outcome.status, outcome.steps) == ("finished", PLAN.steps)
    return flat(task.model)


def flat(model):
    return torch.cat([weight.detach().cpu().flatten() for weight in model.parameters()])


@pytest.mark.parametrize("kind", recipe_models.MODELS)
def test_run_on_gpu_equals_run_on_cpu(monkeypatch, kind):
    plain = trained(kind, CPU)
    with gpus(monkeypatch):
        assert (trained(kind, GPU) - plain).abs().max() < within(kind)
        again = trained(kind, GPU, activation_checkpointing=("image", "text"), channels_last=True, ema=0.9)
    assert (again - plain).abs().max() < within(kind)


def rows_there():
    """Rows of images that are on a GPU now."""
    there = (thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor) and thing.dtype == torch.uint8)
    return sum(len(tensor) for tensor in there if tensor.device.type == "cuda" and tensor.ndim == 4)


class Crowded(toy.Toy):
    """Keeps the number of rows on the GPU during training forwards."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def forward(self, batch):
        if torch.is_grad_enabled():
            self.rows.append(rows_there())
        return super().forward(batch)


LONGER = replace(PLAN, steps=6)
SHARE = 8  # rows


def test_two_batches_are_on_the_gpu_in_steps_and_in_the_probe(monkeypatch):
    with gpus(monkeypatch):
        model = Crowded().to(GPU)
        scored = lambda step, _: {"rows": float(rows_there())}  # noqa: E731
        task = toy.task(model, LONGER, Group(device=GPU), evaluate=scored, evaluate_every=2)
        outcome = loop.run(task, toy.steps_of(LONGER, 0))
        assert max(model.rows) == 2 * SHARE and max(model.rows[-2:]) <= SHARE
        assert outcome.metrics["evaluate/rows"] == 0  # the last batch is freed, and there is no next one
        tried = Crowded().to(GPU)
        batch_of = lambda rows: {name: it.to(GPU) for name, it in toy.rows(rows, 0).items()}  # noqa: E731
        memory_probe.probe_memory(toy.train_state(tried, Group(device=GPU)), batch_of, SHARE, 2)
    assert min(tried.rows) >= 2 * SHARE


def pinned_until(full):
    """Replaces memory pinning and fails at the numbered calls."""
    calls = iter(range(10**6))

    def pin(tensor):
        if next(calls) in full:
            raise torch.OutOfMemoryError("no room for the next share")
        return tensor

    return pin


FIRST = len(toy.rows(1, 0)) * 3  # pinned columns of the first batch's micro-batches


def late(monkeypatch, full):
    """A run in which pinning fails at the calls `full`; on fake GPUs, which copy one batch after the other."""
    with made_up_gpus(monkeypatch):
        monkeypatch.setattr(torch.Tensor, "pin_memory", pinned_until(full))
        model = toy.Toy().double().to(GPU)
        loop.run(toy.task(model, LONGER, Group(device=GPU)), toy.steps_of(LONGER, 0))
        return flat(model)


def test_oom_of_prefetched_batch_retries_it_after_the_step(monkeypatch):
    plain = toy.Toy().double()
    loop.run(toy.task(plain, LONGER), toy.steps_of(LONGER, 0))
    found = late(monkeypatch, {FIRST, FIRST + 1})  # the second batch, and the third
    assert torch.allclose(found, toy.flat(plain), rtol=0, atol=1e-9)


def test_oom_of_batch_between_steps_restarts_with_smaller_micro_batches(monkeypatch):
    said = r"out of memory after step 1 with micro-batches of 3 rows \(rank 0: no room for the next share\)"
    with pytest.raises(OutOfMemoryError, match=said) as met:
        late(monkeypatch, {FIRST, FIRST + 1, FIRST + 2})
    assert met.value.micro == 1


@pytest.mark.parametrize("kind", recipe_models.MODELS)
def test_half_precision_synchronizes_once_per_step(monkeypatch, kind):
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


@pytest.mark.parametrize("kind", recipe_models.MODELS)
def test_run_resumes_from_its_checkpoint(monkeypatch, kind):
    kept = {}
    with gpus(monkeypatch):
        given = {"options": {"save": lambda step, state, metrics, last: kept.update({step: copy_to_cpu(state)})}}
        whole = trained(kind, GPU, ema=0.9, **given | {"checkpoint_every": 2})
        assert all(not isinstance(value, OnDevice) for value in tensors_of(kept[2]))
        task = task_of(kind, GPU, ema=0.9)
        loop.run(task, steps_of(recipe_models.MODELS[kind][0], first=2), lambda _: kept[2])
        resumed = flat(task.model)
    assert (resumed - whole).abs().max() <= (within(kind) if true() else 0)


def copy_to_cpu(state):
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state)


def tensors_of(state):
    found = []
    tree_map_only(torch.Tensor, found.append, state)
    assert found
    return found


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_branches_on_two_gpus_equal_one_device(monkeypatch, kind):
    plain = trained(kind, CPU)
    with gpus(monkeypatch, count=2):
        options = {"devices": DEVICES}
        apart = trained(kind, GPU, options=options, parallel="branches")
    assert (apart - plain).abs().max() < 1e-9


@pytest.mark.parametrize("number", ["bf16", "fp16"])
def test_branches_on_two_gpus_in_half_precision(monkeypatch, number):
    with gpus(monkeypatch, count=2):
        options = {"devices": DEVICES}
        weights = trained("clip", GPU, double=False, options=options, parallel="branches", precision=number)
    assert bool(weights.isfinite().all())


@pytest.mark.parametrize("kind", recipe_models.MODELS)
def test_probe_finds_fitting_size_and_leaves_model_unchanged(monkeypatch, kind):
    spec, objective = recipe_models.MODELS[kind]
    with gpus(monkeypatch):
        model = task_of(kind, GPU, double=False).model
        before, chosen = flat(model), precision.select_precision("auto", GPU)
        apart = optimizer.build_optimizer(model, toy.OPTIMIZER)
        timers, group = PhaseTimers(GPU), Group(device=GPU)
        state = TrainState(model, toy.objective(objective), group, chosen, apart, chosen.scaler(), {}, timers)

        def batch_of(rows):
            return synthetic_batch(spec.inputs, recipe_models.VOCAB, rows, GPU)

        found = memory_probe.probe_memory(state, batch_of, 8, None)
        assert torch.equal(flat(model), before)
    assert found.micro == 8 and min(found.table.values()) > 0


@pytest.mark.parametrize("kind", ["sigmoid", "contrastive + 0.5 * matching + region_text"])
def test_collectives_have_gradients_equal_to_cpu(monkeypatch, kind):
    def gradient(device):
        state = toy.train_state(toy.Toy(kind=kind).double(), Group(device=device), toy.objective(kind))
        rows = toy.rows(9, 0, invalid=(4,)) | {"pos": torch.arange(9)}
        accumulate_gradients(state, share_on(make_local_batch(toy.cut(rows, 4)), device), lambda index: index)
        return toy.flat_gradient(state.model).cpu()

    plain = gradient(CPU)
    with gpus(monkeypatch):
        assert torch.allclose(gradient(GPU), plain, rtol=1e-9, atol=1e-12)


def test_rows_with_non_finite_output_are_named_on_gpu(monkeypatch):
    with gpus(monkeypatch):
        model = toy.Branched().to(GPU)
        rows = toy.rows(6, 0)
        rows["image"] = rows["image"].float()
        rows["image"][2] = math.nan
        state = toy.train_state(model, Group(device=GPU))
        assert nonfinite_samples(state, share_on(make_local_batch(toy.cut(rows, 4)), GPU)).tolist() == [2]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"micro": "auto", "precision": "auto", "ema": 0.9, "activation_checkpointing": ("text",)},
        {"parallel": "branches"},
        {"parallel": "branches", "precision": "fp16"},
    ],
)
def test_worker_probes_trains_evaluates_and_saves(monkeypatch, tmp_path, settings):
    """In float32 the results equal those of a CPU."""
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
