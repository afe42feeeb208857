"""The engine on GPUs, real or fake, takes the steps of a CPU and synchronizes once per step."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from mmray.data.stream.order import SamplePlan
from mmray.engine import loop
from mmray.engine.checkpoint.state_io import HostStager
from mmray.engine.collectives import Group
from mmray.engine.metrics.timers import PhaseTimers
from mmray.engine.parallel.transforms import apply_transforms
from mmray.engine.prefetch import DeviceCopier, make_local_batch
from mmray.engine.step import accumulate_gradients, optimizer_step
from mmray.errors import OutOfMemoryError
from mmray.models.build import build
from mmray.models.synthetic import synthetic_batch
from tests.engine import recipe_models, toy
from tests.engine.fake_cuda import CPU, DEVICES, DeviceTensor, fake_gpus, gpus, has_gpus, local_batch_on, tolerance
from tests.engine.single_worker import make_prepared, run_worker

GPU = DEVICES[0]
PLAN = SamplePlan(num_rows=20, global_rows=8, world_size=1, micro=3, seed=1, steps=3)
LONG_PLAN = replace(PLAN, steps=6)
QUIET = {"log_every": 0, "checkpoint_every": 0}


def steps_of(spec, first=0):
    """The last step has invalid rows, and a micro-batch of only these."""
    for step in range(first, PLAN.steps):
        positions = torch.from_numpy(PLAN.positions(step, 0))
        batch = synthetic_batch(spec.inputs, recipe_models.VOCAB, len(positions), CPU, seed=step)
        yield toy.cut(batch | {"valid": positions < PLAN.num_rows, "pos": positions}, PLAN.micro)


class SyncsPerStep:
    """A callback that keeps the synchronizations of each step, and the logged metrics."""

    def __init__(self, syncs):
        self.syncs, self.counts, self.lines = syncs, [syncs.count], []

    def on_step(self, step, metrics):
        self.counts.append(self.syncs.count)
        self.lines += [metrics] if metrics else []

    def per_step(self):
        return [after - before for before, after in pairwise(self.counts)]


def spec_of(kind, device, double=True, options=None, **settings):
    """A run of a built-in kind, with the same initial weights on each device."""
    spec, objective = recipe_models.MODELS[kind]
    train = toy.train_settings(**{"checkpoint_every": 0} | settings)
    torch.manual_seed(3)
    model = build(spec, recipe_models.VOCAB).train()
    model = apply_transforms(model.double() if double else model, train, toy.OPTIMIZER, device)
    options = {"objective": toy.objective(objective), "train": train} | (options or {})
    return toy.train_spec(model, PLAN, Group(device=device), **options)


def train(kind, device, **options):
    """The final weights of a run, on the CPU."""
    spec = spec_of(kind, device, **options)
    outcome = loop.train_loop(spec, steps_of(recipe_models.MODELS[kind][0]))
    assert (outcome.status, outcome.steps) == ("finished", PLAN.steps)
    return toy.flat(spec.model)


def test_fake_gpus_refuse_mixed_devices_and_count_synchronizations(monkeypatch):
    with fake_gpus(monkeypatch) as syncs:
        numbers = torch.ones(3, device=GPU) * 2
        for elsewhere in (CPU, DEVICES[1]):
            with pytest.raises(RuntimeError, match="same device"):
                numbers + torch.ones(3, device=elsewhere)
        assert syncs.count == 0
        reads = (torch.Tensor.cpu, torch.nonzero, lambda it: it.tolist(), lambda it: it[it > 0])
        for count, read in enumerate(reads, 1):
            read(numbers)
            assert syncs.count == count


@pytest.mark.parametrize("kind", ["sigmoid", "language_modelling", "contrastive + 0.5 * matching + region_text"])
def test_step_of_each_objective_synchronizes_once_with_gradients_of_a_cpu(monkeypatch, kind):
    batch = make_local_batch(toy.cut(toy.rows(9, 0, invalid=(4,)), 4))

    def gradient(device):
        state = toy.train_state(toy.Toy(kind=kind).double(), Group(device=device), toy.objective(kind))
        accumulate_gradients(state, local_batch_on(batch, device), lambda index: index)
        return torch.cat([p.grad.cpu().flatten() for p in state.model.parameters() if p.grad is not None])

    expected = gradient(CPU)
    with gpus(monkeypatch) as syncs:
        assert torch.allclose(gradient(GPU), expected, rtol=1e-9, atol=1e-12)
        state = toy.train_state(toy.Toy(kind=kind), Group(device=GPU), toy.objective(kind))
        moved, before = local_batch_on(batch, GPU), syncs.count
        assert optimizer_step(state, moved, lambda index: index).is_finite
        assert syncs.count == before + 1


@pytest.mark.parametrize("kind", recipe_models.MODELS)
def test_run_on_gpu_equals_run_on_cpu_and_resumes(monkeypatch, kind):
    """With EMA, activation checkpointing and channels-last."""
    expected, states = train(kind, CPU), {}

    def save(step, state, metrics, last):
        states[step] = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state)

    settings = {"activation_checkpointing": ("image", "text"), "channels_last": True, "ema": 0.9}
    with gpus(monkeypatch):
        whole = train(kind, GPU, options={"save": save}, checkpoint_every=2, **settings)
        assert not any(isinstance(value, DeviceTensor) for value in tree_leaves(states[2]))
        spec = spec_of(kind, GPU, **settings)
        loop.train_loop(spec, steps_of(recipe_models.MODELS[kind][0], first=2), lambda _: states[2])
        resumed = toy.flat(spec.model)
    assert (whole - expected).abs().max() < tolerance(kind)
    assert (resumed - whole).abs().max() <= (tolerance(kind) if has_gpus() else 0)


def test_oom_of_prefetched_batch_restarts(monkeypatch):
    """On fake GPUs, which copy one batch after the other."""
    copy, calls = DeviceCopier.__call__, iter(range(10**6))

    def fail_at_second(copier, batch):
        if next(calls) == 1:
            raise torch.OutOfMemoryError("allocation failed for the next batch")
        return copy(copier, batch)

    monkeypatch.setattr(DeviceCopier, "__call__", fail_at_second)
    message = r"out of memory after step 1 with micro-batches of 3 rows \(rank 0: allocation failed for the next batch"
    with fake_gpus(monkeypatch), pytest.raises(OutOfMemoryError, match=message) as raised:
        toy.run(toy.Toy().double().to(GPU), LONG_PLAN, Group(device=GPU))
    assert raised.value.retry_micro == 2


def test_step_is_copied_at_once_through_memory_that_is_reused(monkeypatch):
    """A ragged step, with columns of every type and one without elements; the host overwrites the memory afterwards."""
    steps = [toy.cut(toy.rows(rows, step, invalid=(1,)), 4) for step, rows in enumerate((9, 9, 40))]
    for micro_batches in steps:
        micro_batches[0]["boxes"] = micro_batches[0]["boxes"][:, :0]
    with gpus(monkeypatch):
        copier, pins, copied = DeviceCopier(GPU, PhaseTimers(GPU)), [], []
        for micro_batches in steps:
            batch = copier(make_local_batch(micro_batches))
            pins.append(copier._pinned)
            torch.cuda.synchronize()
            copied.append([{name: tensor.cpu() for name, tensor in each.items()} for each in batch.batch.micro_batches])
            assert all(tensor.device == GPU for each in batch.batch.micro_batches for tensor in each.values())
    assert pins[0] is pins[1] and len(pins[2]) > len(pins[1])
    for step, micro_batches in zip(copied, steps, strict=True):
        for got, expected in zip(step, make_local_batch(micro_batches).micro_batches, strict=True):
            assert got.keys() == expected.keys()
            for name, tensor in expected.items():
                assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


def test_copy_of_a_checkpoint_is_awaited_by_its_write_and_on_the_device_by_the_next_update(monkeypatch):
    calls, weight = [], torch.nn.Parameter(torch.ones(2))
    weight.grad, optimizer = torch.ones(2), torch.optim.SGD([weight], lr=0.1)
    side = SimpleNamespace(device=GPU, wait_stream=calls.append, synchronize=lambda: calls.append("host"))
    compute = SimpleNamespace(wait_stream=calls.append)
    with fake_gpus(monkeypatch):
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
        stager = HostStager()
        staged = stager.stage({"w": torch.ones(2, device=GPU), "step": torch.ones(())})
        assert all(tensor.device == CPU for tensor in staged.values()) and calls == [compute]
        optimizer.step()
        assert calls == [compute, side]
        stager.synchronize_staging()
        stager.close()
        optimizer.step()
    assert calls == [compute, side, "host", "host"]


@pytest.mark.parametrize("kind", recipe_models.MODELS)
def test_half_precision_synchronizes_once_per_step(monkeypatch, kind):
    losses = {}
    with gpus(monkeypatch) as syncs:
        for number in ("fp32", "bf16", "fp16"):
            callback = SyncsPerStep(syncs)
            options = {"options": {"callbacks": (callback,)}, "precision": number, "ema": 0.9}
            weights = train(kind, GPU, double=False, **options, **QUIET)
            assert callback.per_step()[1:-1] == [1] * (PLAN.steps - 2)  # the model moves in the first; the last logs
            assert weights.dtype == torch.float32 and bool(weights.isfinite().all())
            assert callback.lines[-1]["memory/peak_gib"] > 0
            losses[number] = callback.lines[-1]["train/loss"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.05) and losses["bf16"] != losses["fp32"]
    assert math.isfinite(losses["fp16"])  # its first steps may be skipped, until the loss scale fits


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_branches_on_two_gpus_equal_one_device(monkeypatch, kind):
    expected = train(kind, CPU)
    with gpus(monkeypatch, count=2):
        weights = train(kind, GPU, parallel="branches")
        half = [train(kind, GPU, double=False, precision=number, parallel="branches") for number in ("bf16", "fp16")]
    assert (weights - expected).abs().max() < 1e-9
    assert all(bool(weights.isfinite().all()) for weights in half)


@pytest.mark.parametrize(
    "settings",
    [
        {"micro": "auto", "precision": "auto", "ema": 0.9, "activation_checkpointing": ("text",)},
        {"parallel": "branches"},
    ],
)
def test_worker_probes_trains_evaluates_and_saves(monkeypatch, tmp_path, settings):
    """In float32 the results equal those of a CPU."""
    prepared, options = make_prepared(tmp_path / "set"), {"micro": 4} | settings
    _, expected, _ = run_worker(prepared, tmp_path / "cpu", **options | {"precision": "fp32"})
    with gpus(monkeypatch, count=2 if "parallel" in settings else 1):
        state, lines, notes = run_worker(prepared, tmp_path / "gpu", options={"device": GPU}, **options)
    assert {leaf.device for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)} == {CPU}
    assert [line["rows_sha"] for line in lines] == [line["rows_sha"] for line in expected]
    assert ("micro-batches of 8 rows fit" in notes) == (settings.get("micro") == "auto")
    close = 0.1 if "precision" in settings else 0.01 if has_gpus() else 1e-4  # a GPU convolves in TF32
    assert lines[-1]["evaluate/loss"] == pytest.approx(expected[-1]["evaluate/loss"], rel=close)
    assert lines[-1]["evaluate/rows"] == 22
